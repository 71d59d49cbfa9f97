"""Everything that the report says, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, TypeVar

import numpy as np

from hytrain.formats.trace_file import Peaks
from hytrain.tools.trace import causes, kinds, step_times
from hytrain.tools.trace.blockers import Blockers
from hytrain.tools.trace.fixes import Fix, fixes
from hytrain.tools.trace.graph import Graph
from hytrain.tools.trace.replay import Replay
from hytrain.tools.trace.spans import NONE, RankTrace
from hytrain.tools.trace.step_times import StepTimes, times_of

_Key = TypeVar("_Key")
_SLOW: Final = 1.5
"""A layer is slow if it takes more than this many times the median of the others, ..."""
_SLOW_LEAST: Final = 0.01
"""... and exceeds it by more than this share of a step."""


@dataclass(frozen=True, slots=True)
class Cause:
    """What a rank's GPU waited for, all steps together."""

    rank: int
    cause: str
    seconds: float
    """Mean per step."""
    layer: int
    """The layer that had most of it; NONE if it is no layer's."""
    layer_share: float
    detail: str
    """The Python line, the function or the late rank's work that had most of it."""
    late_rank: int


@dataclass(frozen=True, slots=True)
class SlowLayer:
    """A layer whose compute takes longer than that of others, or of other ranks."""

    rank: int
    layer: int
    activity: str
    seconds: float
    """Mean per step."""
    usual: float
    """Median of the other layers, or of the same layer on other ranks."""
    is_beside_ranks: bool


@dataclass(frozen=True, slots=True)
class Analysis:
    """The analysis of one run's traces."""

    ranks: tuple[RankTrace, ...]
    steps: Mapping[int, tuple[StepTimes, ...]]
    """Rank -> the times of its steps."""
    critical: Mapping[int, Mapping[str, float]]
    """Rank -> seconds of the mean step's critical path, by what is on it; they sum to the step."""
    causes: tuple[Cause, ...]
    """The longest first."""
    slow_layers: tuple[SlowLayer, ...]
    fixes: tuple[Fix, ...]
    """Empty without a GPU: a CPU does not show what a change would save there."""
    rates: Mapping[int, tuple[Rate, ...]]
    energy: Mapping[int, Energy | None]

    def step_seconds(self, rank: int) -> float:
        """The mean duration of a rank's steps, in seconds."""
        return float(np.mean([one.step.length for one in self.steps[rank]])) * 1e-9

    def busy_share(self, rank: int) -> float:
        """The share of a rank's mean step in which its GPU computes."""
        steps = self.steps[rank]
        return sum(one.busy for one in steps) / sum(one.step.length for one in steps)

    @property
    def has_gpu(self) -> bool:
        """Whether one was recorded; else the CPU's forward and backward stand for it."""
        return all(rank.has_gpu for rank in self.ranks)

    def named(self, text: str) -> str:
        """A text about the GPU; it says "device" if the CPU stands for the GPU."""
        return text if self.has_gpu else text.replace("GPU", "device")

    @property
    def slowest(self) -> int:
        """The rank that computes longest a step: the others wait for it."""
        return max(self.steps, key=lambda rank: sum(one.busy for one in self.steps[rank]))

    @property
    def idlest(self) -> int:
        """The rank whose GPU computes least of its step."""
        return min(self.steps, key=self.busy_share)

    def mean_parts(self, rank: int) -> dict[str, float]:
        """Mean seconds per step of every part."""
        steps = self.steps[rank]
        return {
            part: sum(one.parts[part] for one in steps) / len(steps) * 1e-9
            for part in step_times.PARTS
        }


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate while its work ran, and its measured peak; None if the trace does not say."""

    name: str
    unit: str
    achieved: float | None
    peak: float | None
    busy_share: float
    """Share of the steps' time in which its work ran."""

    @property
    def share(self) -> float | None:
        """The achieved share of the peak; None if unknown."""
        return self.achieved / self.peak if self.achieved and self.peak else None


def rates(rank: RankTrace) -> tuple[Rate, ...]:
    """The rates of all recorded steps of a rank."""
    begin, end = rank.steps[0].begin, rank.steps[-1].end
    peaks = rank.header.peaks if rank.header is not None else Peaks()
    update = rank[kinds.CPU_UPDATE]
    core_seconds = update.threads * (update.end - update.begin) * 1e-9
    found: list[Rate] = []
    for name, unit, spans, amount, peak in (
        ("DRAM, CPU Adam", "B/s", update, update.size, peaks.dram_bytes_per_s),
        ("CPU Adam", "parameters/s", update, update.parameters, peaks.adam_parameters_per_s),
        ("cores, CPU Adam", "cores", update, core_seconds, peaks.cores),
        ("copies to host", "B/s", rank[kinds.D2H], rank[kinds.D2H].size, peaks.d2h_bytes_per_s),
        ("copies to GPU", "B/s", rank[kinds.H2D], rank[kinds.H2D].size, peaks.h2d_bytes_per_s),
    ):
        chosen = (spans.begin >= begin) & (spans.begin < end)
        busy = spans.select(chosen).covered().length * 1e-9
        total = float(amount[chosen].sum())
        achieved = total / busy if busy > 0.0 and total > 0.0 else None
        if len(spans):
            found.append(Rate(name, unit, achieved, peak, busy / ((end - begin) * 1e-9)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Energy:
    """Mean joules per step; None without a counter."""

    gpu: float | None
    cpu: float | None
    tokens_per_joule: float | None
    """Per joule counted; None if these include processors that may have worked for other ranks."""


def energy(rank: RankTrace) -> Energy | None:
    """A rank's energy per step; None if none was recorded."""
    gpu, cpu = (
        _mean([getattr(step, key) for step in rank.steps]) for key in ("gpu_joules", "cpu_joules")
    )
    if gpu is None and cpu is None:
        return None
    total = (gpu or 0.0) + (cpu or 0.0)
    tokens = rank.header.tokens_per_step if rank.header is not None else None
    if cpu is not None and rank.world_size > 1:
        tokens = None  # the tokens are this rank's, the CPU's joules the whole host's
    return Energy(gpu, cpu, tokens / total if tokens is not None and total > 0.0 else None)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def analyse(ranks: Sequence[RankTrace]) -> Analysis:
    """Analyses the traces of one run, one per rank."""
    graph = Graph(ranks)
    walkers = {rank.rank: Blockers(graph, rank.rank) for rank in ranks}
    steps = {rank.rank: times_of(rank, walkers[rank.rank]) for rank in ranks}
    idle = {number: [b for one in of_rank for b in one.idle] for number, of_rank in steps.items()}
    replay = Replay(graph, idle)
    return Analysis(
        ranks=tuple(ranks),
        steps=steps,
        critical={rank.rank: _critical(rank, walkers[rank.rank]) for rank in ranks},
        causes=_causes(steps),
        slow_layers=_slow_layers(steps),
        fixes=fixes(graph, replay, steps) if all(rank.has_gpu for rank in ranks) else (),
        rates={rank.rank: rates(rank) for rank in ranks},
        energy={rank.rank: energy(rank) for rank in ranks},
    )


def _critical(rank: RankTrace, walker: Blockers) -> dict[str, float]:
    found: Counter[str] = Counter()
    for step in rank.steps:
        for blame in walker.critical_path(step.begin, step.end):
            found[blame.cause] += blame.length
    return {cause: length / len(rank.steps) * 1e-9 for cause, length in found.most_common()}


def _causes(steps: Mapping[int, Sequence[StepTimes]]) -> tuple[Cause, ...]:
    found: list[Cause] = []
    for rank, of_rank in steps.items():
        for cause in causes.CAUSES:
            blames = [b for one in of_rank for b in one.idle if b.cause == cause]
            if not (total := sum(blame.length for blame in blames)):
                continue
            layer, of_layer = _most(((b.layer, b.length) for b in blames), NONE)
            detail, _ = _most(((b.detail, b.length) for b in blames), "")
            late, _ = _most(((b.rank, b.length) for b in blames), NONE)
            seconds = total / len(of_rank) * 1e-9
            found.append(Cause(rank, cause, seconds, layer, of_layer / total, detail, late))
    return tuple(sorted(found, key=lambda one: -one.seconds))


def _most(pairs: Iterable[tuple[_Key, int]], nothing: _Key) -> tuple[_Key, int]:
    """The key with most of the time, and that time; the key ``nothing`` does not count."""
    sums: Counter[_Key] = Counter()
    for key, length in pairs:
        if key != nothing:
            sums[key] += length
    return max(sums.items(), key=lambda item: item[1], default=(nothing, 0))


def _slow_layers(steps: Mapping[int, Sequence[StepTimes]]) -> tuple[SlowLayer, ...]:
    """Finds slow layers by the median of the same layer on other ranks, and of other layers."""
    found: list[SlowLayer] = []
    for activity in (kinds.FORWARD, kinds.BACKWARD, kinds.CPU_UPDATE, kinds.GPU_UPDATE):
        means = {rank: _layer_means(of_rank, activity) for rank, of_rank in steps.items()}
        for rank, of_layers in means.items():
            least = _SLOW_LEAST * float(np.mean([one.step.length for one in steps[rank]])) * 1e-9
            for layer, seconds in of_layers.items():
                others = [s for n, s in of_layers.items() if n != layer]
                beside = [of[layer] for other, of in means.items() if other != rank and layer in of]
                for compared, is_ranks in ((beside, True), (others, False)):
                    usual = float(np.median(compared)) if compared else seconds
                    if seconds > _SLOW * usual and seconds - usual > least:
                        row = SlowLayer(rank, layer, activity, seconds, usual, is_ranks)
                        found.append(row)
                        break
    return tuple(sorted(found, key=lambda row: row.usual - row.seconds))


def _layer_means(steps: Sequence[StepTimes], activity: str) -> dict[int, float]:
    totals: dict[int, list[int]] = {}
    for one in steps:
        for layer, activities in one.layers.items():
            if activity in activities:
                totals.setdefault(layer, []).append(activities[activity].total)
    return {layer: float(np.median(values)) * 1e-9 for layer, values in totals.items()}


# -- as JSON -----------------------------------------------------------------------------------


def as_json(analysis: Analysis) -> dict[str, Any]:
    """The analysis as JSON; times in seconds, within a step in ns, so that they sum exactly."""
    return {
        "ranks": [_rank_json(analysis, rank) for rank in analysis.ranks],
        "slowest_rank": analysis.slowest,
        "causes": [_known(asdict(cause)) for cause in analysis.causes],
        "slow_layers": [asdict(layer) for layer in analysis.slow_layers],
        "fixes": [asdict(fix) for fix in analysis.fixes],
    }


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without those that name nothing."""
    return {key: value for key, value in values.items() if value not in (NONE, "")}


def _rank_json(analysis: Analysis, rank: RankTrace) -> dict[str, Any]:
    energy = analysis.energy[rank.rank]
    return {
        "rank": rank.rank,
        "file": str(rank.path),
        "header": None if rank.header is None else rank.header.model_dump(mode="json"),
        "compute": "kernels" if rank.are_kernels else "layers",
        "unknown": list(rank.unknown),
        "step_seconds": analysis.step_seconds(rank.rank),
        "critical_path_seconds": dict(analysis.critical[rank.rank]),
        "rates": [
            asdict(rate) | {"share_of_peak": rate.share} for rate in analysis.rates[rank.rank]
        ],
        "energy": None if energy is None else asdict(energy),
        "steps": [_step_json(one) for one in analysis.steps[rank.rank]],
    }


def _step_json(one: StepTimes) -> dict[str, Any]:
    idle = [
        {"begin_ns": b.begin - one.step.begin, "length_ns": b.length, "cause": b.cause}
        | _known({"evidence": b.evidence, "layer": b.layer, "rank": b.rank, "detail": b.detail})
        for b in one.idle
    ]
    return {
        "step": one.step.number,
        "begin_ns": one.step.begin,
        "length_ns": one.step.length,
        "gpu_busy_ns": one.busy,
        "parts_ns": {part: length for part, length in one.parts.items() if length},
        "activities_ns": {name: o._asdict() for name, o in one.activities.items()},
        "layers_ns": {
            layer: {name: o._asdict() for name, o in activities.items()}
            for layer, activities in one.layers.items()
        },
        "idle": idle,
    }
