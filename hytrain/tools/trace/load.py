"""Reads files as :class:`RankTrace` and checks them; an event's category tells what it is."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hytrain.errors import TraceError
from hytrain.formats import trace_file as names
from hytrain.formats.file_kind import kind_of
from hytrain.formats.trace_file import TraceFile, read_trace
from hytrain.tools.trace import hytrain_spans, kinds, kineto
from hytrain.tools.trace.intervals import of_pairs, union
from hytrain.tools.trace.kineto import KinetoEvents
from hytrain.tools.trace.spans import NONE, RankTrace, Span, Spans, Step, table

_RANK_IN_NAME = re.compile(r"rank[_-]?(\d+)")
_VIZTRACER = "fee"
"""VizTracer's category of functions, "FEE", in lower case."""


def load(paths: Sequence[Path]) -> tuple[RankTrace, ...]:
    """Reads the traces of all files and folders; sorted by rank.

    Raises:
        TraceError: files cannot be used, or two are of the same rank or of different runs.
    """
    ranks: list[RankTrace] = []
    wrong: list[str] = []
    for number, path in enumerate(itertools.chain.from_iterable(map(_files, paths))):
        try:
            ranks.append(_rank_trace(read_trace(path), number))
        except TraceError as error:
            wrong.append(str(error))
    if wrong:
        raise TraceError(";\n".join(wrong))
    ranks.sort(key=lambda rank: rank.rank)
    for one, other in itertools.pairwise(ranks):
        if one.rank == other.rank:
            raise TraceError(
                f"{one.path} and {other.path} are both of rank {one.rank}: give the files of one "
                "run, one a rank (`hytrain trace compare` is for two runs)"
            )
        _check_same_run(one, other)
    return tuple(_with_missing_ranks(rank, len(ranks)) for rank in ranks)


def _files(path: Path) -> list[Path]:
    """The file itself, or the traces in a folder.

    Raises:
        TraceError: the folder has none.
    """
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if kind_of(file) == "trace")
    if not files:
        raise TraceError(f"{path} is a folder without a trace: give the traces of a run")
    return files


def _check_same_run(one: RankTrace, other: RankTrace) -> None:
    if one.header is None or other.header is None:
        return
    found = [f"{rank.path} is of a run with world size {rank.world_size}" for rank in (one, other)]
    if one.world_size == other.world_size:
        # Ranks of a run wait for each other in every step.
        if one.steps[0].begin < other.steps[-1].end and other.steps[0].begin < one.steps[-1].end:
            return
        found = [f"{one.path} and {other.path} were recorded at different times"]
    raise TraceError(
        f"{', '.join(found)}: give the files of one run (`hytrain trace compare` is for two)"
    )


def _with_missing_ranks(rank: RankTrace, given: int) -> RankTrace:
    world_size = rank.world_size
    if world_size <= given or not len(rank[kinds.COMMUNICATION]):
        return rank
    words = (
        f"traces of {given} of {world_size} ranks were given: a collective that waits for a late "
        "rank and one that is slow cannot be told apart"
    )
    return replace(rank, unknown=(*rank.unknown, words))


# -- a file's events ---------------------------------------------------------------------------


def _gather(trace: TraceFile) -> tuple[dict[str, list[Span]], list[Step], KinetoEvents]:
    """Returns hytrain's spans by resource, its steps, and Kineto's events."""
    header, foreign = trace.header, KinetoEvents()
    rows, steps = dict[str, list[Span]](), list[Step]()
    offset = hytrain_spans.nanoseconds(header.clock_offset_us) if header else _foreign_offset(trace)
    lanes: dict[tuple[Any, Any], int] = {}
    for event in trace.events:
        category = event.get("cat")
        if event["ph"] != "X" or not isinstance(category, str):
            continue
        if header is not None and event.get("pid") != header.rank:
            continue  # another process, or another rank in a file that joins several
        lane = lanes.setdefault((event.get("pid"), event.get("tid")), len(lanes))
        if category == names.CATEGORY[names.STEPS]:
            if (step := hytrain_spans.step_of(event, offset)) is not None:
                steps.append(step)
        elif category in kineto.CATEGORIES:
            foreign.add(event, lane, offset)
        elif category in hytrain_spans.CATEGORIES or category.lower() == _VIZTRACER:
            resource, span = hytrain_spans.span_of(event, lane, offset)
            rows.setdefault(resource, []).append(span)
    return rows, steps, foreign


def _foreign_offset(trace: TraceFile) -> int:
    base = trace.top.get("baseTimeNanoseconds")
    if not isinstance(base, int):
        return 0
    if not 0 <= base <= 1000 * names.MOST_MICROSECONDS:
        raise TraceError(f'the trace {trace.path}: "baseTimeNanoseconds" is no time: {base}')
    return base


# -- what was gathered, as a rank's trace ------------------------------------------------------


def _rank_trace(trace: TraceFile, number: int) -> RankTrace:
    header, unknown = trace.header, list[str]()
    own, steps, foreign = _gather(trace)
    marks = sorted(set(steps or foreign.steps), key=lambda step: (step.begin, step.number))
    # What both recorded is the same work: ours is taken, as it knows the layers. Without marks the
    # whole trace is one step.
    rows = foreign.rows([(s.begin, s.end) for s in marks] or [(0, 2**62)]) | own
    own_compute = own.get(kinds.COMPUTE, [])
    are_kernels = bool(foreign.gpu) or not all(map(hytrain_spans.is_layer_pass, own_compute))
    stand_in = ""
    if not rows.get(kinds.COMPUTE):
        rows[kinds.COMPUTE] = _host_compute(trace.path, rows)
        stand_in = "the host's forward and backward, less their waits, stand"
    elif header is None and not are_kernels:
        stand_in = "operators of the CPU stand"
    elif header is not None and header.device == "cpu":
        stand_in = "the CPU's forward and backward by layer stand"
    if stand_in:
        unknown.append(f"no GPU was recorded: {stand_in} for it")
    elif not are_kernels:
        unknown.append(
            "the GPU was recorded by layer, not by kernel: gaps inside of a layer count as compute"
        )
    spans = {resource: table(rows.get(resource, ())) for resource in kinds.RESOURCES}
    if header is None:
        unknown += _foreign_unknown(spans, foreign)
    rank, world_size = _rank_and_world_size(trace, number)
    return RankTrace(
        rank=rank,
        path=trace.path,
        steps=_steps(trace.path, marks, spans, unknown),
        spans=spans,
        header=header,
        world_size=world_size,
        unknown=tuple(unknown),
        are_kernels=are_kernels,
        has_gpu=not stand_in,
    )


def _rank_and_world_size(trace: TraceFile, number: int) -> tuple[int, int]:
    """From the header; in a foreign trace from Kineto or the file's name, else ``number`` and 1."""
    if trace.header is not None:
        return trace.header.rank, trace.header.world_size
    found = trace.top.get("distributedInfo")
    info: Mapping[str, Any] = found if isinstance(found, dict) else {}
    rank, world_size = info.get("rank"), info.get("world_size")
    if not isinstance(rank, int):
        match = _RANK_IN_NAME.search(trace.path.name)
        rank = int(match[1]) if match else number
    return rank, world_size if isinstance(world_size, int) else 1


def _host_compute(path: Path, rows: Mapping[str, list[Span]]) -> list[Span]:
    """The host's forward and backward without its waits, for runs without a GPU.

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


def _foreign_unknown(spans: Mapping[str, Spans], events: KinetoEvents) -> list[str]:
    unknown = ["it is not hytrain's: the chain gradient -> CPU Adam -> weights was not recorded"]
    compute = spans[kinds.COMPUTE]
    if not (compute.layer != NONE).any():
        unknown.append(
            "layers are not named: record with with_modules=True and with_stack=True, or put "
            'record_function("layers.3") around them'
        )
    if not events.backward:
        unknown.append("forward and backward cannot be told apart: no autograd nodes were recorded")
    if (compute.launched == NONE).all():
        unknown.append("launches were not recorded: whether the host was late is unknown")
    if len(spans[kinds.SYNC]) and not len(spans[kinds.PYTHON]):
        unknown.append("synchronizations have no Python line: record with with_stack=True")
    return unknown


def _steps(
    path: Path, marks: Sequence[Step], spans: Mapping[str, Spans], unknown: list[str]
) -> tuple[Step, ...]:
    if not marks:
        busy = [rows for key, rows in spans.items() if len(rows) and key != kinds.PYTHON]
        begin, end = min(int(r.begin[0]) for r in busy), max(int(r.end.max()) for r in busy)
        unknown.append(
            "it has no marks of steps (torch.profiler's step()): all of it counts as one step"
        )
        return (Step(0, begin, end),)
    for one, other in itertools.pairwise(marks):
        # Steps may come from several threads or files: up to a microsecond is rounding.
        if other.begin < one.end - 1000:
            raise TraceError(
                f"the trace {path}: step {other.number} begins before step {one.number} ends"
            )
    whole = union(
        np.array([s.begin for s in marks], np.int64), np.array([s.end for s in marks], np.int64)
    )
    if not len(whole & spans[kinds.COMPUTE].covered()):
        raise TraceError(f"the trace {path}: no compute lies in its steps: record whole steps")
    ends = [other.begin for other in marks[1:]] + [marks[-1].end]
    return tuple(
        replace(step, end=min(step.end, end)) for step, end in zip(marks, ends, strict=True)
    )
