"""The claims of this experiment, each decided from measured parts. Plain data, no torch."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

from experiments.common import records
from experiments.common.checks import REFERENCE, Check, host_bytes, time_ratio
from experiments.common.checks import measured as offload_measured
from experiments.common.checks import step_seconds as offload_seconds
from experiments.common.records import Json
from experiments.solve_k.others_report import largest
from experiments.solve_k.points import errors, largest_error
from experiments.solve_k.summary import (
    lowerings,
    measured_points,
    part_name,
    reference_seconds,
    solved_errors,
    step_by_layers,
)

NEAR_BEST = 1.01
"""Steps up to this times the best are as good; the fewest GPU layers among them set the memory."""

OTHERS = (("zero2_offload", "ZeRO-2 offload", 4.5), ("fsdp2", "FSDP2", 4.0))
"""Label in offload_step, name, and how many times as long it must take."""

NAMES = {"zero2_offload": "ZeRO-2 offload", "zero3_offload": "ZeRO-3 offload", "fsdp2": "FSDP2"}
"""Label in offload_step and name of the systems whose host memory is known from there."""


def all_records(parts: Iterable[Json], part: str) -> list[Json]:
    """The processes of a part that left a result, whole or not."""
    return [
        record
        for each in parts
        if each["part"] == part
        for record in each["records"]
        if record["result"] is not None
    ]


def results(parts: Iterable[Json], part: str, label: str | None = None) -> list[Json]:
    """The results of a part's processes which came as far as timing the solved k."""
    return [
        record["result"]
        for record in all_records(parts, part)
        if "solved" in record["result"] and label in (None, record["entry"]["label"])
    ]


def solved_seconds(result: Json) -> float:
    """At the solved k: the median of the solving run and of the fixed points at the same k."""
    layers = result["solved"]["gpu_layers"]
    fixed = [p["step_seconds"] for p in measured_points(result) if p["gpu_layers"] == layers]
    return statistics.median([result["solved"]["step_seconds"], *fixed])


def over_best(result: Json) -> float | None:
    """The solved k's step over that of the best fixed one."""
    steps = step_by_layers(result)
    return solved_seconds(result) / min(steps.values()) if steps else None


def memory_over_needed(result: Json) -> float | None:
    """Peak GPU memory at the solved k over that of the fewest GPU layers that are near the best."""
    steps, solved = step_by_layers(result), result["solved"]["gpu_layers"]
    peaks = {p["gpu_layers"]: p["gpu"].get("peak_allocated_bytes") for p in measured_points(result)}
    if not steps:
        return None
    limit = NEAR_BEST * min(steps.values())
    enough = min(layers for layers, seconds in steps.items() if seconds <= limit)
    ours, needed = peaks.get(solved), peaks.get(enough)
    return None if ours is None or needed is None else ours / needed


def error_matrix(result: Json) -> dict[int, tuple[int, float]]:
    """GPU layers at which costs were taken -> where the prediction from them is off by most."""
    measured = step_by_layers(result)
    found: dict[int, tuple[int, float]] = {}
    for point in measured_points(result):
        if point["predicted_seconds"]:
            worst = largest_error(errors(point["predicted_seconds"], measured))
            if worst is not None:
                found[point["gpu_layers"]] = worst
    return dict(sorted(found.items()))


def clipping_known_errors(result: Json) -> dict[int, float]:
    """Errors of the predictions that were given how often the point's own steps were clipped."""
    return {
        point["gpu_layers"]: point["predicted_for_its_clipping"] / point["step_seconds"] - 1.0
        for point in measured_points(result)
        if point.get("predicted_for_its_clipping")
    }


def _most(found: dict[int, float] | None) -> float | None:
    worst = largest_error(found or {})
    return None if worst is None else abs(worst[1])


def _check(
    claim: str,
    values: Sequence[float | None],
    limit: float | None,
    *,
    at_least: bool = False,
    part: str,
    ceiling: float | None = None,
) -> Check:
    """Decided by the worst of the values."""
    known = [value for value in values if value is not None]
    worst = (min(known) if at_least else max(known)) if known else None
    return Check(
        claim=claim, value=worst, limit=limit, at_least=at_least, part=part, ceiling=ceiling
    )


def sweep_checks(part: Json) -> list[Check]:
    """The solved k beside the fixed ones; each run's sweep is judged by itself."""
    found, name = results([part], "sweep"), part_name(part)
    over_limit = []
    for result in found:
        limit = reference_seconds(result)
        over_limit.append(None if limit is None else solved_seconds(result) / limit)
    matrix = [abs(e) for result in found for _, e in error_matrix(result).values()]
    return [
        _check("sweep: step at the solved k / best fixed k", [over_best(r) for r in found], 1.03,
               part=name),
        _check("sweep: GPU memory at the solved k / at the smallest k within 1 % of the best",
               [memory_over_needed(r) for r in found], 1.0, part=name),
        _check("sweep: step at the solved k / forward and backward only", over_limit, 1.08,
               part=name),
        _check("sweep: the same, the aim", over_limit, 1.06, part=name),
        _check("sweep: largest prediction error, costs taken at the solved k",
               [_most(solved_errors(r)) for r in found], 0.10, part=name),
        _check("sweep: the same, given how often each point was clipped",
               [_most(clipping_known_errors(r)) for r in found], None, part=name),
        _check("sweep: largest prediction error, costs taken at any k", matrix, None,
               part=name),
        _check("sweep: step at the closed form's k / best fixed k",
               [closed_form_over_best(r) for r in found], None, part=name),
    ]  # fmt: skip


def other_checks(parts: Sequence[Json], offload: Sequence[Json]) -> list[Check]:
    """Other systems beside the solved k: of the same run where one has both."""
    sweeps = [
        (part, max(solved_seconds(result) for result in found))
        for part in parts
        if part["part"] == "sweep" and (found := results([part], "sweep"))
    ]
    checks = []
    for label, name, times in OTHERS:
        theirs = [part for part in offload if offload_seconds(part, label) is not None]
        pairs = [(mine, part) for mine in sweeps for part in theirs if _is_same_run(mine[0], part)]
        claim = f"sweep: {name}'s time / hytrain's"
        if not pairs:
            pairs = [(mine, part) for mine in sweeps for part in theirs]
            claim = f"sweep: {name}'s time, of another run / hytrain's"
        ceilings = [time_ratio(label, REFERENCE)(part) for _, part in pairs]
        known = [ceiling for ceiling in ceilings if ceiling is not None]
        checks.append(
            _check(
                claim,
                [_ratio(offload_seconds(part, label), ours) for (_, ours), part in pairs],
                times,
                at_least=True,
                part="; ".join(dict.fromkeys(part_name(mine) for (mine, _), _ in pairs)) or "sweep",
                ceiling=min(known) if known else None,
            )
        )
    return checks


def _ratio(above: float | None, below: float) -> float | None:
    return None if above is None else above / below


def _is_same_run(one: Json, other: Json) -> bool:
    return bool(one.get("run")) and one["run"] == other.get("run")


def closed_form_over_best(result: Json) -> float | None:
    """The fixed step nearest to the closed form's k, over the best one."""
    steps, published = step_by_layers(result), result.get("closed_form")
    if not steps or not published:
        return None
    nearest = min(steps, key=lambda layers: abs(layers - published["gpu_layers"]))
    return steps[nearest] / min(steps.values())


def out_of_memory(record: Json) -> float:
    """Allocations that failed in a process, and the process itself if it ended so."""
    result = record["result"]
    timed = [result["solved"]] if "solved" in result else []
    timed += [lowering["followed"] for lowering in lowerings(result)]
    counts = [each["allocator"].get("num_ooms", 0) for each in timed]
    return float(max([*counts, record["status"] == records.OUT_OF_MEMORY]))


def _cap_use(timed: Json, result: Json, cap: float | None, reserve: float) -> float | None:
    """Peak GPU memory under the cap, over what the reserve leaves of the cap."""
    peak, total = timed["gpu"].get("peak_allocated_bytes"), result.get("gpu_total_bytes")
    return None if peak is None or not total or not cap else peak / (cap * total - reserve)


def cap_use(result: Json) -> float | None:
    """Of a process that was capped from its start."""
    reserve = result["settling"]["decisions"][-1]["gpu_reserve_bytes"]
    return _cap_use(result["solved"], result, result.get("cap"), reserve)


def lowered_use(result: Json) -> list[float | None]:
    """Of each time that the cap was lowered, once k had followed."""
    return [
        _cap_use(each["followed"], result, each["cap"], each["reserve_bytes"] or 0.0)
        for each in lowerings(result)
    ]


def layers_kept(result: Json) -> list[float]:
    """GPU layers after over before, for each time that the cap was lowered."""
    counts = [result["solved"]["gpu_layers"]]
    counts += [each["followed"]["gpu_layers"] for each in lowerings(result)]
    return [after / max(1, before) for before, after in itertools.pairwise(counts)]


def _is_lowered(record: Json) -> bool:
    return record["entry"]["options"].get("plan") == "lowered"


def by_cap(found: Sequence[Json]) -> list[tuple[float, int]]:
    """(cap, GPU layers) of what ran under one cap, the smallest first; 1.0 is no cap."""
    levels = []
    for record in found:
        cap = 1.0 if _is_lowered(record) else record["result"].get("cap")
        if cap is not None and "solved" in record["result"]:
            levels.append((cap, record["result"]["solved"]["gpu_layers"]))
    return sorted(levels)


def cap_checks(parts: Sequence[Json]) -> list[Check]:
    """Whether k follows the cap, out of memory never."""
    found = all_records(parts, "caps")
    fixed = [record for record in found if not _is_lowered(record)]
    lowered = [record for record in found if _is_lowered(record)]
    levels = by_cap(found)
    free = max((n for cap, n in levels if cap == 1.0), default=None)
    unmoved = None
    if len(levels) > 1:
        steps = itertools.pairwise(levels)
        unmoved = float(sum(b[1] < a[1] or (b[1] == a[1] != free) for a, b in steps))
    capped = [r["result"] for r in fixed if "solved" in r["result"] and r["result"].get("cap")]
    followed = [record["result"] for record in lowered if lowerings(record["result"])]
    return [
        _check("caps: allocations that failed, or processes out of memory",
               [out_of_memory(record) for record in fixed], 0.0, part="caps"),
        _check("caps: levels at which k does not grow with the cap", [unmoved], 0.0, part="caps"),
        _check("caps: peak GPU memory / cap less reserve", [cap_use(r) for r in capped], 1.0,
               part="caps"),
        _check("cap lowered: allocations that failed, or processes out of memory",
               [out_of_memory(record) for record in lowered], 0.0, part="caps"),
        _check("cap lowered: GPU layers after / before", [n for r in followed
               for n in layers_kept(r)], 0.99, part="caps"),
        _check("cap lowered: peak GPU memory / cap less reserve, when k has followed",
               [use for r in followed for use in lowered_use(r)], 1.0, part="caps"),
    ]  # fmt: skip


def few_cores_checks(parts: Sequence[Json]) -> list[Check]:
    """k on a host with few cores."""
    checks, rise = [], []
    for record in all_records(parts, "few_cores"):
        if "solved" in record["result"]:
            label = record["entry"]["label"]
            claim = f"few cores, {label}: step at the solved k / best fixed k"
            value = over_best(record["result"])
            checks.append(_check(claim, [value], 1.10, part="few_cores"))
            threads = record["entry"]["options"]["threads"][0]
            rise.append((threads, record["result"]["solved"]["gpu_layers"]))
    rise.sort(reverse=True)
    # Of the same run, where that has a sweep: the solved k differs between runs.
    runs = {part.get("run") for part in parts if part["part"] == "few_cores"}
    same = [part for part in parts if part.get("run") in runs]
    beside = results(same, "sweep") or results(parts, "sweep")
    all_cores = [result["solved"]["gpu_layers"] for result in beside]
    counts = [*all_cores[:1], *(layers for _, layers in rise)]
    grown = [b - a for a, b in itertools.pairwise(counts)]
    claim = "few cores: GPU layers gained by each loss of cores"
    return [*checks, _check(claim, grown, 0.0, at_least=True, part="few_cores")]


def big_checks(parts: Sequence[Json]) -> list[Check]:
    """Models that neither side could hold."""
    ten = [result["solved"]["tflops"] for result in results(parts, "ten_b")]
    # Of several searched sizes the largest that trained counts.
    largest = sorted(results(parts, "largest"), key=lambda result: result["num_parameters"])[-1:]
    billions = [result["num_parameters"] / 1e9 for result in largest]
    shares = [
        None if (limit := reference_seconds(result)) is None else limit / solved_seconds(result)
        for result in largest
    ]
    return [
        _check("10 B: TFLOP/s", ten, 300.0, at_least=True, part="ten_b"),
        _check("largest: billion parameters", billions, 15.0, at_least=True, part="largest"),
        _check("largest: share of the speed of forward and backward only", shares, 0.75,
               at_least=True, part="largest"),
    ]  # fmt: skip


def search_checks(parts: Sequence[Json]) -> list[Check]:
    """The largest models of other systems, and how much larger ours is where it was measured."""
    ours = max((result["num_parameters"] for result in results(parts, "largest")), default=None)
    checks = []
    for label, found in largest(parts).items():
        name = NAMES[label]
        size = found.trained / 1e9
        claim = f"largest of {name}: billion parameters"
        if found.failed is not None:
            claim += f" ({found.failed / 1e9:.2f} did not fit)"
        checks.append(_check(claim, [size], None, at_least=True, part="others"))
        if ours is not None and found.trained:
            claim = f"largest: hytrain's parameters / {name}'s"
            times = [ours / found.trained]
            checks.append(_check(claim, times, None, at_least=True, part="others"))
    return checks


def check_all(parts: Sequence[Json], offload: Sequence[Json] = ()) -> list[Check]:
    """Every claim.

    Args:
        parts: of this experiment.
        offload: parts of offload_step that have the other systems' times.
    """
    return [
        *(check for part in parts if part["part"] == "sweep" for check in sweep_checks(part)),
        *other_checks(parts, offload),
        *cap_checks(parts),
        *few_cores_checks(parts),
        *big_checks(parts),
        *search_checks(parts),
    ]


def others_host_bytes(offload: Iterable[Json]) -> dict[str, float]:
    """Host bytes a parameter that another system took there, beyond the bare process."""
    found: dict[str, float] = {}
    for part in offload:
        bare = offload_measured(part, REFERENCE)
        base = host_bytes(bare[0]) if bare else 0
        for label, name in NAMES.items():
            for result in offload_measured(part, label):
                value = (host_bytes(result) - base) / result["num_parameters"]
                found[name] = max(found.get(name, 0.0), value)
    return found
