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
from hytrain.hardware.device_facts import DeviceFacts
from hytrain.hardware.host_share import RankHost
from hytrain.tools.profiler.rank_measurements import Measured


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank is.

    Attributes:
        host: name of its machine, the same for all ranks there and for no others.
        facts: of its device.
        cores: those of the machine that it may use.
        memory_bytes: its part of the host's memory.
        cpu: the CPU's name.
        settings: what makes its device differ from its kind, in words.
    """

    host: str
    facts: DeviceFacts
    cores: frozenset[int]
    memory_bytes: int
    cpu: str
    settings: str = ""


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
    everybody: Sequence[tuple[RankPlace, Measured]], layer_parameters: int, now: datetime.datetime
) -> tuple[DeviceProfile, ...]:
    """One for the ranks of each host whose devices have one label."""
    members: dict[tuple[str, str], list[tuple[RankPlace, Measured]]] = {}
    for place, measured in everybody:
        members.setdefault((place.host, place.facts.label), []).append((place, measured))
    return tuple(_device(of_label, layer_parameters, now) for of_label in members.values())


def _device(
    ranks: Sequence[tuple[RankPlace, Measured]], layer_parameters: int, now: datetime.datetime
) -> DeviceProfile:
    (first, _), measured = ranks[0], [one for _, one in ranks]
    layers = [one.layer for one in measured]
    usable = min(place.facts.memory_bytes for place, _ in ranks)
    return DeviceProfile(
        host=first.host,
        label=first.facts.label,
        device=first.facts.name,
        multiprocessors=first.facts.multiprocessors,
        limit_bytes=first.facts.limit_bytes,
        memory_bytes=min(first.facts.limit_bytes, usable),
        idle_bytes=max(layer.idle_bytes for layer in layers),
        layer=_slowest([layer.layer for layer in layers]),
        outside=_slowest([layer.outside for layer in layers]),
        update_rate=min(one.update_rate for one in measured),
        copies=_joined(min, [one.copies for one in measured]),
        accumulation_ms=1e3 * layer_parameters * max(one.accumulation for one in measured),
        launch_slowdown=_known(max, [layer.launch_slowdown for layer in layers]),
        launch_spread=_known(max, [layer.launch_spread for layer in layers]),
        update_launches=_joined(max, [one.update_launches for one in measured]),
        measured=now,
        settings=first.settings,
    )


def host_profiles(
    everybody: Sequence[tuple[RankPlace, Measured]], now: datetime.datetime
) -> tuple[HostProfile, ...]:
    """One for each host, in the order of the ranks."""
    hosts = dict.fromkeys(place.host for place, _ in everybody)
    return tuple(
        _host([(place, one) for place, one in everybody if place.host == host], now)
        for host in hosts
    )


def _host(ranks: Sequence[tuple[RankPlace, Measured]], now: datetime.datetime) -> HostProfile:
    places, cpu = [place for place, _ in ranks], [one.cpu for _, one in ranks]
    # Ranks that are bound to cores may have unlike numbers of them.
    threads = sorted(set[int].intersection(*(set(one.updates) for one in cpu)))
    return HostProfile(
        host=places[0].host,
        ranks=tuple(place.facts.label for place in places),
        cores=len(frozenset[int]().union(*(place.cores for place in places))),
        memory_bytes=sum(place.memory_bytes for place in places),
        bandwidth=max(sum(one.memory[t] for one in cpu) for t in threads),
        updates=tuple(
            UpdateRate(
                threads=t,
                rate=min(one.updates[t] for one in cpu),
                in_training=min(one.in_training[t] for one in cpu),
            )
            for t in threads
        ),
        cpu=places[0].cpu,
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
