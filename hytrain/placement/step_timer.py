"""Times each layer on the real steps by marks on the compute stream, which are read later.

A mark is a CUDA event (on a CPU: a reading of the clock). Nothing here waits: a step's marks are
read once all of them have completed, which they have by the end of the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch

from hytrain.offload.streams import current_stream


@dataclass(frozen=True, slots=True)
class StepSample:
    """One step's times on the compute stream, in seconds.

    If all micro-batches go through the layers together, they count as one.

    Attributes:
        forward: each layer's forward in the step's first micro-batch, without waits for weights.
        cpu_wait: how long forward stood still for weights from the worker.
        gpu_wait: how long forward stood still for updates on the GPU.
        between: from the end of the first forward to the start of the last backward.
        backward: each layer's backward in the last micro-batch, without waits for room for
            gradients.
        tail: from the end of the last backward to the start of the next forward.
        gpu_update: the update of each layer that the GPU updated; the time of several together is
            divided in proportion to their elements.
        seconds: the whole step.
        updates_in_backward: whether these updates ran beside backward, not the next forward.
        launch_bound: whether the device had nearly ended backward when the host had launched the
            last of it: it had waited for the host.
    """

    forward: list[float]
    cpu_wait: float
    gpu_wait: float
    between: float
    backward: list[float]
    tail: float
    gpu_update: dict[int, float]
    seconds: float
    updates_in_backward: bool = False
    launch_bound: bool = False


_Mark = torch.cuda.Event | float


class Clock:
    """Marks in time on the current stream of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def mark(self) -> _Mark:
        """A mark behind everything queued on the current stream so far."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(current_stream(self._device))
        return event

    def is_past(self, mark: _Mark) -> bool:
        """Whether the device has come to the mark."""
        return not isinstance(mark, torch.cuda.Event) or mark.query()

    def seconds(self, begin: _Mark, end: _Mark) -> float:
        """Seconds from mark to mark, both past."""
        if isinstance(begin, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            return begin.elapsed_time(end) / 1e3
        assert not isinstance(end, torch.cuda.Event)
        return end - begin


_Kind = Literal["enter", "wait_cpu", "wait_gpu", "ready"]


@dataclass(slots=True)
class _Recording:
    """The marks of one step, in the order they were made."""

    forward: list[tuple[_Kind, int, _Mark]] = field(default_factory=list)
    forward_end: _Mark | None = None
    backward_begin: _Mark | None = None
    gradients: list[tuple[int, _Mark]] = field(default_factory=list)
    waits: list[tuple[int, _Mark, _Mark]] = field(default_factory=list)
    """Waits of backward: the place of the gradient that each precedes, its begin and its end."""
    backward_end: _Mark | None = None
    updates_begin: _Mark | None = None
    updates: list[tuple[Mapping[int, int], _Mark, _Mark]] = field(default_factory=list)
    updated_at: list[int] = field(default_factory=list)
    """For each update: how many gradients had been handed over."""
    next_begin: _Mark | None = None
    launch_bound: bool = False
    host_waited: bool = False
    """Whether the host waited for something other than the device, which had no work at last."""
    valid: bool = True


class StepTimer:
    """Collects marks through a step and turns complete steps into samples.

    A step that was not an ordinary one (the model was evaluated in between, a backward was
    repeated, not every layer was seen) gives no sample, and neither does one that
    :meth:`end_step` was told to leave out.
    """

    MAX_OPEN = 4
    """Steps whose marks may wait to be read; older ones are given up."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self._num_layers = num_layers
        self._clock = Clock(device)
        self._current = _Recording()
        self.measures = True
        """Whether this step's marks are made; if not, the timer need not be told of anything."""
        self.in_forward = False
        """Whether a forward is being marked."""
        self._entered = [False] * num_layers
        self._done: deque[_Recording] = deque(maxlen=self.MAX_OPEN)

    # -- forward -------------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """The model's forward begins."""
        current = self._current
        is_training = torch.is_grad_enabled() and current.backward_begin is None
        if not self.measures or not is_training:
            # The step before ends here all the same: an evaluation is no part of it.
            self._close_last()
            current.valid &= is_training
            return
        if current.forward_end is not None:
            return  # another micro-batch
        if self.in_forward and len(current.forward) == 1:
            return  # told twice
        if current.forward:
            current.valid = False  # a forward that did not end
        self.in_forward = True
        self._entered = [False] * self._num_layers
        first = self._clock.mark()
        current.forward.append(("ready", -1, first))
        if self._done and self._done[-1].next_begin is None:
            self._done[-1].next_begin = first

    def _close_last(self) -> bool:
        """Ends the step before here with a mark of its own, if nothing has ended it."""
        if not self._done or self._done[-1].next_begin is not None:
            return False
        self._done[-1].next_begin = self._clock.mark()
        return True

    def wait_begins(self, index: int, *, on_cpu: bool) -> None:
        """The compute stream is about to wait for a layer's weights."""
        if self.in_forward:
            kind: _Kind = "wait_cpu" if on_cpu else "wait_gpu"
            self._current.forward.append((kind, index, self._clock.mark()))

    def wait_ends(self, index: int) -> None:
        """The compute stream has waited for them."""
        if self.in_forward:
            self._current.forward.append(("ready", index, self._clock.mark()))

    def enter(self, index: int) -> None:
        """A layer's forward begins."""
        if self.in_forward and not self._entered[index]:
            self._entered[index] = True
            self._current.forward.append(("enter", index, self._clock.mark()))

    def end_forward(self) -> None:
        """The model's forward is over."""
        if self.in_forward:
            self.in_forward = False
            self._current.forward_end = self._clock.mark()

    # -- backward and step ---------------------------------------------------------------------

    def begin_backward(self) -> None:
        """The last micro-batch's backward begins."""
        if not self.measures:
            return
        self.in_forward = False
        if self._current.backward_begin is not None:
            self._current.valid = False
        self._current.backward_begin = self._clock.mark()

    def gradient(self, index: int) -> None:
        """A layer's gradient is final and handed over."""
        if not self.measures:
            return
        current = self._current
        current.gradients.append((index, self._clock.mark()))
        if len(current.gradients) == self._num_layers > 1:
            # Here, not at the step's end: before that the user's code may have waited for the GPU.
            _, earlier = current.gradients[-1 - max(1, self._num_layers // 8)]
            is_idle = isinstance(earlier, torch.cuda.Event) and earlier.query()
            current.launch_bound = is_idle and not current.host_waited

    @contextmanager
    def host_waits(self) -> Generator[None]:
        """Encloses a wait of backward for the worker.

        If the device then has caught up, that says nothing about launches.
        """
        current = self._current
        current.host_waited = True
        if not self.measures:
            yield
            return
        begin = self._clock.mark()
        yield
        current.waits.append((len(current.gradients), begin, self._clock.mark()))

    def end_backward(self) -> None:
        """The engine's step() was called, and every gradient has been handed over."""
        if self.measures:
            self._current.backward_end = self._clock.mark()

    def updates_begin(self) -> None:
        """Updates on the device follow, on the current stream."""
        if self.measures:
            self._current.updates_begin = self._clock.mark()

    def layers_updated(self, sizes: Mapping[int, int]) -> None:
        """An update is queued, of one or several layers; ``sizes``: elements of each."""
        if self.measures:
            begin, mark = self._current.updates_begin, self._clock.mark()
            assert begin is not None
            self._current.updates.append((sizes, begin, mark))
            self._current.updated_at.append(len(self._current.gradients))
            self._current.updates_begin = mark

    def invalidate(self) -> None:
        """Marks the current step as not an ordinary one: it gives no sample."""
        self._current.valid = False

    def end_step(self, *, measure_next: bool = True) -> None:
        """The step is final; the start of the next forward will end it.

        ``measure_next``: whether to put marks into the next step.
        """
        self.in_forward = False
        if self._close_last():
            self._done[-1].valid = False  # this step had no forward that could have ended it
        if self.measures:
            self._done.append(self._current)
        self.measures = measure_next
        self._current = _Recording()

    # -- reading -------------------------------------------------------------------------------

    def take(self) -> list[StepSample]:
        """Samples of the steps that are complete by now, oldest first."""
        samples: list[StepSample] = []
        while self._done:
            recording = self._done[0]
            if recording.next_begin is None or not self._clock.is_past(recording.next_begin):
                break
            if recording.updates and not self._clock.is_past(recording.updates[-1][2]):
                break
            sample = self._sample(recording)
            if sample is not None:
                samples.append(sample)
            self._done.popleft()
        return samples

    def _sample(self, recording: _Recording) -> StepSample | None:
        r, seconds = recording, self._clock.seconds
        if (
            not r.valid
            or r.forward_end is None
            or r.backward_begin is None
            or r.backward_end is None
            or r.next_begin is None
            or sorted([index for index, _ in r.gradients]) != list(range(self._num_layers))
        ):
            return None
        forward, cpu_wait, gpu_wait = self._forward(r, r.forward_end)
        backward = [0.0] * self._num_layers
        before = r.backward_begin
        for index, mark in r.gradients:
            backward[index] = seconds(before, mark)
            before = mark
        for place, begin, end in r.waits:
            backward[r.gradients[place][0]] -= seconds(begin, end)
        gpu_update = self._updates(r)
        tail = seconds(r.backward_end, r.next_begin)
        in_backward = any(place < self._num_layers for place in r.updated_at)
        if not isinstance(r.backward_end, torch.cuda.Event):  # on a CPU one thread does these, too
            for place, (_, begin, end) in zip(r.updated_at, r.updates, strict=True):
                if place < self._num_layers:
                    backward[r.gradients[place][0]] -= seconds(begin, end)
                else:
                    tail -= seconds(begin, end)
        return StepSample(
            forward=forward,
            cpu_wait=cpu_wait,
            gpu_wait=gpu_wait,
            between=seconds(r.forward_end, r.backward_begin),
            backward=backward,
            tail=max(0.0, tail),
            gpu_update=gpu_update,
            seconds=seconds(r.forward[0][2], r.next_begin),
            updates_in_backward=in_backward,
            launch_bound=r.launch_bound,
        )

    def _forward(self, r: _Recording, forward_end: _Mark) -> tuple[list[float], float, float]:
        """Seconds of each layer's forward, and of waits for weights from the CPU and on the GPU."""
        forward = [0.0] * self._num_layers
        waits = {"wait_cpu": 0.0, "wait_gpu": 0.0}
        ends = [*[mark for _, _, mark in r.forward[1:]], forward_end]
        inside = 0  # what comes before any layer is the first one's
        for (kind, index, mark), end in zip(r.forward, ends, strict=True):
            seconds = self._clock.seconds(mark, end)
            if kind == "enter":
                inside = index
            if kind in waits:
                waits[kind] += seconds
            else:
                forward[inside] += seconds
        return forward, waits["wait_cpu"], waits["wait_gpu"]

    def _updates(self, r: _Recording) -> dict[int, float]:
        """Seconds of each layer's update on the device."""
        result: dict[int, float] = {}
        for sizes, begin, mark in r.updates:
            # An update is bound by memory bandwidth: each element takes the same time.
            each = self._clock.seconds(begin, mark) / sum(sizes.values())
            result.update((index, each * size) for index, size in sizes.items())
        return result
