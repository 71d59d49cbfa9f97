"""From what ranks measured to devices and hosts; of ranks that share one the slowest counts."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hytrain.formats.profile_file import (
    DeviceProfile,
    HostProfile,
    LayerSample,
    OutsideSample,
    UpdateRate,
)
from hytrain.formats.record import Record
from hytrain.hardware.host_share import RankHost
from hytrain.tools.profiler.rates import CpuRates


@dataclass(frozen=True, slots=True)
class RankProfile:
    """What a rank has measured.

    Attributes:
        device: of its own; the host's name is the same for all ranks there and for no others.
        cores: those of the machine that it may use.
        memory_bytes: its part of the host's memory.
        cpu: the CPU's name.
        rates: of the CPU's update, and of the host's memory.
    """

    device: DeviceProfile
    cores: frozenset[int]
    memory_bytes: int
    cpu: str
    rates: CpuRates


def host_names(machines: Sequence[tuple[str, RankHost]]) -> list[str]:
    """A name for each rank's machine, of what it calls it and what identifies it.

    Ranks of one machine have the name that its first rank gives it (containers have several); of
    machines that call themselves the same, the later ones get a number.
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
    """One for the ranks of each host whose devices have one label."""
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
    """One for each host, in the order of the ranks."""
    hosts = dict.fromkeys(rank.device.host for rank in everybody)
    return tuple(
        _host([rank for rank in everybody if rank.device.host == host], now) for host in hosts
    )


def _host(ranks: Sequence[RankProfile], now: datetime.datetime) -> HostProfile:
    rates = [rank.rates for rank in ranks]
    # Ranks that are bound to cores may have unlike numbers of them.
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
    """What is picked of the values that were measured; None where none was."""
    known = [value for value in values if value is not None]
    return pick(known) if known else None


def _joined(pick: _Pick, records: Sequence[Record | None]) -> Any:
    """A record with what is picked, of each field, of all that were measured; None of none."""
    there = [record for record in records if record is not None]
    if not there:
        return None
    kind = type(there[0])
    return kind(**{n: _known(pick, [getattr(r, n) for r in there]) for n in kind.model_fields})


def _slowest(ranks: Sequence[Sequence[LayerSample] | Sequence[OutsideSample]]) -> tuple[Any, ...]:
    """Of the sizes that all ranks measured, the largest time and memory of any."""
    by_size = [{row.samples: row for row in rows} for rows in ranks]
    common = set[int].intersection(*map(set, by_size))
    return tuple(_joined(max, [rows[size] for rows in by_size]) for size in sorted(common))
