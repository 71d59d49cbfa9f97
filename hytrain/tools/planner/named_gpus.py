"""A cluster put together from profiles of its devices, measured elsewhere or estimated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hytrain.errors import PlanError, did_you_mean
from hytrain.formats.profile_file import CollectiveProfile, DeviceProfile, HostProfile, ProfileFile
from hytrain.tools.planner.device_sheets import (
    SHEETS,
    ModelShape,
    estimated_device,
    estimated_host,
    sheet_of,
)

_GIB = 1024**3
_COUNTED = re.compile(r"(\d+)x(?=.*[A-Za-z])(.+)")
# Of a host that nobody has described.
_CORES = 16
_HOST_BYTES = 64 * _GIB
_BANDWIDTH = 1e11


@dataclass(frozen=True, slots=True)
class HostWishes:
    """What is known of hosts that were not measured; None: as measured, or as usual."""

    cores: int | None = None
    memory_bytes: int | None = None
    bandwidth: float | None = None


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


def measured_cluster(
    library: ProfileFile, groups: Sequence[Sequence[str]], wishes: HostWishes
) -> ProfileFile:
    """Hosts with devices of a library, each looked up by name.

    Raises:
        PlanError: no device, or several different ones, go by a name.
    """
    hosts: list[HostProfile] = []
    devices: dict[tuple[str, str], DeviceProfile] = {}
    for number, names in enumerate(groups):
        host = f"host{number}"
        found = [_find(library, name) for name in names]
        template = next(one for one in library.hosts if one.host == found[0].host)
        for device in found:
            devices[host, device.label] = device.model_copy(update={"host": host})
        changes: dict[str, object] = {
            "host": host,
            "ranks": tuple(device.label for device in found),
            "cores": wishes.cores or template.cores,
            "memory_bytes": wishes.memory_bytes or template.memory_bytes,
            "bandwidth": wishes.bandwidth or template.bandwidth,
        }
        hosts.append(template.model_copy(update=changes))
    return library.model_copy(
        update={
            "devices": tuple(devices.values()),
            "hosts": tuple(hosts),
            "collectives": tuple(_anonymous(one) for one in library.collectives),
        }
    )


def _anonymous(collectives: CollectiveProfile) -> CollectiveProfile:
    """Of other hosts: only how many ranks each had is kept."""
    names = {host: f"host{number}" for number, host in enumerate(dict.fromkeys(collectives.hosts))}
    return collectives.model_copy(update={"hosts": tuple(names[h] for h in collectives.hosts)})


def _find(library: ProfileFile, name: str) -> DeviceProfile:
    exact = [device for device in library.devices if device.label == name]
    words = _words(name)
    similar = exact or [one for one in library.devices if _contains(_words(one.label), words)]
    labels = sorted({device.label for device in similar})
    if not labels:
        known = sorted({device.label for device in library.devices})
        raise PlanError(f"no profile of a GPU called {name}: there are {'; '.join(known)}")
    if len(labels) > 1:
        raise PlanError(f"several GPUs are called {name}: give one of {'; '.join(labels)}")
    return max(similar, key=lambda device: device.measured)


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9.]+", name.lower())


def _contains(words: Sequence[str], part: Sequence[str]) -> bool:
    ends = range(len(part), len(words) + 1)
    return any(list(words[end - len(part) : end]) == list(part) for end in ends)


def estimated_cluster(
    groups: Sequence[Sequence[str]], shape: ModelShape, wishes: HostWishes
) -> ProfileFile:
    """Hosts with devices of the shipped data sheets, with a model.

    Raises:
        PlanError: there is no data sheet for a name.
    """
    hosts: list[HostProfile] = []
    devices: dict[tuple[str, str], DeviceProfile] = {}
    for number, names in enumerate(groups):
        host = f"host{number}"
        labels: list[str] = []
        for name in names:
            sheet = sheet_of(name)
            if sheet is None:
                raise PlanError(
                    f"no data sheet of a GPU called {name}: {did_you_mean(name, SHEETS)}"
                    f"there are {', '.join(SHEETS)}"
                )
            device = estimated_device(sheet, shape, host)
            devices[host, device.label] = device
            labels.append(device.label)
        hosts.append(
            estimated_host(
                host,
                tuple(labels),
                cores=wishes.cores or _CORES,
                memory_bytes=wishes.memory_bytes or _HOST_BYTES,
                bandwidth=wishes.bandwidth or _BANDWIDTH,
                moments=shape.model.moments,
            )
        )
    return ProfileFile(model=shape.model, devices=tuple(devices.values()), hosts=tuple(hosts))
