"""Takes spans while steps are recorded: the engine's parts report them, each with two marks.

A part that reports spans has an attribute ``trace``: a recorder while steps are recorded, and None
otherwise. To check it is all that recording costs then.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from hytrain.formats import trace_file as names
from hytrain.trace.clock import Mark, TraceClock


class Span(NamedTuple):
    """A span on a lane; times in ns of CLOCK_MONOTONIC."""

    lane: str
    name: str
    begin_ns: float
    end_ns: float
    args: dict[str, Any]


class Final(NamedTuple):
    """The moment at which a layer's gradient of a step was final."""

    step: int
    layer: int
    at_ns: float


class _Open(NamedTuple):
    lane: str
    name: str
    begin: Mark
    args: dict[str, Any]


_now = time.monotonic_ns
_Raw = tuple[str, str, Mark, Mark, dict[str, Any], tuple[float, float]]
"""The last item is the span's part of the time between its marks, as (begin, end) shares."""
_ALL = (0.0, 1.0)
_FINAL = "final"
"""Lane of the moments at which gradients are final, which a file does not have as spans."""
_SETTLE_SPANS = 20_000
"""Marks become times if more spans than this wait, or at the end; each takes microseconds."""


class Recorder:
    """The spans of the recorded steps, except the update worker's, which records its own."""

    def __init__(self, clock: TraceClock, layer_names: Sequence[str], most_spans: int) -> None:
        """``layer_names``: in forward order; ``most_spans``: how many are kept, the newest."""
        self.clock = clock
        self._layers = {name: index for index, name in enumerate(layer_names)}
        self._raw: deque[_Raw] = deque()
        self._spans: deque[Span] = deque(maxlen=most_spans)
        self._compute: _Open | None = None
        self._forward_layer = 0
        self._phases: dict[str, int] = {}
        self._updates_from: Mark | None = None
        self._is_going_back = False
        self._is_again = False
        self._together = 1
        self._entries: Counter[int] = Counter()  # each module's, since the forward began
        self.step = 0
        """The step that is recorded now, counted from 1."""
        self.dropped = 0
        """Number of spans that are lost because there were too many."""
        self.micro_batches = 1
        """Number of micro-batches of the last step, counted in backward."""
        self.tokens = 0
        """Tokens of the last step's micro-batches; 0 if they are not seen."""
        self._backwards = 0
        self._new_tokens = 0

    def add(self, lane: str, name: str, begin: Mark, end: Mark, args: dict[str, Any]) -> None:
        """Adds a span of any lane, between two marks."""
        self._raw.append((lane, name, begin, end, args, _ALL))

    # -- phases, on the host ---------------------------------------------------------------------

    def _phase_begins(self, name: str) -> None:
        self._phases.setdefault(name, _now())

    def _phase_ends(self, name: str) -> None:
        begin = self._phases.pop(name, None)
        if begin is not None:
            lane = f"{names.PYTHON}: {threading.main_thread().name}"
            self.add(lane, name, begin, _now(), {names.ARG_STEP: self.step})

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Records a phase of the step on this thread."""
        return self._on_host(f"{names.PYTHON}: {threading.current_thread().name}", name, {})

    def host_wait(self, call: str, line: str) -> AbstractContextManager[None]:
        """Records a wait of the user's code for the device, on this thread."""
        return self._on_host(names.HOST_WAITS, call, {names.ARG_LINE: line})

    @contextmanager
    def _on_host(self, lane: str, name: str, args: dict[str, Any]) -> Generator[None]:
        begin = _now()
        try:
            yield
        finally:
            self.add(lane, name, begin, _now(), {**args, names.ARG_STEP: self.step})

    def count_tokens(self, inputs: Any) -> None:
        """Counts the tokens [B, T] of the model's ``input_ids``, or else of its first input."""
        if isinstance(inputs, torch.Tensor) and not inputs.is_floating_point():
            self._new_tokens += inputs.numel()

    # -- compute ---------------------------------------------------------------------------------

    def _open_compute(self, kind: str, layer: int) -> None:
        args = {names.ARG_LAYER: layer, names.ARG_PASS: kind, **self._now_args()}
        mark = self.clock.mark()
        self._close_compute(mark)
        self._compute = _Open(names.GPU_COMPUTE, f"{kind} layer {layer}", mark, args)

    def _now_args(self) -> dict[str, Any]:
        """Arguments of a span that begins now; with a device, also the host's time, which is
        ahead of it."""
        args: dict[str, Any] = {names.ARG_STEP: self.step}
        if self.clock.is_device:
            args[names.ARG_LAUNCHED] = _now() / 1e3
        return args

    def _close_compute(self, mark: Mark | None = None) -> Mark | None:
        """Ends the open span of compute; what follows it at once begins with the same mark."""
        current, self._compute = self._compute, None
        if current is None:
            return mark
        end = self.clock.mark() if mark is None else mark
        self.add(current.lane, current.name, current.begin, end, current.args)
        return end

    def begin_forward(self) -> None:
        """The model's forward begins; may be called twice for it."""
        if names.PHASE_FORWARD not in self._phases:
            self._entries.clear()
        self._phase_begins(names.PHASE_FORWARD)

    def end_forward(self) -> None:
        """The model's forward is over."""
        if not self._is_going_back:
            self._close_compute()
        self._phase_ends(names.PHASE_FORWARD)

    def enter_layer(self, layer: int, module: int) -> None:
        """A layer's forward begins, perhaps to recompute it, in one of its modules; ``module``:
        the module's number."""
        # In layer-major order one micro-batch enters the last layer after another's backward there.
        self._is_again = self._is_going_back and self._entries[module] >= self._together
        self._entries[module] += 1
        if self._is_again:
            self._open_compute("recompute", layer)
        else:
            self._forward_layer = layer
            self._open_compute("forward", layer)

    def leave_layer(self, layer: int) -> None:
        """A layer's forward is queued; if it was a recomputation, the layer's backward follows."""
        if self._is_again:
            self._is_again = False
            self._open_compute("backward", layer)

    def begin_backward(self, micro_batches: int) -> None:
        """A backward begins, of micro-batches that pass through it together: with the loss, behind
        the last layer."""
        self._phase_ends(names.PHASE_FORWARD)  # in layer-major order nothing else ends it
        self._phase_begins(names.PHASE_BACKWARD)
        self._is_going_back = True
        self._together = micro_batches
        self._backwards += micro_batches
        self._open_compute("backward", self._forward_layer)

    def end_backward(self) -> None:
        """The backward is over."""
        self._is_going_back = False
        self._close_compute()
        self._phase_ends(names.PHASE_BACKWARD)

    def enter_backward(self, layer: int) -> None:
        """The gradient of a layer's output is there: its backward begins."""
        current = self._compute
        if self._is_going_back and (current is None or current.args[names.ARG_LAYER] != layer):
            self._open_compute("backward", layer)

    def gradient(self, layer: int) -> None:
        """A layer's gradient is final: its backward is over."""
        current = self._compute
        if current is not None and current.args[names.ARG_LAYER] == layer:
            mark = self._close_compute()
        else:
            mark = self.clock.mark()
        assert mark is not None
        self.add(_FINAL, "", mark, mark, {names.ARG_STEP: self.step, names.ARG_LAYER: layer})

    # -- waits, collectives, copies, updates -----------------------------------------------------

    @contextmanager
    def waiting(self, layer: int, what: str) -> Generator[None]:
        """Records that compute, or the host if it must, waits for ``what`` at a layer."""
        begin = self.clock.mark()
        if not self._is_going_back:
            self._close_compute(begin)
        try:
            yield
        finally:
            args = {names.ARG_LAYER: layer, names.ARG_STEP: self.step, names.ARG_WHAT: what}
            mark = self.clock.mark()
            self.add(names.WAITS_OF_FORWARD, f"wait layer {layer}", begin, mark, args)

    def collective(self, call: Callable[..., Any], layer: str | None) -> Callable[..., Any]:
        """The collective, timed on the stream on which it is called, or on the host.

        ``call``: of torch.distributed; the largest of its arguments counts as the bytes moved.
        """
        name = str(getattr(call, "__name__", "collective"))
        kind = _COLLECTIVES.get(name, name)
        words, args = self._of_layer(kind.replace("_", " "), layer)
        args[names.ARG_COLLECTIVE] = kind

        def timed(*arguments: Any, **named: Any) -> Any:
            args[names.ARG_BYTES] = max(map(_bytes_of, arguments), default=0)
            with self._on_stream(names.GPU_COMMUNICATION, words, args):
                return call(*arguments, **named)

        return timed

    def weights_to_device(self, layer: str, num_bytes: int) -> AbstractContextManager[None]:
        """Records a copy of a layer's weights from the host, on the current stream."""
        words, args = self._of_layer("weights", layer)
        return self._on_stream(names.H2D, words, args | {names.ARG_BYTES: num_bytes})

    def _of_layer(self, words: str, layer: str | None) -> tuple[str, dict[str, Any]]:
        """A span's name and arguments, with the layer's number if it belongs to a layer."""
        if layer not in self._layers:
            return words, {}
        number = self._layers[layer]
        return f"{words} layer {number}", {names.ARG_LAYER: number}

    @contextmanager
    def _on_stream(self, lane: str, name: str, args: dict[str, Any]) -> Generator[None]:
        args |= self._now_args()
        begin = self.clock.mark()
        try:
            yield
        finally:
            self.add(lane, name, begin, self.clock.mark(), args)

    def updates_begin(self) -> None:
        """Updates on the device follow, on the current stream."""
        self._updates_from = self.clock.mark()

    def layers_updated(self, sizes: Mapping[int, int]) -> None:
        """An update is queued, of one layer or several: each gets its share of the time, by its
        parameters. ``sizes``: layer -> parameters."""
        assert self._updates_from is not None
        begin, self._updates_from = self._updates_from, self.clock.mark()
        total, before = sum(sizes.values()), 0
        for layer, size in sizes.items():
            args = {names.ARG_LAYER: layer, names.ARG_PARAMETERS: size, **self._now_args()}
            share = (before / total, (before + size) / total)
            before += size
            name = f"update layer {layer}"
            self._raw.append((names.GPU_UPDATE, name, begin, self._updates_from, args, share))

    # -- steps and results -----------------------------------------------------------------------

    def end_step(self, begin_ns: int, end_ns: int, args: dict[str, Any]) -> None:
        """A step has ended; it began at the end of the one before."""
        for name in list(self._phases):
            self._phase_ends(name)
        self._is_going_back = False
        self._close_compute()
        self.add(names.STEPS, f"step {self.step}", begin_ns, end_ns, args)
        self.micro_batches, self._backwards = max(1, self._backwards), 0
        self.tokens, self._new_tokens = self._new_tokens, 0
        if len(self._raw) > _SETTLE_SPANS:
            self.settle()

    def settle(self) -> None:
        """Turns marks that the device has passed into times."""
        raw, clock = self._raw, self.clock
        while raw and clock.is_past(raw[0][2]) and clock.is_past(raw[0][3]):
            lane, name, first, last, args, (low, high) = raw.popleft()
            self.dropped += len(self._spans) == self._spans.maxlen
            begin, end = clock.ns(first), clock.ns(last)
            if (low, high) != _ALL:
                begin, end = begin + low * (end - begin), begin + high * (end - begin)
            self._spans.append(Span(lane, name, begin, end, args))

    def spans(self) -> list[Span]:
        """All recorded spans that are past, in no order; call after ``clock.stop()``."""
        self.settle()
        return [self._corrected(span) for span in self._spans if span.lane != _FINAL]

    def finals(self) -> list[Final]:
        """When gradients were final, in this order; call after :meth:`spans`."""
        found = (self._corrected(span) for span in self._spans if span.lane == _FINAL)
        return [Final(f.args[names.ARG_STEP], f.args[names.ARG_LAYER], f.begin_ns) for f in found]

    def _corrected(self, span: Span) -> Span:
        if span.lane in _HOST_LANES or span.lane.startswith(names.PYTHON):
            return span
        begin, end = self.clock.corrected(span.begin_ns), self.clock.corrected(span.end_ns)
        return span._replace(begin_ns=begin, end_ns=end)


_HOST_LANES = (names.STEPS, names.HOST_WAITS)

_COLLECTIVES = {
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "broadcast_object_list": "broadcast",
    "all_gather_object": "all_gather",
}


def _bytes_of(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(_bytes_of(item) for item in value if isinstance(item, torch.Tensor))
    return 0
