"""Times and memory of a block, and of what is outside of the blocks, against micro-batch sizes.

A copy of the model with three blocks makes ordinary training passes, back to back, so that the host
runs ahead of a GPU as it does in training. One of the last two blocks keeps its activations, the
others recompute them, in turns from pass to pass: one run measures both, interleaved. What is
reported are medians.

Every size is visited twice where time allows: a host that cannot start small kernels fast enough
does so in one second and not in the next, and training takes a mean of such seconds.
"""

from __future__ import annotations

import itertools
import logging
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from hytrain.errors import ConfigError
from hytrain.planner.profile_file import LayerSample, OutsideSample
from hytrain.profile.block_hooks import BEGIN, END, LOSS, BlockHooks, Point, Recomputation
from hytrain.profile.gradient_sink import GradientSink
from hytrain.profile.machine import available_host_bytes
from hytrain.profile.memory_meter import CpuMeter, CudaMeter, MemoryMeter
from hytrain.profile.memory_probe import usable_gpu_bytes
from hytrain.profile.step_timer import Clock
from hytrain.profile.subject import Copy, Subject

logger = logging.getLogger(__name__)

_DEPTH = 3
"""Blocks of the copy. The first one's forward follows the start of a pass and is not reported."""
_TURNS = (1, 2)
"""Which of them keeps its activations, in turns."""
_KNEE = 1.03
"""A doubled micro-batch that gains less than this, twice in a row, is the last one ..."""
_SMALLEST_LAST = 8
"""... of at least so many samples: a plan may go far beyond it, on a straight line."""
_FEWEST_PASSES = 4
_MOST_PASSES = 40
_SIZE_SECONDS = 3.0
"""Of passes of one size, at most."""
_PASSES_SHARE = 0.4
"""Of the time, for the first visit's timed passes where the number of sizes is known."""
_FILL_SECONDS = 0.5
"""Of passes of a size that fills a gap."""
_FILLED_UP_TO = 32
"""Where a size more or less is a few percent, nothing is gained by a finer choice."""
_TRIED_WITHOUT_GPU = 4
"""Doublings on a CPU at most, which is for trying only."""


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """What to measure.

    Attributes:
        micro_batches: samples of a micro-batch, ascending; None: 1, 2, 4, ... until a pass does not
            fit (then half as much again as the last, if that does), or 8 or more gain less than
            3 % twice in a row; then the middles of what lies between, up to 32 and while there is
            time: a plan chooses among sizes that were measured.
        seconds: of measuring, about; sizes that were given, else at least two, are all measured.
    """

    micro_batches: tuple[int, ...] | None = None
    seconds: float = 40.0

    def __post_init__(self) -> None:
        sizes = self.micro_batches
        if sizes is not None and (not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] < 1):
            raise ConfigError(f"--micro-batches {sizes}: give ascending numbers of samples")


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What was measured, by ascending samples.

    Attributes:
        layer: of a block.
        outside: of all that is outside of the blocks.
        boundary_bytes: activations between two blocks, a sample.
        idle_bytes: what the allocator holds without model and batch (workspaces).
    """

    layer: tuple[LayerSample, ...]
    outside: tuple[OutsideSample, ...]
    boundary_bytes: int
    idle_bytes: int


def profile_layer(
    subject: Subject,
    device: torch.device,
    options: LayerOptions,
    *,
    on_size: Callable[[int, float], None] = lambda size, share: None,
) -> LayerProfile:
    """Measures on the current stream of a device.

    Args:
        subject: the model.
        device: where; on a CPU it works for trying, memory of operations' insides not counted.
        options: which sizes, and how long.
        on_size: called with a size when it begins, and the share of the work that is done.

    Raises:
        ConfigError: three blocks do not fit, the model has no loss, or its blocks are not called
            one after another.
    """
    try:
        return _profile_copy(subject, device, options, on_size)
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _profile_copy(
    subject: Subject,
    device: torch.device,
    options: LayerOptions,
    on_size: Callable[[int, float], None],
) -> LayerProfile:
    try:
        model = subject.copy(_DEPTH, device)
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            f"--model {subject.name}: {_DEPTH} of its layers and what is outside of them do not "
            f"fit on {device} ({_first_line(error)})"
        ) from error
    bench = _Bench(subject, model, device)
    try:
        return bench.run(options, on_size)
    finally:
        bench.close()


@dataclass(frozen=True, slots=True)
class _Memory:
    """Allocated at a point, and the most since the point before."""

    now: int
    peak: int


_Value = TypeVar("_Value")
_Pass = Mapping[Point, _Value]
_Row = tuple[LayerSample, OutsideSample]


@dataclass(slots=True)
class _Visited:
    """What was measured of one size: times of all visits' passes, memory of the first visit's."""

    times: list[tuple[int, _Pass[float]]]
    memory: dict[int, _Pass[_Memory]]

    def row(self, size: int) -> _Row:
        return (
            _layer_sample(size, self.times, self.memory),
            _outside_sample(size, self.times, self.memory),
        )


class _Bench:
    """A copy of the model with hooks, on a device."""

    def __init__(self, subject: Subject, model: Copy, device: torch.device) -> None:
        self._subject = subject
        self._model = model
        self._device = device
        self._clock = Clock(device)
        self._hooks = BlockHooks(model.blocks)
        self._recomputation = Recomputation(model.blocks)
        self._sink = GradientSink(model.layers)
        self._rows: list[_Row] = []
        self._visited: dict[int, _Visited] = {}
        self._boundary_bytes = 0
        self._is_cuda = device.type == "cuda"

    def close(self) -> None:
        """Removes all hooks."""
        self._hooks.close()
        self._sink.close()

    def run(self, options: LayerOptions, on_size: Callable[[int, float], None]) -> LayerProfile:
        begin = time.monotonic()
        weights = self._meter().allocated()
        with self._recomputation.installed():
            for size in options.micro_batches or self._doublings(begin + options.seconds):
                spent = time.monotonic() - begin
                on_size(size, min(1.0, spent / options.seconds))
                seconds = max(0.2, (options.seconds - spent) / 4)
                if options.micro_batches is not None:
                    seconds = _PASSES_SHARE * options.seconds / len(options.micro_batches)
                measured = self._measure_if_it_fits(size, seconds)
                if measured is not None:
                    self._rows.append(measured)
                elif options.micro_batches is not None:
                    break
            if options.micro_batches is None and self._is_cuda:
                self._fill(begin + 0.8 * options.seconds)
            self._rows = [self._visited[size].row(size) for size in sorted(self._visited)]
            self._revisit(begin + options.seconds)
        if not self._rows:
            raise ConfigError(
                f"--model {self._subject.name}: not even the smallest micro-batch fits on "
                f"{self._device}: give a smaller --seq-len or --micro-batches"
            )
        idle = torch.cuda.memory_allocated(self._device) - weights if self._is_cuda else 0
        return LayerProfile(
            layer=tuple(block for block, _ in self._rows),
            outside=tuple(around for _, around in self._rows),
            boundary_bytes=self._boundary_bytes,
            idle_bytes=max(0, idle),
        )

    def _measure_if_it_fits(self, size: int, seconds: float) -> _Row | None:
        try:
            return self._measure(size, seconds)
        except torch.cuda.OutOfMemoryError as error:
            logger.info("a micro-batch of %d does not fit (%s)", size, _first_line(error))
        # Not in the handler: the exception holds the pass's tensors.
        self._clean()
        return None

    def _clean(self) -> None:
        self._sink.end_pass()
        self._model.model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()

    # -- which sizes ---------------------------------------------------------------------------

    def _doublings(self, deadline: float) -> Iterator[int]:
        """1, 2, 4, ...; where memory ends that, half as much again as the last."""
        for size in itertools.accumulate(itertools.repeat(2), operator.mul, initial=1):
            yield size
            if len(self._rows) < size.bit_length():
                break  # it did not fit
            is_time_up = size > 1 and time.monotonic() > deadline
            if is_time_up or self._gains_nothing() or self._was_only_tried():
                return
            if not self._is_likely_to_fit(2.0):
                break
        last = self._rows[-1][0].samples if self._rows else 0
        if last > 1 and self._is_likely_to_fit(1.5):
            yield last + last // 2

    def _fill(self, deadline: float) -> None:
        """Middles of the relatively widest gaps, until there are none or time is up."""
        while time.monotonic() < deadline:
            size = widest_middle([size for size in self._visited if size <= _FILLED_UP_TO])
            if size is None or self._measure_if_it_fits(size, _FILL_SECONDS) is None:
                return

    def _revisit(self, deadline: float) -> None:
        """Once more the small sizes, then the larger ones, until time is up."""
        rows: list[_Row] = []
        for row in self._rows:
            size = row[0].samples
            is_again = time.monotonic() < deadline and self._revisit_size(size)
            rows.append(self._visited[size].row(size) if is_again else row)
        self._rows = rows

    def _revisit_size(self, size: int) -> bool:
        visited = self._visited[size]
        try:
            visited.times += self._times(self._batch(size), len(visited.times))
            return True
        except torch.cuda.OutOfMemoryError as error:
            # It fitted before; what was measured then counts.
            logger.info("a micro-batch of %d did not fit again (%s)", size, _first_line(error))
        self._clean()
        return False

    def _gains_nothing(self) -> bool:
        speeds = [block.samples / _pass_ms(block) for block, _ in self._rows[-3:]]
        gains = [after / before for before, after in itertools.pairwise(speeds)]
        is_large = self._rows[-1][0].samples >= _SMALLEST_LAST
        return is_large and len(gains) == 2 and max(gains) < _KNEE

    def _was_only_tried(self) -> bool:
        return not self._is_cuda and len(self._rows) > _TRIED_WITHOUT_GPU

    def _is_likely_to_fit(self, factor: float) -> bool:
        """Whether so many times the last size may fit, on a straight line through the last two."""
        if len(self._rows) < 2:
            return True
        (before, last), peaks = self._rows[-2:], [_peak(row) for row in self._rows[-2:]]
        growth = (peaks[1] - peaks[0]) / (last[0].samples - before[0].samples)
        if self._is_cuda:
            room = usable_gpu_bytes(self._device) or 0
            room -= torch.cuda.memory_allocated(self._device)
        else:
            room = available_host_bytes() // 2
        return peaks[1] + growth * (factor - 1.0) * last[0].samples < room

    # -- one size ------------------------------------------------------------------------------

    def _measure(self, size: int, seconds: float) -> _Row:
        batch = self._batch(size)
        self._pass(batch, _TURNS[0], self._ignore)  # libraries choose and compile their kernels
        self._wait()
        memory = {turn: self._memory_of_pass(batch, turn) for turn in _TURNS}
        self._wait()
        begin = time.perf_counter()
        self._pass(batch, _TURNS[0], self._ignore)
        self._wait()
        one = time.perf_counter() - begin
        number = max(_FEWEST_PASSES, min(_MOST_PASSES, int(min(seconds, _SIZE_SECONDS) / one)))
        visited = _Visited(self._times(batch, number), memory)
        self._boundary_bytes = self._hooks.boundary_bytes // size
        self._visited[size] = visited
        return visited.row(size)

    def _batch(self, size: int) -> Mapping[str, Any]:
        with self._subject.defaults(self._device):
            return self._model.make_batch(size)

    def _times(self, batch: Mapping[str, Any], number: int) -> list[tuple[int, _Pass[float]]]:
        """Of so many passes, back to back."""
        turns = [_TURNS[i % len(_TURNS)] for i in range(number + 1)]
        passes = [(turn, self._time_pass(batch, turn)) for turn in turns]
        self._wait()
        # The first one's host was not ahead of the device.
        return [(turn, self._milliseconds(marks)) for turn, marks in passes][1:]

    def _pass(self, batch: Mapping[str, Any], turn: int, tell: Callable[[Point], None]) -> None:
        self._hooks.tell = tell
        self._recomputation.choose(turn)
        tell(BEGIN)
        loss = self._model.loss(batch)
        tell(LOSS)
        loss.backward()
        tell(END)
        self._sink.end_pass()

    def _time_pass(self, batch: Mapping[str, Any], turn: int) -> _Pass[Any]:
        marks: dict[Point, Any] = {}
        self._pass(batch, turn, lambda point: _set_once(marks, point, self._clock.mark()))
        return _complete(marks, self._subject.name)

    def _milliseconds(self, marks: _Pass[Any]) -> _Pass[float]:
        begin = marks[BEGIN]
        times = {point: 1e3 * self._clock.seconds(begin, mark) for point, mark in marks.items()}
        for point, mark in marks.items():
            if point == END or mark is not marks[END]:  # that may be two points
                self._clock.release(mark)
        return times

    def _memory_of_pass(self, batch: Mapping[str, Any], turn: int) -> _Pass[_Memory]:
        meter = self._meter()
        points: dict[Point, _Memory] = {}

        def tell(point: Point) -> None:
            _set_once(points, point, _Memory(meter.allocated(), meter.take_peak()))

        meter.take_peak()
        with meter.watching():
            self._pass(batch, turn, tell)
        return _complete(points, self._subject.name)

    def _meter(self) -> MemoryMeter:
        if self._is_cuda:
            return CudaMeter(self._device)
        model = self._model.model
        return CpuMeter([*model.parameters(), *model.buffers()])

    def _ignore(self, point: Point) -> None:
        pass

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize(self._device)


def _set_once(points: dict[Point, _Value], point: Point, value: _Value) -> None:
    if point in points:
        raise ConfigError(f"--model: block {point[1]} is called more than once in a forward")
    points[point] = value


def _complete(points: dict[Point, _Value], name: str) -> _Pass[_Value]:
    wanted = [(kind, i) for kind in ("enter", "leave", "gradient") for i in range(_DEPTH)]
    missing = sorted({number for kind, number in wanted if (kind, number) not in points})
    if missing:
        raise ConfigError(
            f"--model {name}: blocks {missing} were not called, or no gradient came back to them: "
            "every block must be called once in a forward, and return a tensor with a gradient"
        )
    # Where the first block's input needs no gradient, its backward ends the pass.
    points.setdefault(("gradient", -1), points[END])
    return points


def widest_middle(sizes: Sequence[int]) -> int | None:
    """The middle of the relatively widest gap, of equal ones the first; None where there is none.

    >>> widest_middle([1, 2, 4, 8]), widest_middle([1, 2, 3, 4, 8]), widest_middle([1, 2])
    (3, 6, None)
    """
    gaps = [(high / low, low, high) for low, high in itertools.pairwise(sorted(sizes))]
    gaps = [gap for gap in gaps if gap[2] - gap[1] > 1]
    if not gaps:
        return None
    _, low, high = max(gaps, key=lambda gap: gap[0])
    return (low + high) // 2


# -- from points to samples --------------------------------------------------------------------

_Times = Sequence[tuple[int, _Pass[float]]]
_MemoryOfTurns = Mapping[int, _Pass[_Memory]]


def _peak(row: _Row) -> int:
    return max(part.peak_bytes for part in row)


def _pass_ms(block: LayerSample) -> float:
    return block.forward_ms + block.recompute_backward_ms


def _layer_sample(size: int, times: _Times, memory: _MemoryOfTurns) -> LayerSample:
    # Blocks may be of several kinds in turns: each is looked at alone, and their mean is taken.
    forward: list[float] = []
    backward: list[float] = []
    recompute: list[float] = []
    for block in _TURNS:
        keeping = [points for turn, points in times if turn == block]
        others = [points for turn, points in times if turn != block]
        forward.append(_median(keeping, ("enter", block), ("leave", block)))
        backward.append(_median(keeping, ("gradient", block), ("gradient", block - 1)))
        recompute.append(_median(others, ("gradient", block), ("gradient", block - 1)))
    kept, peaks = zip(*(_block_bytes(memory[block], block) for block in _TURNS), strict=True)
    recompute_peaks = [
        _block_bytes(memory[turn], block)[1]
        for turn, block in zip(_TURNS, reversed(_TURNS), strict=True)
    ]
    return LayerSample(
        samples=size,
        forward_ms=statistics.mean(forward),
        backward_ms=statistics.mean(backward),
        recompute_backward_ms=statistics.mean(recompute),
        kept_bytes=max(kept),
        peak_bytes=max(peaks),
        recompute_peak_bytes=max(recompute_peaks),
    )


def _median(passes: Sequence[_Pass[float]], begin: Point, end: Point) -> float:
    return statistics.median(points[end] - points[begin] for points in passes)


def _block_bytes(points: _Pass[_Memory], block: int) -> tuple[int, int]:
    """What its forward leaves, and the most above weights and input in both passes.

    When backward begins, the gradient of the output has taken the output's place.
    """
    before, after = points["enter", block], points["leave", block]
    kept = max(0, after.now - before.now)
    top, bottom = points["gradient", block], points["gradient", block - 1]
    return kept, max(after.peak - before.now, bottom.peak - top.now + kept)


def _outside_sample(size: int, times: _Times, memory: _MemoryOfTurns) -> OutsideSample:
    last = _DEPTH - 1
    passes = [points for _, points in times]
    forward = _median(passes, BEGIN, ("enter", 0)) + _median(passes, ("leave", last), LOSS)
    backward = _median(passes, LOSS, ("gradient", last))
    backward += _median(passes, ("gradient", -1), END)
    peaks: list[int] = []
    for points in memory.values():
        leave = points["leave", last].now
        peaks += [
            points["enter", 0].peak - points[BEGIN].now,
            points[LOSS].peak - leave,
            points["gradient", last].peak - leave,
        ]
        if points["gradient", -1] is not points[END]:
            peaks.append(points[END].peak - points["gradient", -1].now)
    return OutsideSample(
        samples=size, forward_ms=max(0.0, forward), backward_ms=max(0.0, backward),
        peak_bytes=max(0, *peaks),
    )  # fmt: skip


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
