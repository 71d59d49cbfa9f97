"""Reads a folder of cases: latencies, peak memory, GPUs' memory, and what others found.

latencies.json       {model: {gpu: {seq: {dtype: [[slope, intercept] forward, ... backward,
                     [measured forward, ...], [measured backward, ...]]}}}}, ms; lists optional
memory.json          {source: {model: {parameters, profiled_compute_memory: {dtype: [GiB]}}}}
gpu_memory_gb.json   {gpu: GiB}
expected.json        the cases, and what was found for them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hytrain.errors import PlanError
from hytrain.formats.record import parse_json, read_text
from hytrain.tools.uneven.problem import UnevenGpu, UnevenProblem

_GROWTH_POINTS = 5


@dataclass(frozen=True, slots=True)
class UnevenCase:
    """A problem by name, with what is known of it.

    Attributes:
        model: name.
        gpus: their types' names.
        problem: to be solved.
        published: time of the published solver's plan, ms; None where it is not known.
    """

    model: str
    gpus: tuple[str, ...]
    problem: UnevenProblem
    published: float | None


def read_cases(folder: Path) -> list[UnevenCase]:
    """The cases of a folder, in the order of ``expected.json``.

    Raises:
        PlanError: a file is missing or no JSON, or a case names what the files do not have.
    """
    latencies = _read(folder / "latencies.json")
    memory = _read(folder / "memory.json")
    capacity = _read(folder / "gpu_memory_gb.json")
    cases = _read(folder / "expected.json")
    if not isinstance(cases, list):
        raise PlanError(f"{folder / 'expected.json'} must hold a list of cases")
    read: list[UnevenCase] = []
    for number, case in enumerate(cast("list[Any]", cases)):
        try:
            read.append(_case(case, latencies, memory, capacity))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            what = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
            raise PlanError(f"{folder}, case {number} of expected.json: {what}") from error
    return read


def _read(path: Path) -> Any:
    return parse_json(read_text(path, "file of cases"), str(path))


def _case(case: Any, latencies: Any, memory: Any, capacity: Any) -> UnevenCase:
    model, dtype, names = str(case["model"]), str(case["dtype"]), tuple(map(str, case["gpus"]))
    profile = _model_memory(memory, model, dtype)
    overhead = float(case["comm_mem_overhead_gb"])
    batch = int(case["global_batch"])
    peaks = grown(_floats(profile["profiled_compute_memory"][dtype]), batch)
    memory_of = tuple(peak + overhead for peak in peaks)
    gpus: dict[str, UnevenGpu] = {}
    for name in dict.fromkeys(names):
        times = latencies[model][name][str(case["seq"])][dtype]
        forward, backward = _latency(times, f"{model} on {name} in {dtype}", batch)
        gpus[name] = UnevenGpu(name, forward, backward, memory_of, float(capacity[name]))
    problem = UnevenProblem(
        gpus=tuple(gpus[name] for name in names),
        batch=batch,
        parameters=int(profile["parameters"]),
        all_gather=float(case["ag_time"]),
        reduce_scatter=float(case["rs_time"]),
        accumulation=float(case["ga_overhead_ms"]),
        usable=float(case["max_alloc_frac"]),
    )
    published = (case.get("cephalo") or {}).get("layer_time_ms")
    return UnevenCase(model, names, problem, None if published is None else float(published))


def _model_memory(memory: Mapping[str, Any], model: str, dtype: str) -> Mapping[str, Any]:
    """The first source that has the model in that type."""
    for models in memory.values():
        if model in models and dtype in models[model]["profiled_compute_memory"]:
            return models[model]
    raise PlanError(f"memory.json has no entry for {model} in {dtype}")


def _latency(times: Any, what: str, batch: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forward and backward: straight lines, and what was measured where both lists are there."""
    lines = cast("Sequence[Any]", times)
    if not isinstance(times, list) or len(lines) not in (2, 4) or not isinstance(lines[1], list):
        raise PlanError(f"latencies.json has no backward time of {what}: {times}")
    (slope, intercept), (backward_slope, backward_intercept) = map(_floats, lines[:2])
    forward, backward = [_floats(row) for row in lines[2:]] or [(), ()]
    return (
        extended(forward, slope, intercept, batch),
        extended(backward, backward_slope, backward_intercept, batch),
    )


def extended(
    measured: Sequence[float], slope: float, intercept: float, count: int
) -> tuple[float, ...]:
    """The values at sizes 1, 2, ..., ``count``: as measured, and then on a straight line."""
    line = (slope * size + intercept for size in range(len(measured) + 1, count + 1))
    return (*measured, *line)


def grown(measured: Sequence[float], count: int) -> tuple[float, ...]:
    """Beyond its end a list goes on by its mean growth over the last five values.

    So Cephalo continues a profile of peak memory. Of one value the growth is that from nothing.
    """
    points = min(_GROWTH_POINTS, len(measured))
    before = 0.0 if points == 1 else measured[-points]
    slope = (measured[-1] - before) / max(points - 1, 1)
    return extended(measured, slope, measured[-1] - slope * len(measured), count)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
