"""A recording as events of the trace format, and as a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hytrain.formats import trace_file as names
from hytrain.formats.record import replacing
from hytrain.trace.counters import Sample
from hytrain.trace.flows import flow_events, pending_gradients, ways
from hytrain.trace.kernels import ARG_STREAM, CUDA_CALLS
from hytrain.trace.recorder import Final, Span

FIRST_TID = 10_000_000
"""First tid of our lanes, above the threads and streams of whatever else a file has."""


@dataclass(frozen=True, slots=True)
class Recording:
    """All that one rank has recorded."""

    header: names.TraceHeader
    spans: Sequence[Span]
    finals: Sequence[Final] = ()
    samples: Sequence[Sample] = ()

    def events(self) -> list[dict[str, Any]]:
        """The events in Chrome's Trace Event format: metadata first, the rest in no order."""
        rank = self.header.rank
        lines = sorted({_line(span) for span in self.spans}, key=lambda line: _order(*line))
        tid_of = {line: FIRST_TID + number for number, line in enumerate(lines)}
        found = ways(self.spans, self.finals)
        samples = [*self.samples, *pending_gradients(found)]
        return [
            *_metadata(rank, tid_of),
            *(_span_event(span, rank, tid_of[_line(span)]) for span in self.spans),
            *flow_events(found, self.spans, lambda span: (rank, tid_of[_line(span)])),
            *(_counter_event(sample, rank) for sample in samples),
        ]

    def write(self, path: Path) -> None:
        """Writes the file: all of it or nothing.

        Raises:
            OSError: it cannot be written.
        """
        content = {
            "traceEvents": self.events(),
            "displayTimeUnit": "ms",
            names.HEADER_KEY: self.header.model_dump(mode="json"),
        }
        with replacing(path) as file:
            json.dump(content, file, allow_nan=False, separators=(",", ":"))


_Line = tuple[str, str]
"""A lane and one of its streams: work that runs beside other work needs a line of its own."""


def _line(span: Span) -> _Line:
    return span.lane, str(span.args.get(ARG_STREAM, ""))


def _order(lane: str, stream: str = "") -> tuple[int, int, str, str]:
    """A lane's place in the format's order; numbered lanes by their number."""
    for number, known in enumerate(names.LANES):
        if lane == known or lane.startswith((f"{known} ", f"{known}:")):
            rest = lane[len(known) :].strip()
            return number, int(rest) if rest.isdigit() else 0, rest, stream
    return len(names.LANES), 0, lane, stream


def _metadata(rank: int, tid_of: Mapping[_Line, int]) -> Iterable[dict[str, Any]]:
    yield _named("process_name", rank, 0, {"name": f"rank {rank}"})
    yield _named("process_sort_index", rank, 0, {"sort_index": rank})
    for number, ((lane, _stream), tid) in enumerate(tid_of.items()):
        yield _named("thread_name", rank, tid, {"name": lane})
        yield _named("thread_sort_index", rank, tid, {"sort_index": number})


def _named(name: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def category_of(lane: str) -> str:
    """The category of a lane's spans."""
    if lane == CUDA_CALLS:
        return "cuda_runtime"
    return names.CATEGORY[names.LANES[_order(lane)[0]]]


def _span_event(span: Span, pid: int, tid: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category_of(span.lane),
        "name": span.name,
        "pid": pid,
        "tid": tid,
        "ts": span.begin_ns / 1e3,
        # The correction of clocks may leave a span of zero length slightly negative.
        "dur": max(0.0, span.end_ns - span.begin_ns) / 1e3,
        "args": span.args,
    }


def _counter_event(sample: Sample, rank: int) -> dict[str, Any]:
    return {
        "ph": "C",
        "name": sample.name,
        "pid": rank,
        "tid": 0,
        "ts": sample.at_ns / 1e3,
        "args": {"value": sample.value},
    }
