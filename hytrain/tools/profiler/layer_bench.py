"""Passes over a copy of the model with three blocks: times and memory of one micro-batch size."""

from __future__ import annotations

import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hytrain.errors import ConfigError
from hytrain.placement.step_timer import Clock
from hytrain.tools.profiler.block_hooks import (
    BEGIN,
    END,
    LOSS,
    BlockHooks,
    Point,
    Recomputation,
    ignore,
)
from hytrain.tools.profiler.gradient_sink import GradientSink
from hytrain.tools.profiler.layer_samples import (
    TURNS,
    Allocated,
    Pass,
    SizeMeasurements,
    Value,
    complete,
    usual,
)
from hytrain.tools.profiler.measured_model import MeasuredModel, SmallModel

_FEWEST_PASSES = 4
_MOST_PASSES = 40
_LAUNCHED_PASSES = (3, 20)
"""Least and most passes of each turn whose launches are timed."""
_LAUNCH_SECONDS = 0.2
"""Time in which such passes of a visit begin, beyond the least number."""
_SLICE_SECONDS = 0.05
"""The same for one of many short turns."""
_QUEUED_PASSES = 3
"""Passes of each turn that are queued entirely before the device begins."""
_AHEAD = 2.0
"""In a pass the device sleeps this many times as long as launching it takes."""
_MOST_CYCLES_A_SECOND = 3e9
"""Highest clock rate of a GPU, so that it sleeps long enough."""
_SIZE_SECONDS = 3.0
"""Most time for the passes of one size."""


class CudaMeter:
    """Memory in use, as the caching allocator itself counts it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> None:
        """Does nothing: the allocator always counts."""

    def __exit__(self, *_raised: object) -> None:
        """Does nothing, as on entry."""

    def allocated(self) -> int:
        """Bytes in use now."""
        return torch.cuda.memory_allocated(self._device)

    def take_peak(self) -> int:
        """Most bytes in use since the last call."""
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


class CpuMeter(TorchDispatchMode):
    """Memory in use on a CPU, counted from the results of torch's operations.

    For trying without a GPU: a CPU has no counters. What an operation allocates internally is not
    seen.
    """

    def __init__(self, present: Iterable[torch.Tensor]) -> None:
        """``present``: existing tensors, which are not counted."""
        super().__init__()
        self._bytes = 0
        self._peak = 0
        self._seen = {tensor.untyped_storage().data_ptr() for tensor in present}

    def allocated(self) -> int:
        """Bytes in use now."""
        return self._bytes

    def take_peak(self) -> int:
        """Most bytes in use since the last call."""
        peak, self._peak = self._peak, self._bytes
        return peak

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Runs the operation and counts its results."""
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._seen or size == 0:
            return
        self._seen.add(address)
        self._bytes += size
        self._peak = max(self._peak, self._bytes)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self._bytes -= size


MemoryMeter = CudaMeter | CpuMeter
"""Reads the memory in use on a device; counts while it is entered."""


class LayerBench:
    """A copy of the model with hooks, on a device; in :meth:`recomputing` blocks may recompute."""

    def __init__(self, subject: MeasuredModel, model: SmallModel, device: torch.device) -> None:
        self._subject = subject
        self._model = model
        self._device = device
        self._clock = Clock(device)
        self._hooks = BlockHooks(model.blocks)
        self._recomputation = Recomputation(model.blocks)
        self._sink = GradientSink(model.layers, device)
        self._is_cuda = device.type == "cuda"
        self.boundary_bytes = 0
        """Bytes of activations between two blocks per sample, at the last measured size."""

    def close(self) -> None:
        """Removes all hooks."""
        self._hooks.close()
        self._sink.close()

    def recomputing(self) -> AbstractContextManager[object]:
        """While it lasts, blocks recompute as :meth:`measure` chooses."""
        return self._recomputation.installed()

    def clean(self) -> None:
        """Frees what a failed pass has left."""
        self._sink.abort_pass()
        self._model.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    @property
    def sums_squares(self) -> bool:
        """Whether most layers' gradients come with the sums of squares for their norm."""
        return self._sink.sums_squares

    @property
    def block_tensors(self) -> int:
        """Number of trained parameter tensors of a block; the median if blocks differ."""
        blocks = [layer for layer in self._model.layers if layer.block is not None]
        return statistics.median_high(len(block.parameters) for block in blocks)

    def measure(self, size: int, seconds: float) -> SizeMeasurements:
        """Measures memory, and times of as many passes as fit into ``seconds``.

        Raises:
            torch.cuda.OutOfMemoryError: the size does not fit; call :meth:`clean` then.
            ConfigError: the blocks are not called one after another.
        """
        batch = self._batch(size)
        self._pass(batch, TURNS[0], ignore)  # libraries choose and compile their kernels
        self._wait()
        memory = {turn: self._memory_of_pass(batch, turn) for turn in TURNS}
        self._wait()
        begin = time.perf_counter()
        self._pass(batch, TURNS[0], ignore)
        self._wait()
        one = time.perf_counter() - begin
        number = max(_FEWEST_PASSES, min(_MOST_PASSES, int(min(seconds, _SIZE_SECONDS) / one)))
        found = SizeMeasurements(self._times(batch, number), memory, self._launches(batch))
        if found.may_be_launch_bound:
            found.queued = self._queued(batch, found.launches)
        self.boundary_bytes = self._hooks.boundary_bytes // size
        return found

    def measure_again(self, size: int, found: SizeMeasurements) -> None:
        """Times as many passes once more, and adds their times.

        Raises:
            torch.cuda.OutOfMemoryError: it does not fit this time; call :meth:`clean` then.
        """
        batch = self._batch(size)
        found.times += self._times(batch, len(found.times))
        found.launches += self._launches(batch)
        if found.queued:
            found.queued += self._queued(batch, found.launches)

    def launch_seconds(self, size: int) -> float:
        """Seconds of the host to launch a pass of a size that fits, in one of many short turns.

        For a GPU, with nothing queued. Not a median: beside updates some launches take far longer,
        because an update thread has the core.
        """
        return _seconds(self._launches(self._batch(size), _SLICE_SECONDS))

    def launch_again(self, size: int, found: SizeMeasurements) -> None:
        """Times a few more launches, one of many short turns, and adds them; none without a GPU.

        Raises:
            torch.cuda.OutOfMemoryError: the size does not fit this time; call :meth:`clean` then.
        """
        launches = self._launches(self._batch(size), _SLICE_SECONDS)
        found.launches += launches
        if launches:
            found.turns.append(_seconds(launches))

    def _batch(self, size: int) -> Mapping[str, Any]:
        with self._subject.defaults(self._device):
            return self._model.make_batch(size)

    def _times(self, batch: Mapping[str, Any], number: int) -> list[tuple[int, Pass[float]]]:
        """Times of ``number`` passes, back to back."""
        turns = [TURNS[i % len(TURNS)] for i in range(number + 1)]
        passes = [(turn, self._time_pass(batch, turn)) for turn in turns]
        self._wait()
        # In the first pass the host was not yet ahead of the device.
        return [(turn, self._milliseconds(marks)) for turn, marks in passes][1:]

    def _launches(
        self, batch: Mapping[str, Any], seconds: float = _LAUNCH_SECONDS
    ) -> list[tuple[int, Pass[float]]]:
        """When the host reaches the points of some passes, each begun with an idle device."""
        if not self._is_cuda:
            return []  # the host computes
        passes: list[tuple[int, Pass[float]]] = []
        fewest, most = _LAUNCHED_PASSES
        end = time.perf_counter() + seconds
        for number in range(most):
            if number >= fewest and time.perf_counter() > end:
                break
            for turn in TURNS:
                self._wait()
                points = self._points(batch, turn, lambda _: 1e3 * time.perf_counter())
                passes.append((turn, points))
        self._wait()
        return passes

    def _queued(
        self, batch: Mapping[str, Any], launches: Sequence[tuple[int, Pass[float]]]
    ) -> list[tuple[int, Pass[float]]]:
        """When the device reaches the points of some passes, each queued while it sleeps.

        It sleeps in the first block: before that, many models make the host wait for the device, to
        see which mask they need.

        ``launches``: those of the same batch.
        """
        cycles = int(_MOST_CYCLES_A_SECOND * _AHEAD * _seconds(launches))
        passes: list[tuple[int, Pass[float]]] = []
        for turn in TURNS * _QUEUED_PASSES:
            self._wait()
            marks = self._time_pass(batch, turn, asleep=cycles)
            self._wait()
            passes.append((turn, self._milliseconds(marks)))
        return passes

    def _points(
        self, batch: Mapping[str, Any], turn: int, read: Callable[[Point], Value]
    ) -> Pass[Value]:
        """What is read at each point of a pass."""
        points: dict[Point, Value] = {}

        def tell(point: Point) -> None:
            if point in points:
                raise ConfigError(
                    f"--model: block {point[1]} is called more than once in a forward"
                )
            points[point] = read(point)

        self._pass(batch, turn, tell)
        return complete(points, self._subject.name)

    def _pass(self, batch: Mapping[str, Any], turn: int, tell: Callable[[Point], None]) -> None:
        self._hooks.tell = tell
        self._recomputation.choose(turn)
        tell(BEGIN)
        loss = self._model.loss(batch)
        tell(LOSS)
        self._sink.begin_pass()
        loss.backward()
        tell(END)
        self._sink.end_pass()

    def _time_pass(self, batch: Mapping[str, Any], turn: int, asleep: int = 0) -> Pass[Any]:
        """``asleep``: cycles that the device sleeps in the first block, whose times are unused."""

        def mark(point: Point) -> Any:
            made = self._clock.mark()
            if asleep and point == ("enter", 0):
                torch.cuda._sleep(asleep)  # pyright: ignore[reportPrivateUsage]
            return made

        return self._points(batch, turn, mark)

    def _milliseconds(self, marks: Pass[Any]) -> Pass[float]:
        begin = marks[BEGIN]
        return {point: 1e3 * self._clock.seconds(begin, mark) for point, mark in marks.items()}

    def _memory_of_pass(self, batch: Mapping[str, Any], turn: int) -> Pass[Allocated]:
        model = self._model.model
        meter: MemoryMeter = CpuMeter([*model.parameters(), *model.buffers()])
        if self._is_cuda:
            meter = CudaMeter(self._device)
        meter.take_peak()
        with meter:
            return self._points(
                batch, turn, lambda _: Allocated(meter.allocated(), meter.take_peak())
            )

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


def _seconds(launches: Sequence[tuple[int, Pass[float]]]) -> float:
    return usual([points for _, points in launches], BEGIN, END) / 1e3
