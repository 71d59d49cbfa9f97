"""What the update worker has written to its ring, as spans."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hytrain import _C
from hytrain.formats import trace_file as names
from hytrain.trace.recorder import Span

_COPIES = {
    "gradient_to_host": (names.D2H, "gradient"),
    "gradient_to_device": (names.H2D, "gradient"),
    "weights_to_device": (names.H2D, "weights"),
    "weights_to_host": (names.D2H, "weights"),
    "state_to_host": (names.D2H, "state"),
    "state_to_device": (names.H2D, "state"),
}


def worker_spans(
    found: Iterable[_C.TraceSpan],
    layer_of: Callable[[int], int],
    correct: Callable[[float], float],
    num_threads: int,
) -> Iterator[Span]:
    """Passes over chunks (on the host's clock) and copies (on the device's).

    Args:
        found: as the ring has them.
        layer_of: the model's layer of a worker's.
        correct: makes a device's time the host's.
        num_threads: that make a pass together; 1 where each has spans of its own.
    """
    for span in found:
        layer = layer_of(span.layer)
        args: dict[str, Any] = {
            names.ARG_LAYER: layer,
            names.ARG_CHUNK: span.chunk,
            names.ARG_STEP: span.step,
            names.ARG_BYTES: span.bytes,
        }
        copied = _COPIES.get(span.kind.name)
        if copied is not None:
            lane, what = copied
            if span.slot >= 0:
                args[names.ARG_SLOT] = span.slot
            begin, end = correct(span.begin_ns), correct(span.end_ns)
            yield Span(lane, f"{what} layer {layer}", begin, end, args)
            continue
        args |= {
            names.ARG_PARAMETERS: span.elements,
            names.ARG_TASK: span.kind.name,
            names.ARG_THREADS: num_threads,
        }
        lane = names.CPU_ADAM if span.thread == 0 else f"{names.CPU_ADAM} {span.thread + 1}"
        title = f"update layer {layer} chunk {span.chunk}"
        yield Span(lane, title, span.begin_ns, span.end_ns, args)
