"""The file that `hytrain plan pools` reads; docs/hybrid_planning.md describes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

from hytrain.tools.hybrid.case_files import Fields, read_json
from hytrain.tools.hybrid.pools.problem import Memory, Pool, Problem, Times

_GIB = 2**30


def read_pools(path: Path) -> Problem:
    """The problem of a file.

    Raises:
        PlanError: something is missing, unusable or contradicts something else; it says where.
    """
    fields = read_json(path, "pools file")
    layers = fields.part("layers")
    count = layers.length("parameter_bytes")
    memory = fields.part("memory")
    pools = tuple(_pool(one) for one in fields.parts("pools"))
    profiles: dict[tuple[str, int, int], Times] = {}
    for one in fields.parts("profiles"):
        key = one.text("device"), one.whole("tp"), one.whole("micro_batch")
        if key in profiles:
            raise one.refuse("device", "this device, tp and micro_batch are there twice")
        profiles[key] = _times(one, count)
    seen: set[tuple[str, str]] = set()
    for one, pool in zip(fields.parts("pools"), pools, strict=True):
        if (pool.device, pool.zone) in seen:
            raise one.refuse("zone", f"{pool.device} in {pool.zone} is there twice: add them up")
        seen.add((pool.device, pool.zone))
    reserved = fields.part("reserved_gb") if "reserved_gb" in fields.values else None
    return Problem(
        pools=pools,
        profiles=profiles,
        memory={
            _degree(memory, tp): Memory(
                memory.part(tp).numbers("parameters", count),
                memory.part(tp).numbers("activations", count),
            )
            for tp in memory.values
        },
        activation_bytes=layers.numbers("activation_bytes", count),
        parameter_bytes=layers.numbers("parameter_bytes", count),
        curves=_curves(fields.part("bandwidth"), pools, {tp for _, tp, _ in profiles}),
        batch=fields.whole("batch"),
        reserved_bytes=(0.0, 0.0)
        if reserved is None
        else (1e9 * reserved.number("tp_1"), 1e9 * reserved.number("tp_above_1")),
    )


def _pool(fields: Fields) -> Pool:
    return Pool(
        fields.text("device"),
        fields.text("zone"),
        fields.whole("gpus"),
        fields.number("memory_gib", above=True) * _GIB,
        fields.whole("node_gpus"),
    )


def _times(fields: Fields, layers: int) -> Times:
    forward, backward, update = (
        [1e-3 * one for one in fields.numbers(name, layers)]
        for name in ("forward_ms", "backward_ms", "update_ms")
    )
    both = tuple(one + other for one, other in zip(forward, backward, strict=True))
    return Times(tuple(forward), both, tuple(update))


def _degree(fields: Fields, name: str) -> int:
    if not name.isdecimal() or int(name) < 1:
        raise fields.refuse(name, "must be a tensor parallel degree")
    return int(name)


def _curves(
    fields: Fields, pools: tuple[Pool, ...], degrees: set[int]
) -> Mapping[tuple[str, str, int, str, str, int], tuple[float, ...]]:
    zones = sorted({pool.zone for pool in pools})
    own = {"within_zone", "between_zones"}
    for name in fields.values.keys() - own:
        if not any(name in (f"{a} {b}", f"{b} {a}") for a in zones for b in zones):
            raise fields.refuse(name, "must be two zones of `pools` with a space between them")

    def speed(one: str, other: str) -> float:
        names = (f"{one} {other}", f"{other} {one}")
        found = next((name for name in names if name in fields.values), None)
        default = "within_zone" if one == other else "between_zones"
        return fields.number(found or default, above=True)

    speeds = {(one, other): speed(one, other) for one, other in product(zones, zones)}
    return dict(_links(pools, sorted({1, *degrees}), speeds))


def _links(
    pools: tuple[Pool, ...], degrees: list[int], speeds: Mapping[tuple[str, str], float]
) -> Iterator[tuple[tuple[str, str, int, str, str, int], tuple[float, ...]]]:
    for one, other in product(pools, pools):
        for count, number in product(degrees, degrees):
            key = (one.device, one.zone, count, other.device, other.zone, number)
            yield key, (speeds[one.zone, other.zone],)
