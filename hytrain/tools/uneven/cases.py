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
from hytrain.tools.planner.curves import Curve
from hytrain.tools.uneven.solver import UnevenGpu, UnevenProblem


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
    peak = Curve.grown(_floats(profile["profiled_compute_memory"][dtype])).plus(overhead)
    gpus: dict[str, UnevenGpu] = {}
    for name in dict.fromkeys(names):
        times = latencies[model][name][str(case["seq"])][dtype]
        forward, backward = _latency(times, f"{model} on {name} in {dtype}")
        gpus[name] = UnevenGpu(name, forward, backward, peak, float(capacity[name]), overhead)
    problem = UnevenProblem(
        gpus=tuple(gpus[name] for name in names),
        batch=int(case["global_batch"]),
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
    raise PlanError(f"memory.json has no {model} in {dtype}")


def _latency(times: Any, what: str) -> tuple[Curve, Curve]:
    """Forward and backward: straight lines, and what was measured where both lists are there."""
    lines = cast("Sequence[Any]", times)
    if not isinstance(times, list) or len(lines) not in (2, 4) or not isinstance(lines[1], list):
        raise PlanError(f"latencies.json has no backward time of {what}: {times}")
    forward, backward = _floats(lines[0]), _floats(lines[1])
    measured = [_floats(row) for row in lines[2:]] or [(), ()]
    return Curve(measured[0], *forward), Curve(measured[1], *backward)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
