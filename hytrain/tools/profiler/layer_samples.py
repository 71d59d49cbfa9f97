"""Times and memory of a block, and outside of the blocks, from the recorded points of passes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hytrain.errors import ConfigError
from hytrain.formats.profile_file import LayerSample, OutsideSample
from hytrain.tools.profiler.block_hooks import BEGIN, END, LOSS, Point

DEPTH = 3
"""Blocks of the copy. The first one's forward follows the start of a pass and is not reported."""
TURNS = (1, 2)
"""The blocks that keep their activations, in turns."""
_NEARLY = 0.7
"""Share of the device's time: if launching takes more, training may have to wait for it."""


@dataclass(frozen=True, slots=True)
class Allocated:
    """Bytes allocated at a point, and the most since the point before."""

    now: int
    peak: int


Value = TypeVar("Value")
Pass = Mapping[Point, Value]
Row = tuple[LayerSample, OutsideSample]


@dataclass(slots=True)
class SizeMeasurements:
    """Measurements of one size: times of all visits' passes, memory of the first visit's."""

    times: list[tuple[int, Pass[float]]]
    memory: dict[int, Pass[Allocated]]
    launches: list[tuple[int, Pass[float]]] = field(default_factory=list)
    """When the host reached the points, nothing queued on the device; empty without a GPU."""
    queued: list[tuple[int, Pass[float]]] = field(default_factory=list)
    """When the device reached them, the whole pass queued before; empty if it never waits."""
    turns: list[float] = field(default_factory=list[float])
    """Seconds to launch a pass, in each of many short turns."""

    @property
    def may_be_launch_bound(self) -> bool:
        """Whether the device waits for the host, or nearly does."""
        if not self.launches:
            return False
        launched, taken = ([points for _, points in each] for each in (self.launches, self.times))
        return usual(launched, BEGIN, END) > _NEARLY * _median(taken, BEGIN, END)

    def row(self, size: int) -> Row:
        """The profile's rows for this size."""
        forward, backward = _block_ms(self.times, _median)
        around_forward, around_backward = _outside_ms(self.times, _median)
        layer = LayerSample(
            samples=size,
            forward_ms=forward,
            backward_ms=backward,
            recompute_backward_ms=_recompute_ms(self.times),
            launch_ms=_both(_block_ms, self.launches, usual),
            device_ms=_both(_block_ms, self.queued, _median),
            **_block_bytes(self.memory),
        )
        outside = OutsideSample(
            samples=size,
            forward_ms=around_forward,
            backward_ms=around_backward,
            peak_bytes=_outside_bytes(self.memory),
            launch_ms=_both(_outside_ms, self.launches, usual),
            device_ms=_both(_outside_ms, self.queued, _median),
        )
        return layer, outside


def complete(points: dict[Point, Value], name: str) -> Pass[Value]:
    wanted = [(kind, i) for kind in ("enter", "leave", "gradient") for i in range(DEPTH)]
    missing = sorted({number for kind, number in wanted if (kind, number) not in points})
    if missing:
        raise ConfigError(
            f"--model {name}: blocks {missing} were not called, or no gradient came back to them: "
            "every block must be called once in a forward, and return a tensor with a gradient"
        )
    # If the first block's input needs no gradient, its backward ends the pass.
    points.setdefault(("gradient", -1), points[END])
    return points


_Times = Sequence[tuple[int, Pass[float]]]
_Between = Callable[[Sequence[Pass[float]], Point, Point], float]
_Passes = Callable[[_Times, _Between], tuple[float, float]]


def _both(passes: _Passes, times: _Times, between: _Between) -> float | None:
    """Time of forward and backward together, in ms; None if nothing was timed."""
    return sum(passes(times, between)) if times else None


def _block_ms(times: _Times, between: _Between) -> tuple[float, float]:
    """Times of forward and backward of a block that keeps its activations.

    Kinds of blocks may alternate: each block is evaluated alone, and the mean is taken.
    """
    forward: list[float] = []
    backward: list[float] = []
    for block in TURNS:
        keeping = [points for turn, points in times if turn == block]
        forward.append(between(keeping, ("enter", block), ("leave", block)))
        backward.append(between(keeping, ("gradient", block), ("gradient", block - 1)))
    return statistics.mean(forward), statistics.mean(backward)


def _recompute_ms(times: _Times) -> float:
    """Time of the backward of a block that recomputes its activations."""
    each: list[float] = []
    for block in TURNS:
        others = [points for turn, points in times if turn != block]
        each.append(_median(others, ("gradient", block), ("gradient", block - 1)))
    return statistics.mean(each)


def _outside_ms(times: _Times, between: _Between) -> tuple[float, float]:
    """Times of forward and backward outside of the blocks; not negative."""
    last = DEPTH - 1
    passes = [points for _, points in times]
    forward = between(passes, BEGIN, ("enter", 0)) + between(passes, ("leave", last), LOSS)
    backward = between(passes, LOSS, ("gradient", last))
    backward += between(passes, ("gradient", -1), END)
    return max(0.0, forward), max(0.0, backward)


def _median(passes: Sequence[Pass[float]], begin: Point, end: Point) -> float:
    return statistics.median(points[end] - points[begin] for points in passes)


def usual(passes: Sequence[Pass[float]], begin: Point, end: Point) -> float:
    """The mean without the slowest tenth, in milliseconds.

    A step's launch time is the sum over all its layers, also of those that are slow now and then; a
    median would leave these out. What happens in few steps is left out.
    """
    seconds = sorted(points[end] - points[begin] for points in passes)
    return statistics.mean(seconds[: len(seconds) - len(seconds) // 10])


_MemoryOfTurns = Mapping[int, Pass[Allocated]]


def _block_bytes(memory: _MemoryOfTurns) -> dict[str, int]:
    """Bytes that a block's forward leaves, and its peaks above weights and input in both passes.

    When backward begins, the gradient of the output has taken the output's place.
    """
    kept: list[int] = []
    peaks: dict[bool, list[int]] = {True: [], False: []}  # by whether it keeps its activations
    for turn, points in memory.items():
        for block in TURNS:
            before, after = points["enter", block], points["leave", block]
            left = max(0, after.now - before.now)
            top, bottom = points["gradient", block], points["gradient", block - 1]
            peak = max(after.peak - before.now, bottom.peak - top.now + left)
            peaks[turn == block].append(peak)
            kept += [left] if turn == block else []
    return {
        "kept_bytes": max(kept),
        "peak_bytes": max(peaks[True]),
        "recompute_peak_bytes": max(peaks[False]),
    }


def _outside_bytes(memory: _MemoryOfTurns) -> int:
    """Peak of the memory allocated outside of the blocks, above what was allocated before."""
    last = DEPTH - 1
    peaks = [0]
    for points in memory.values():
        leave = points["leave", last].now
        peaks += [
            points["enter", 0].peak - points[BEGIN].now,
            points[LOSS].peak - leave,
            points["gradient", last].peak - leave,
        ]
        if points["gradient", -1] is not points[END]:
            peaks.append(points[END].peak - points["gradient", -1].now)
    return max(peaks)
