"""Cephalo's problem (Guo et al., "Cephalo: Harnessing Heterogeneous GPU Clusters for Training
Transformer Models"): one sharded-data-parallel job over GPUs that differ in speed and memory.

Per transformer layer, with micro-batches of m samples and l = ceil(b / m) of them for b samples::

    forward   F = max(AG, l f(m))
    backward  B = max(AG + RS, l f(m) + l g(m) + (l - 1) * accumulation)     recompute charged
    minimise max_i (F_i + B_i)  subject to  sum b_i = batch, b_i >= 1,
        C(m_i) <= 0.75 capacity_i,  sum C(m_i) + 16 B * parameters < 0.75 * sum capacity_i

All l micro-batches are charged at full size. AG and RS take 1.25 times as long for a GPU whose C(m)
leaves no room for an even shard of the state. Times are in ms, memory in GiB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from hytrain.errors import PlanError
from hytrain.formats.profile_file import MOST_SAMPLES
from hytrain.formats.record import parse_json, read_text

_GIB = 1024**3
_STATE_BYTES = 16
"""Bytes of sharded state per parameter."""

_UNEVEN_FACTOR = 1.25
"""Factor of unequal shards on the time of collectives."""


@dataclass(frozen=True, slots=True)
class UnevenGpu:
    """One GPU. GPUs that compare equal are one type, whose options are listed once.

    Attributes:
        forward: one layer's forward with micro-batches of 1, 2, ... samples up to the batch, ms.
        backward: one layer's backward, without recompute, likewise.
        memory: C, the peak of everything but the sharded state, likewise, GiB.
        capacity: its memory, GiB.
    """

    name: str
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    memory: tuple[float, ...]
    capacity: float


@dataclass(frozen=True, slots=True)
class UnevenProblem:
    """A batch to be dealt to GPUs.

    Attributes:
        gpus: one entry per GPU.
        batch: samples of the global batch.
        all_gather: AG of one evenly sharded layer, ms.
        reduce_scatter: RS of one evenly sharded layer, ms.
        accumulation: what each further micro-batch adds to a layer's backward, ms.
        usable: share of a GPU's memory that may be used.

    Raises:
        PlanError: no GPU, or a number out of its range.
    """

    gpus: tuple[UnevenGpu, ...]
    batch: int
    parameters: int
    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    accumulation: float = 10.0
    usable: float = 0.75

    def __post_init__(self) -> None:
        if not self.gpus:
            raise PlanError("a plan needs at least one GPU")
        if self.batch < 1 or self.parameters < 1:
            raise PlanError(
                f"a batch of {self.batch} samples, {self.parameters} parameters: both must be "
                "positive"
            )
        for name in ("all_gather", "reduce_scatter", "accumulation"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} must not be negative, got {getattr(self, name)}")
        for gpu in dict.fromkeys(self.gpus):
            profile = np.array([gpu.forward, gpu.backward, gpu.memory])
            if not (np.isfinite(profile) & (profile >= 0.0)).all():
                raise PlanError(f"{gpu.name}: a time or memory is negative or not finite")

    @property
    def state(self) -> float:
        """GiB of sharded state, all ranks together."""
        return _STATE_BYTES * self.parameters / _GIB

    @property
    def budget(self) -> float:
        """GiB that the C of all GPUs together must stay below."""
        return self.usable * sum(gpu.capacity for gpu in self.gpus) - self.state


def layer_time(problem: UnevenProblem, gpu: UnevenGpu, size: Any, number: Any) -> Any:
    """Returns F + B of one layer on one GPU, ms, for whole numbers or for arrays of one shape.

    ``size``: samples of a micro-batch, at least 1; ``number``: how many micro-batches.
    """
    profile = np.array([gpu.forward, gpu.backward, gpu.memory])
    forward, backward, memory = profile[:, np.asarray(size) - 1]
    room = problem.usable * gpu.capacity - problem.state / len(problem.gpus)
    factor = np.where(memory > room, _UNEVEN_FACTOR, 1.0)
    gather, scatter = problem.all_gather * factor, problem.reduce_scatter * factor
    again = number * backward + (number - 1) * problem.accumulation
    forward = number * forward
    return np.maximum(gather, forward) + np.maximum(gather + scatter, forward + again)


_GROWTH_POINTS = 5


@dataclass(frozen=True, slots=True)
class UnevenCase:
    """A problem with its names and what is known about it.

    Attributes:
        published: time of the published solver's plan, ms; None if it is not known.
    """

    model: str
    gpus: tuple[str, ...]
    problem: UnevenProblem
    published: float | None


def read_cases(folder: Path) -> list[UnevenCase]:
    """Reads the cases of a folder, in the order of ``expected.json``, with what others found.

    latencies.json       {model: {gpu: {seq: {dtype: [[slope, intercept] forward, ... backward,
                         [measured forward, ...], [measured backward, ...]]}}}}, ms; lists optional
    memory.json          {source: {model: {parameters, profiled_compute_memory: {dtype: [GiB]}}}}
    gpu_memory_gb.json   {gpu: GiB}
    expected.json        the cases, and what was found for them

    Raises:
        PlanError: a file is missing or not JSON, or a case names what the files do not have.
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
    batch = int(case["global_batch"])
    if batch > MOST_SAMPLES:
        raise PlanError(f"global_batch is {batch}: plans are made for {MOST_SAMPLES} at most")
    profile = _model_memory(memory, model, dtype)
    overhead = float(case["comm_mem_overhead_gb"])
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
    """Returns the entry of the first source that has the model in that dtype."""
    for models in memory.values():
        if model in models and dtype in models[model]["profiled_compute_memory"]:
            return models[model]
    raise PlanError(f"memory.json has no entry for {model} in {dtype}")


def _latency(times: Any, what: str, batch: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns forward and backward: straight lines, after measured values if both lists exist."""
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
    """Returns the values at sizes 1, 2, ..., ``count``: as measured, then on a straight line."""
    line = (slope * size + intercept for size in range(len(measured) + 1, count + 1))
    return (*measured, *line)


def grown(measured: Sequence[float], count: int) -> tuple[float, ...]:
    """Returns a list continued by its mean growth over the last five values.

    Cephalo continues a profile of peak memory in this way. A single value has grown from 0.
    """
    points = min(_GROWTH_POINTS, len(measured))
    before = 0.0 if points == 1 else measured[-points]
    slope = (measured[-1] - before) / max(points - 1, 1)
    return extended(measured, slope, measured[-1] - slope * len(measured), count)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
