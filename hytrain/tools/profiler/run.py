"""`hytrain profile`: what a plan needs to know of each GPU, each host, and their links.

All ranks measure at once, as they will train: layers, the GPU's update, copies, the CPU's update,
and last the collectives (rank_measurements.py has the order of the others). Ranks of one
label (see :func:`device_label`) make one device profile, in which the slowest of them counts, since
it is the one that the others will wait for.
"""

from __future__ import annotations

import datetime
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hytrain.formats.profile_file import (
    CollectiveProfile,
    DeviceProfile,
    HostProfile,
    LayerSample,
    OutsideSample,
    ProfileFile,
    UpdateRate,
)
from hytrain.formats.record import Record
from hytrain.hardware.device_facts import DeviceFacts, device_facts
from hytrain.hardware.host_share import RankHost, divide_host, this_host
from hytrain.hardware.machine import cpu_model, package_version
from hytrain.kernels.host_limits import host_memory_pools
from hytrain.tools.profiler import collective_profile
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions, Progress
from hytrain.tools.profiler.rank_measurements import measure_rank
from hytrain.tools.profiler.ranks import Ranks
from hytrain.tools.profiler.rates import CpuRates

_PACKAGES = ("hytrain", "torch", "deepspeed", "transformers", "triton")


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What a rank has measured.

    Attributes:
        device: the rank's own; its host name is that of all ranks of the host and of no others.
        cores: the machine's cores that the rank may use.
        memory_bytes: its part of the host's memory.
        rates: those of the CPU's update and of the host's memory.
    """

    device: DeviceProfile
    cores: frozenset[int]
    memory_bytes: int
    cpu: str
    rates: CpuRates


def host_names(machines: Sequence[tuple[str, RankHost]]) -> list[str]:
    """A name for each rank's machine, from the host name that it reports and its identity.

    Ranks of one machine have the name that its first rank gives it (containers have several); if
    machines have the same name, the later ones get a number.
    """
    names: dict[str, str] = {}
    for name, where in machines:
        if where.machine not in names:
            number = sum(taken.split("#")[0] == name for taken in names.values())
            names[where.machine] = f"{name}#{number + 1}" if number else name
    return [names[where.machine] for _, where in machines]


def device_profiles(
    everybody: Sequence[RankProfile], now: datetime.datetime
) -> tuple[DeviceProfile, ...]:
    """One profile for the ranks of each host whose devices have the same label."""
    members: dict[tuple[str, str], list[DeviceProfile]] = {}
    for rank in everybody:
        members.setdefault((rank.device.host, rank.device.label), []).append(rank.device)
    return tuple(_slowest_device(of_label, now) for of_label in members.values())


def _slowest_device(ranks: Sequence[DeviceProfile], now: datetime.datetime) -> DeviceProfile:
    def picked(pick: _Pick, *names: str) -> dict[str, Any]:
        return {name: _known(pick, [getattr(rank, name) for rank in ranks]) for name in names}

    changes = {
        **picked(min, "memory_bytes", "update_rate"),
        **picked(max, "idle_bytes", "accumulation_ms", "launch_slowdown", "launch_spread"),
        "layer": _slowest([rank.layer for rank in ranks]),
        "outside": _slowest([rank.outside for rank in ranks]),
        "copies": _joined(min, [rank.copies for rank in ranks]),
        "update_launches": _joined(max, [rank.update_launches for rank in ranks]),
        "measured": now,
    }
    return ranks[0].model_copy(update=changes)


def host_profiles(
    everybody: Sequence[RankProfile], now: datetime.datetime
) -> tuple[HostProfile, ...]:
    """One profile for each host, in the order of the ranks."""
    hosts = dict.fromkeys(rank.device.host for rank in everybody)
    return tuple(
        _host([rank for rank in everybody if rank.device.host == host], now) for host in hosts
    )


def _host(ranks: Sequence[RankProfile], now: datetime.datetime) -> HostProfile:
    rates = [rank.rates for rank in ranks]
    # Ranks that are bound to cores may have different numbers of them.
    threads = sorted(set[int].intersection(*(set(one.updates) for one in rates)))
    return HostProfile(
        host=ranks[0].device.host,
        ranks=tuple(rank.device.label for rank in ranks),
        cores=len(frozenset[int]().union(*(rank.cores for rank in ranks))),
        memory_bytes=sum(rank.memory_bytes for rank in ranks),
        bandwidth=max(sum(one.memory[t] for one in rates) for t in threads),
        updates=tuple(
            UpdateRate(
                threads=t,
                rate=min(one.updates[t] for one in rates),
                in_training=min(one.in_training[t] for one in rates),
            )
            for t in threads
        ),
        cpu=ranks[0].cpu,
        measured=now,
    )


_Pick = Callable[[Iterable[Any]], Any]


def _known(pick: _Pick, values: Iterable[Any]) -> Any:
    """Picks from the values that were measured; None if there are none."""
    known = [value for value in values if value is not None]
    return pick(known) if known else None


def _joined(pick: _Pick, records: Sequence[Record | None]) -> Any:
    """A record whose fields are picked from the measured records; None if there are none."""
    there = [record for record in records if record is not None]
    if not there:
        return None
    kind = type(there[0])
    return kind(**{n: _known(pick, [getattr(r, n) for r in there]) for n in kind.model_fields})


def _slowest(ranks: Sequence[Sequence[LayerSample] | Sequence[OutsideSample]]) -> tuple[Any, ...]:
    """For each size that all ranks measured, the largest times and memory of any rank."""
    by_size = [{row.samples: row for row in rows} for rows in ranks]
    common = set[int].intersection(*map(set, by_size))
    return tuple(_joined(max, [rows[size] for rows in by_size]) for size in sorted(common))


def profile_ranks(
    subject: MeasuredModel,
    device: torch.device,
    options: ProfileOptions,
    *,
    ranks: Ranks | None = None,
    progress: Progress | None = None,
) -> ProfileFile:
    """Measures this rank's device, host and collectives together with all other ranks.

    Passes run on the current stream, which may use only a part of the GPU.

    Args:
        subject: the model; the same on all ranks.
        device: this rank's.
        options: the same on all ranks, except ``multiprocessors`` and ``settings``.
        ranks: those that measure; None: the default process group, or this process without one.
        progress: told how far the work is.

    Returns:
        The profile of all hosts, on every rank.

    Raises:
        ConfigError: the model cannot be measured; on every rank.
        ProfileRunError: another rank failed.
    """
    ranks = ranks if ranks is not None else Ranks()
    progress = progress if progress is not None else Progress()
    machines = ranks.gather((socket.gethostname(), this_host()))
    share = divide_host([machine for _, machine in machines], ranks.rank)

    def facts(ranks_on_host: int = 1) -> DeviceFacts:
        return device_facts(
            device, multiprocessors=options.multiprocessors, ranks_on_host=ranks_on_host
        )

    model, mine, host_bytes = ranks.together(
        lambda: (subject.sizes(), facts(share.ranks), share.memory(host_memory_pools()))
    )
    own, cpu_rates, boundary_bytes = measure_rank(
        subject,
        device,
        options,
        ranks,
        progress,
        model=model,
        host=host_names(machines)[ranks.rank],
        facts=mine,
        cores=ranks.gather(share.cores),
        ranks_on_host=share.ranks,
    )
    progress.show(0.9, "collectives")
    samples = collective_profile.collective_samples(
        device, ranks, dtype=subject.dtype, sizes=options.collective_bytes
    )
    if device.type == "cuda":
        # Training, too, will lack the memory that NCCL has taken by now.
        usable = min(own.limit_bytes, facts().memory_bytes)
        own = own.model_copy(update={"memory_bytes": usable})
    cores = machines[ranks.rank][1].cores
    everybody = ranks.gather(RankProfile(own, cores, host_bytes, cpu_model(), cpu_rates))
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    collectives: tuple[CollectiveProfile, ...] = ()
    if samples:
        names = tuple(rank.device.host for rank in everybody)
        found = CollectiveProfile(hosts=names, backend=ranks.backend, samples=samples, measured=now)
        collectives = (found,)
    known = {"boundary_bytes": boundary_bytes, "moments": options.moments}
    profile = ProfileFile(
        model=model.model_copy(update=known),
        devices=device_profiles(everybody, now),
        hosts=host_profiles(everybody, now),
        collectives=collectives,
        versions=_versions(),
    )
    progress.show(1.0, "done")
    return ranks.gather(profile)[0]  # clocks differ: all return the first rank's


def _versions() -> dict[str, str]:
    versions = {name: package_version(name) for name in _PACKAGES} | {"cuda": torch.version.cuda}
    return {name: version for name, version in versions.items() if version is not None}
