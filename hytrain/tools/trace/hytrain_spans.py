"""Spans of hytrain's own recorder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from hytrain.formats import trace_file as names
from hytrain.tools.trace import kinds
from hytrain.tools.trace.spans import NONE, Span, Step

_RESOURCE: Final[Mapping[str, str]] = {
    names.CATEGORY[names.GPU_COMPUTE]: kinds.COMPUTE,
    names.CATEGORY[names.GPU_COMMUNICATION]: kinds.COMMUNICATION,
    names.CATEGORY[names.D2H]: kinds.D2H,
    names.CATEGORY[names.H2D]: kinds.H2D,
    names.CATEGORY[names.GPU_UPDATE]: kinds.GPU_UPDATE,
    names.CATEGORY[names.CPU_ADAM]: kinds.CPU_UPDATE,
    names.CATEGORY[names.WAITS_OF_FORWARD]: kinds.WAIT,
    names.CATEGORY[names.HOST_WAITS]: kinds.SYNC,
}
CATEGORIES: Final = frozenset(names.CATEGORY.values())
_DETAIL: Final[Mapping[str, str]] = {
    kinds.COMPUTE: names.ARG_PASS,
    kinds.COMMUNICATION: names.ARG_COLLECTIVE,
    kinds.CPU_UPDATE: names.ARG_TASK,
    kinds.WAIT: names.ARG_WHAT,
    kinds.SYNC: names.ARG_LINE,
}
_PHASES: Final = (names.PHASE_FORWARD, names.PHASE_BACKWARD, names.PHASE_OPTIMIZER)
_LAYER_PASS: Final = re.compile(r"(forward|backward|recompute) layer (\d{1,9})\b")
_STEP: Final = re.compile(r"step (\d{1,9})")


def nanoseconds(microseconds: float) -> int:
    """A file's time or duration in whole nanoseconds."""
    return round(microseconds * 1000.0)


def span_of(event: Mapping[str, Any], lane: int, offset: int) -> tuple[str, Span]:
    """Returns the resource that an event occupies, and its span.

    ``event``: the recorder's, or a function of VizTracer's; has ph "X" and is not a step.
    ``offset``: nanoseconds to be added to reach rank 0's clock.
    """
    args: Mapping[str, Any] = event.get("args", {})
    name: str = event["name"]
    resource = _RESOURCE.get(event["cat"])
    if resource is None:
        resource = kinds.PYTHON
        if name in _PHASES:
            resource = kinds.PHASE
        elif name == names.PHASE_DATA:
            resource = kinds.DATA
    begin = nanoseconds(event["ts"]) + offset
    launched = args.get(names.ARG_LAUNCHED)
    detail = str(args.get(_DETAIL.get(resource, ""), ""))
    layer = whole_of(args.get(names.ARG_LAYER))
    if resource == kinds.COMPUTE and (match := _LAYER_PASS.match(name)):
        detail, layer = detail or match[1], int(match[2]) if layer == NONE else layer
    span = Span(
        begin=begin,
        end=begin + nanoseconds(event["dur"]),
        name=name,
        layer=layer,
        chunk=whole_of(args.get(names.ARG_CHUNK)),
        step=whole_of(args.get(names.ARG_STEP)),
        size=number_of(args.get(names.ARG_BYTES)),
        parameters=number_of(args.get(names.ARG_PARAMETERS)),
        threads=max(0, whole_of(args.get(names.ARG_THREADS))),
        lane=lane,
        detail=detail or (kinds.OTHER if resource == kinds.COMPUTE else ""),
        launched=NONE if launched is None else nanoseconds(number_of(launched)) + offset,
        slot=whole_of(args.get(names.ARG_SLOT)),
    )
    return resource, span


def is_layer_pass(span: Span) -> bool:
    """Whether a span of compute is a layer's whole pass, timed by CUDA events, not a kernel."""
    return _LAYER_PASS.match(span.name) is not None


def step_of(event: Mapping[str, Any], offset: int) -> Step | None:
    """The step of a span on the lane "steps"; None if it has no number."""
    args: Mapping[str, Any] = event.get("args", {})
    number, match = whole_of(args.get(names.ARG_STEP)), _STEP.search(event["name"])
    if number == NONE and match is None:
        return None
    begin = nanoseconds(event["ts"]) + offset
    return Step(
        number if match is None or number != NONE else int(match[1]),
        *(begin, begin + nanoseconds(event["dur"])),
        gpu_joules=_joules(args.get(names.ARG_GPU_ENERGY)),
        cpu_joules=_joules(args.get(names.ARG_CPU_ENERGY)),
    )


def _joules(value: Any) -> float | None:
    return None if value is None else number_of(value)


def whole_of(value: Any) -> int:
    """The number of a layer, step or launch in an event's arguments; NONE if it is not valid."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value < 2**62 else NONE


def number_of(value: Any) -> float:
    """A size or a time in an event's arguments; 0 if it is not valid."""
    is_number = isinstance(value, (int, float)) and math.isfinite(value)
    return float(value) if is_number and abs(value) <= 1e18 else 0.0
