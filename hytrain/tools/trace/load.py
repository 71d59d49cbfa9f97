"""Files to :class:`RankTrace`: what a file's events are, told by their category, and checks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hytrain.errors import TraceError
from hytrain.formats import trace_file as names
from hytrain.formats.trace_file import TraceFile, TraceHeader, read_trace
from hytrain.tools.trace import kineto, ours
from hytrain.tools.trace import spans as kinds
from hytrain.tools.trace.intervals import of_pairs, union
from hytrain.tools.trace.kineto import KinetoEvents
from hytrain.tools.trace.spans import NONE, Counter, RankTrace, Span, Step, table

_RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)")
_VIZTRACER = "fee"  # its category of functions, "FEE"


def load(paths: Sequence[Path]) -> tuple[RankTrace, ...]:
    """The ranks of all files, by rank.

    Raises:
        TraceError: a file cannot be used, or two have the same rank.
    """
    ranks: list[RankTrace] = []
    for path in paths:
        trace = read_trace(path)
        ranks += _ranks_of(trace, next_rank=len(ranks))
    ranks.sort(key=lambda rank: rank.rank)
    for one, other in itertools.pairwise(ranks):
        if one.rank == other.rank:
            raise TraceError(
                f"{one.path} and {other.path} are both of rank {one.rank}: give the files of one "
                "run, one a rank (`hytrain trace compare` is for two runs)"
            )
    return tuple(_with_missing_ranks(rank, len(ranks)) for rank in ranks)


def _with_missing_ranks(rank: RankTrace, given: int) -> RankTrace:
    world_size = rank.world_size
    if world_size <= given or not len(rank[kinds.COMMUNICATION]):
        return rank
    words = (
        f"traces of {given} of {world_size} ranks were given: a collective that waits for a late "
        "rank and one that is slow cannot be told apart"
    )
    return replace(rank, unknown=(*rank.unknown, words))


@dataclass(slots=True)
class _Rank:
    """What is gathered of a rank while its file is gone through."""

    rows: dict[str, list[Span]] = field(default_factory=dict[str, list[Span]])
    steps: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    counters: dict[str, list[tuple[int, float]]] = field(
        default_factory=dict[str, list[tuple[int, float]]]
    )
    kineto: KinetoEvents = field(default_factory=KinetoEvents)
    threads: dict[int, str] = field(default_factory=dict[int, str])
    """Lane -> name."""


def _ranks_of(trace: TraceFile, next_rank: int) -> list[RankTrace]:
    headers: dict[int, TraceHeader | None] = {header.rank: header for header in trace.headers}
    if not headers:
        headers = {_foreign_rank(trace, next_rank): None}
    gathered = {rank: _Rank() for rank in headers}
    _gather(trace, headers, gathered)
    return [_finish(trace, rank, headers[rank], gathered[rank]) for rank in headers]


def _foreign_rank(trace: TraceFile, next_rank: int) -> int:
    """Of Kineto's own word, of the file's name, or counted."""
    info = trace.top.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    match = _RANK_IN_NAME.search(trace.path.name)
    return rank if isinstance(rank, int) else int(match[1]) if match else next_rank


def _gather(
    trace: TraceFile, headers: Mapping[int, TraceHeader | None], gathered: Mapping[int, _Rank]
) -> None:
    base = trace.top.get("baseTimeNanoseconds")
    if None not in headers.values() or not isinstance(base, int):
        base = 0
    if not 0 <= base <= 1000 * names.MOST_MICROSECONDS:
        raise TraceError(f'the trace {trace.path}: "baseTimeNanoseconds" is no time: {base}')
    only = next(iter(headers)) if len(headers) == 1 else None
    lanes: dict[tuple[Any, Any], int] = {}
    for event in trace.events:
        phase = event["ph"]
        if phase not in ("X", "C", "M"):
            continue
        rank = event.get("pid") if only is None else only
        if not isinstance(rank, int) or rank not in gathered:
            continue  # of a process that is no rank
        into = gathered[rank]
        header = headers[rank]
        offset = base if header is None else ours.nanoseconds(header.clock_offset_us)
        key = (event.get("pid"), event.get("tid"))
        lane = lanes.setdefault(key, len(lanes))
        if phase == "M":
            if event.get("name") == "thread_name":
                into.threads[lane] = str(event.get("args", {}).get("name", ""))
        elif phase == "C":
            _add_counter(into, event, offset)
        else:
            _add_span(into, event, lane, offset)


def _add_counter(into: _Rank, event: Mapping[str, Any], offset: int) -> None:
    values = [v for v in event.get("args", {}).values() if isinstance(v, (int, float))]
    if values and isinstance(event.get("name"), str):
        sample = ours.nanoseconds(event["ts"]) + offset, ours.number_of(values[0])
        into.counters.setdefault(event["name"], []).append(sample)


def _add_span(into: _Rank, event: dict[str, Any], lane: int, offset: int) -> None:
    category = event.get("cat")
    if not isinstance(category, str):
        return
    if category == names.CATEGORY[names.STEPS]:
        number = ours.step_number(event)
        begin = ours.nanoseconds(event["ts"]) + offset
        if number is not None:
            into.steps.append((number, begin, begin + ours.nanoseconds(event["dur"])))
    elif category in ours.CATEGORIES:
        if (found := ours.span_of(event, lane, offset)) is not None:
            into.rows.setdefault(found[0], []).append(found[1])
    elif category in kineto.CATEGORIES:
        into.kineto.add(event, lane, offset)
    elif category.lower() == _VIZTRACER:
        begin = ours.nanoseconds(event["ts"]) + offset
        end = begin + ours.nanoseconds(event["dur"])
        span = Span(begin, end, event["name"], lane=lane)
        into.rows.setdefault(kinds.PYTHON, []).append(span)


# -- what was gathered, as a rank's trace ------------------------------------------------------


def _finish(trace: TraceFile, rank: int, header: TraceHeader | None, gathered: _Rank) -> RankTrace:
    unknown: list[str] = []
    marks = sorted(set(gathered.steps or gathered.kineto.steps), key=lambda mark: mark[1])
    # Without marks all of it is one step.
    foreign = gathered.kineto.rows([mark[1:] for mark in marks] or [(0, 2**62)])
    rows, are_kernels = _merged(gathered.rows, foreign, bool(gathered.kineto.gpu))
    if not rows.get(kinds.COMPUTE):
        rows[kinds.COMPUTE] = _host_compute(trace.path, rows)
        unknown.append(
            "no GPU was recorded: the host's forward and backward, less their waits, stand for it"
        )
    elif header is None and not are_kernels:
        unknown.append("no GPU was recorded: operators of the CPU stand for it")
    elif header is not None and header.device == "cpu":
        unknown.append("there was no GPU: the CPU's forward and backward by layer stand for it")
    elif not are_kernels:
        unknown.append(
            "the GPU was recorded by layer, not by kernel: gaps inside of a layer count as compute"
        )
    spans = {resource: table(rows.get(resource, ())) for resource in kinds.RESOURCES}
    if header is None:
        unknown += _foreign_unknown(spans, gathered)
    return RankTrace(
        rank=rank,
        path=trace.path,
        steps=_steps(trace.path, marks, spans, unknown),
        spans=spans,
        header=header,
        world_size=_world_size(trace, header),
        counters={name: _counter(samples) for name, samples in gathered.counters.items()},
        unknown=tuple(unknown),
        launcher=_launcher(gathered, rows),
        are_kernels=are_kernels,
    )


def _world_size(trace: TraceFile, header: TraceHeader | None) -> int:
    if header is not None:
        return header.world_size
    info = trace.top.get("distributedInfo")
    size = info.get("world_size") if isinstance(info, dict) else None
    return size if isinstance(size, int) else 1


def _launcher(gathered: _Rank, rows: Mapping[str, list[Span]]) -> str:
    phases = rows.get(kinds.PHASE, [])
    lane = phases[0].lane if gathered.rows.get(kinds.PHASE) else gathered.kineto.launcher()
    return gathered.threads.get(lane, "").removeprefix(f"{names.PYTHON}: ")


def _merged(
    own: dict[str, list[Span]], foreign: dict[str, list[Span]], has_kernels: bool
) -> tuple[dict[str, list[Span]], bool]:
    """Our spans and Kineto's of one rank, nothing twice; whether compute is kernels."""
    own_compute = own.get(kinds.COMPUTE, [])
    layers = [span for span in own_compute if ours.is_layer_pass(span)]
    kernels = [span for span in own_compute if not ours.is_layer_pass(span)]
    rows = {key: list(value) for key, value in own.items()}
    for resource, spans in foreign.items():
        # Copies, updates and waits that both have are the same: ours know their layer.
        if resource in (kinds.PYTHON, kinds.COMPUTE) or not own.get(resource):
            rows.setdefault(resource, []).extend(spans)
    foreign_kernels = foreign.get(kinds.COMPUTE, []) if has_kernels else []
    if not kernels and not foreign_kernels:
        if own_compute:
            rows[kinds.COMPUTE] = own_compute
        return rows, has_kernels
    rows[kinds.COMPUTE] = _labelled(kernels or foreign_kernels, layers)
    return rows, True


def _labelled(kernels: list[Span], layers: list[Span]) -> list[Span]:
    """Kernels with the layer and pass of the timed layer in whose time they began."""
    layers = sorted(layers, key=lambda span: span.begin)
    begins = np.array([span.begin for span in layers], np.int64)
    labelled: list[Span] = []
    for kernel in kernels:
        index = int(np.searchsorted(begins, kernel.begin, side="right")) - 1
        if kernel.layer == NONE and index >= 0 and kernel.begin < layers[index].end:
            layer = layers[index]
            kernel = replace(kernel, layer=layer.layer, detail=layer.detail, step=layer.step)
        labelled.append(kernel)
    return labelled


def _host_compute(path: Path, rows: Mapping[str, list[Span]]) -> list[Span]:
    """Forward and backward of the host, less what it waited, for runs without a GPU.

    Raises:
        TraceError: the trace has neither.
    """
    waited = of_pairs(
        (span.begin, span.end) for key in (kinds.WAIT, kinds.SYNC) for span in rows.get(key, ())
    )
    made: list[Span] = []
    for phase in rows.get(kinds.PHASE, ()):
        if phase.name in (names.PHASE_FORWARD, names.PHASE_BACKWARD):
            whole = of_pairs([(phase.begin, phase.end)])
            for begin, end in (whole - waited).pairs():
                made.append(replace(phase, begin=begin, end=end, detail=phase.name))
    if not made:
        raise TraceError(
            f"the trace {path} has neither GPU events nor operators nor the phases of a training: "
            "record with hytrain's trace, torch.profiler, or viztracer --log_torch"
        )
    return made


def _foreign_unknown(spans: Mapping[str, kinds.Spans], gathered: _Rank) -> list[str]:
    unknown = ["it is not hytrain's: the chain gradient -> CPU Adam -> weights was not recorded"]
    compute = spans[kinds.COMPUTE]
    if not (compute.layer != NONE).any():
        unknown.append(
            "layers are not named: record with with_modules=True and with_stack=True, or put "
            'record_function("layers.3") around them'
        )
    if not gathered.kineto.backward:
        unknown.append("forward and backward cannot be told apart: no autograd nodes were recorded")
    if (compute.launched == NONE).all():
        unknown.append("launches were not recorded: whether the host was late is unknown")
    if len(spans[kinds.SYNC]) and not len(spans[kinds.PYTHON]):
        unknown.append("synchronizations have no Python line: record with with_stack=True")
    return unknown


def _steps(
    path: Path,
    marks: Sequence[tuple[int, int, int]],
    spans: Mapping[str, kinds.Spans],
    unknown: list[str],
) -> tuple[Step, ...]:
    if not marks:
        busy = [rows for key, rows in spans.items() if len(rows) and key != kinds.PYTHON]
        begin, end = min(int(r.begin[0]) for r in busy), max(int(r.end.max()) for r in busy)
        unknown.append(
            "it has no marks of steps (torch.profiler's step()): all of it counts as one step"
        )
        return (Step(0, begin, end),)
    steps = [Step(*mark) for mark in marks]
    for one, other in itertools.pairwise(steps):
        # Of several threads or files: a microsecond is rounding.
        if other.begin < one.end - 1000:
            raise TraceError(
                f"the trace {path}: step {other.number} begins before step {one.number} ends"
            )
    whole = union(
        np.array([s.begin for s in steps], np.int64), np.array([s.end for s in steps], np.int64)
    )
    if not len(whole & spans[kinds.COMPUTE].covered()):
        raise TraceError(f"the trace {path}: no compute lies in its steps: record whole steps")
    ends = [other.begin for other in steps[1:]] + [steps[-1].end]
    return tuple(
        Step(step.number, step.begin, min(step.end, end))
        for step, end in zip(steps, ends, strict=True)
    )


def _counter(samples: list[tuple[int, float]]) -> Counter:
    ordered = sorted(samples)
    return Counter(
        np.array([time for time, _ in ordered], np.int64),
        np.array([value for _, value in ordered], np.float64),
    )
