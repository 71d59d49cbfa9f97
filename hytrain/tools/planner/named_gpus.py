"""A cluster put together from devices of data sheets."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hytrain.errors import PlanError, did_you_mean
from hytrain.formats.profile_file import DeviceProfile, HostProfile, ProfileFile
from hytrain.tools.planner.device_sheets import (
    SHEETS,
    ModelShape,
    estimated_device,
    estimated_host,
    sheet_of,
)

_COUNTED = re.compile(r"(\d+)x(?=.*[A-Za-z])(.+)")


def expand(names: Sequence[str]) -> list[str]:
    """Names with counts, "2xl4" or "2x l4", as one name a device."""
    found: list[str] = []
    for name in names:
        counted = _COUNTED.fullmatch(name.strip())
        count = int(counted[1]) if counted else 1
        if count < 1:
            raise PlanError(f"{name}: 0 devices of a kind")
        found += [counted[2].strip() if counted else name.strip()] * count
    return found


def _meant(name: str) -> str:
    """An unknown name, with what it may be meant to be."""
    if name.isdigit():
        return f"{name} (write {name}xNAME, as {name}xh100)"
    counted = re.fullmatch(r"(.+?)[x*:](\d+)", name)
    if counted and sheet_of(counted[1]):
        return f"{name} (write {counted[2]}x{counted[1]})"
    meant = did_you_mean(name.lower(), SHEETS).strip()
    return f"{name} ({meant})" if meant else name


def hosts_of(names: Sequence[str], per_host: Sequence[int] | None) -> list[list[str]]:
    """The devices of each host; all of one host where nobody says how many each has.

    Raises:
        PlanError: the hosts do not have exactly these devices.
    """
    counts = [len(names)] if per_host is None else list(per_host)
    if sum(counts) != len(names):
        raise PlanError(
            f"--hosts {' '.join(map(str, counts))} are {sum(counts)} GPUs together, but --gpus "
            f"names {len(names)}: give numbers that sum to it"
        )
    groups: list[list[str]] = []
    for count in counts:
        begin = sum(len(group) for group in groups)
        groups.append(list(names[begin : begin + count]))
    return groups


def estimated_cluster(
    groups: Sequence[Sequence[str]],
    shape: ModelShape,
    *,
    cores: int = 16,
    memory_bytes: int = 64 * 1024**3,
    bandwidth: float = 1e11,
) -> ProfileFile:
    """Hosts with devices of the shipped data sheets, with a model.

    Raises:
        PlanError: there is no data sheet for a name.
    """
    unknown = {name: None for names in groups for name in names if sheet_of(name) is None}
    if unknown:
        raise PlanError(
            f"no data sheet of a GPU called {', '.join(map(_meant, unknown))}: there are "
            f"{', '.join(SHEETS)}; several of a kind: 4xh100"
        )
    hosts: list[HostProfile] = []
    devices: dict[tuple[str, str], DeviceProfile] = {}
    for number, names in enumerate(groups):
        host = f"host{number}"
        labels: list[str] = []
        for name in names:
            sheet = sheet_of(name)
            assert sheet is not None
            device = estimated_device(sheet, shape, host)
            devices[host, device.label] = device
            labels.append(device.label)
        hosts.append(
            estimated_host(
                host,
                tuple(labels),
                cores=cores,
                memory_bytes=memory_bytes,
                bandwidth=bandwidth,
                moments=shape.model.moments,
            )
        )
    return ProfileFile(model=shape.model, devices=tuple(devices.values()), hosts=tuple(hosts))
