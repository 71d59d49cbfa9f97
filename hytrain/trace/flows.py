"""Links spans of a recording: each layer's way through a step, and how many updates are pending."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hytrain.formats import trace_file as names
from hytrain.trace.counters import Sample
from hytrain.trace.recorder import Final, Span

_WAY = (names.D2H, names.CPU_ADAM, names.GPU_UPDATE, names.H2D)
_Key = tuple[int, int]
"""(step, layer)."""


class Way(NamedTuple):
    """The way of a layer's gradient of one step, through its update, to the next forward."""

    final: Final | None
    """When the gradient was final; None if that was before the recording."""
    spans: Sequence[Span]
    """Copies and updates of the gradient, in the order of their begin."""
    forward: Span | None
    """The next forward of the layer; None if not recorded."""

    @property
    def updated_ns(self) -> float | None:
        """When all of it had been updated once; None without an update."""
        ends: dict[Any, float] = {}
        for span in self.spans:
            if span.lane.startswith((names.GPU_UPDATE, names.CPU_ADAM)):
                ends.setdefault(span.args.get(names.ARG_CHUNK), span.end_ns)
        return max(ends.values(), default=None)


def ways(spans: Iterable[Span], finals: Sequence[Final]) -> dict[_Key, Way]:
    """The ways of all layers through all steps, so far as anything of them was recorded."""
    found: dict[_Key, list[Span]] = defaultdict(list)
    forwards: dict[int, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda each: each.begin_ns):
        layer, step = span.args.get(names.ARG_LAYER), span.args.get(names.ARG_STEP)
        if layer is None or step is None:
            continue
        if span.args.get(names.ARG_PASS) == names.PASSES[0]:
            forwards[layer].append(span)
        elif span.lane.startswith(_WAY) and "state" not in span.name:
            found[step, layer].append(span)
    final_of = {(final.step, final.layer): final for final in finals}
    return {
        key: Way(final_of.get(key), found[key], _next_forward(forwards[key[1]], key[0]))
        for key in sorted({*found, *final_of})
    }


def _next_forward(forwards: Sequence[Span], step: int) -> Span | None:
    return next((span for span in forwards if span.args[names.ARG_STEP] > step), None)


def flow_events(
    found: dict[_Key, Way], spans: Iterable[Span], place: Callable[[Span], tuple[int, int]]
) -> Iterator[dict[str, Any]]:
    """Yields arrows from a gradient's end to its copy, its update, the copy back and the next
    forward. ``spans``: the backward passes among them are used; ``place``: a span's (pid, tid)."""
    backwards: dict[_Key, list[Span]] = defaultdict(list)
    for span in spans:
        if span.args.get(names.ARG_PASS) == names.PASSES[1]:
            backwards[span.args[names.ARG_STEP], span.args[names.ARG_LAYER]].append(span)
    for passes in backwards.values():
        passes.sort(key=lambda span: span.begin_ns)
    for (step, layer), way in found.items():
        stops = list(_stops(way, backwards[step, layer]))
        if len(stops) < 2:
            continue
        last = len(stops) - 1
        for index, (span, at_ns) in enumerate(stops):
            pid, tid = place(span)
            phase = "s" if index == 0 else "f" if index == last else "t"
            event: dict[str, Any] = {
                "ph": phase,
                "cat": names.FLOW_CATEGORY,
                "name": f"layer {layer}",
                # Unique across ranks, too: their files may be joined.
                "id": (pid << 48) + (step << 16) + layer,
                "pid": pid,
                "tid": tid,
                "ts": at_ns / 1e3,
                "args": {names.ARG_LAYER: layer, names.ARG_STEP: step},
            }
            yield {**event, "bp": "e"} if phase == "f" else event


def _stops(way: Way, backwards: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """Yields the spans that the arrow goes through, each with the time at which it binds to it."""
    at_ns = -math.inf
    ends = [span for span in backwards if way.final and span.begin_ns <= way.final.at_ns]
    if ends:
        at_ns = ends[-1].begin_ns + 0.999 * (ends[-1].end_ns - ends[-1].begin_ns)
        yield ends[-1], at_ns
    for lane in _WAY:
        # If a way began before the recording, a chunk's copy back may be there without its update:
        # the arrow would go back in time from a later chunk's update to it.
        later = (s for s in way.spans if s.lane.startswith(lane) and s.begin_ns >= at_ns)
        first = next(later, None)
        if first is not None:
            at_ns = first.begin_ns
            yield first, at_ns
    if way.forward is not None and way.forward.begin_ns >= at_ns:
        yield way.forward, way.forward.begin_ns


def pending_gradients(found: dict[_Key, Way]) -> list[Sample]:
    """At each change, the number of layers whose gradient is final but whose update is not done."""
    changes: list[tuple[float, int]] = []
    for way in found.values():
        if way.final is not None and way.updated_ns is not None:
            changes += [(way.final.at_ns, 1), (max(way.updated_ns, way.final.at_ns), -1)]
    changes.sort()
    sums = itertools.accumulate(change for _, change in changes)
    return [
        Sample(names.COUNTER_PENDING, at_ns, value)
        for (at_ns, _), value in zip(changes, sums, strict=True)
    ]
