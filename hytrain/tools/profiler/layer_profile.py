"""Times and memory of a block, and of what is outside of the blocks, by micro-batch size.

A copy of the model with three blocks makes ordinary training passes, back to back, so that the host
runs ahead of a GPU as it does in training. One of the last two blocks keeps its activations, the
others recompute them, in turns from pass to pass: one run measures both, interleaved. Medians are
reported.

Every size is visited twice if time allows: a host may launch small kernels fast enough in one
second and not in the next, and training takes a mean of such seconds. Launches of the sizes that
may wait for them are also timed in many short turns, which the caller spreads over all that it
measures: hosts are faster or slower for tens of seconds at a time.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from hytrain.errors import ConfigError
from hytrain.formats.profile_file import MOST_SAMPLES, LayerSample, OutsideSample
from hytrain.tools.profiler.copies import spread
from hytrain.tools.profiler.layer_bench import LayerBench
from hytrain.tools.profiler.layer_samples import DEPTH, SizeMeasurements
from hytrain.tools.profiler.measured_model import MeasuredModel
from hytrain.tools.profiler.profile_options import ProfileOptions

logger = logging.getLogger(__name__)

_KNEE = 1.03
"""A doubling of the micro-batch that gains less than this, twice in a row, is the last ..."""
_SMALLEST_LAST = 8
"""... if it is of at least this many samples: a plan may extrapolate far beyond it, linearly."""
_PASSES_SHARE = 0.4
"""Share of the time for the first visit's timed passes, if the number of sizes is known."""
_LAUNCH_TURNS = 40
"""Turns of launches, about: within a second they take a host 0.7 to 1.3 times the mean."""
_LAUNCH_SHARE = 0.4
"""Share of the time that is added to it for these turns, except the first of each pause."""
_FILL_SHARE, _FILL_SECONDS = 0.8, 0.5
"""Gaps are filled up to this share of the time, each with passes of this many seconds."""
_FILLED_UP_TO = 32
"""Gaps up to this size are all filled. Above it a sample is a few percent, and only gaps ..."""
_WIDEST_GAP = 1.5
"""... of more than this ratio are filled."""
_TRIED_WITHOUT_GPU = 4
"""Most doublings on a CPU, which is only for trying."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What was measured, by ascending samples.

    Attributes:
        layer: samples of a block.
        outside: samples of all that is outside of the blocks.
        boundary_bytes: activations between two blocks per sample.
        idle_bytes: what the allocator holds without model and batch (workspaces).
        launch_slowdown: slowdown of launches beside updates on the CPU; None if not measured.
        launch_spread: spread of launch times, nothing beside them, over all turns of the smallest
            size that may wait for launches; None if none may.
        sums_squares: whether gradients come with the sums of squares for their norm.
        block_tensors: number of trained parameter tensors of a block.
    """

    layer: tuple[LayerSample, ...]
    outside: tuple[OutsideSample, ...]
    boundary_bytes: int
    idle_bytes: int
    launch_slowdown: float | None = None
    launch_spread: float | None = None
    sums_squares: bool = False
    block_tensors: int = 1


class LayerProfiling:
    """A copy of the model on a device, and what has been measured of it; a context manager."""

    def __init__(
        self, subject: MeasuredModel, device: torch.device, options: ProfileOptions
    ) -> None:
        """Makes the copy, on the device's current stream.

        Raises:
            ConfigError: three blocks do not fit.
        """
        try:
            model = subject.copy(DEPTH, device)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"--model {subject.name}: {DEPTH} of its layers and what is outside of them do "
                f"not fit on {device} ({_first_line(error)})"
            ) from error
        self._subject, self._device, self._options = subject, device, options
        self._bench = LayerBench(subject, model, device)
        self._found: dict[int, SizeMeasurements] = {}
        """Measurements by micro-batch size."""
        self._too_large: int | None = None
        """The smallest size that did not fit."""
        self._launch_bound: list[int] = []
        """Sizes that may wait for launches."""
        self._idle_bytes = 0
        self._slowdown: float | None = None

    def __enter__(self) -> LayerProfiling:
        return self

    def __exit__(self, *failure: object) -> None:
        self._bench.close()
        # The next measurements need the copy's memory, even if something still references this.
        del self._bench
        self._give_back()

    def _give_back(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def measure(self, on_size: Callable[[int, float], None] = lambda size, share: None) -> None:
        """Measures all sizes; on a GPU, returns what passes leave in the allocator to the device.

        ``on_size``: called with a size when it begins, and the share of the work that is done.

        Raises:
            ConfigError: the model has no loss, its blocks are not called one after another, or not
                even the smallest size fits.
        """
        begin, seconds = time.monotonic(), self._options.seconds
        weights = self._allocated()
        try:
            with self._bench.recomputing():
                for size, its_seconds in self._sizes(begin):
                    on_size(size, min(1.0, (time.monotonic() - begin) / seconds))
                    if not self._fits(self._visit, size, its_seconds):
                        self._too_large = size
                # Each size once more, the smallest first.
                for size in sorted(self._found):
                    if time.monotonic() < begin + seconds:
                        self._fits(self._bench.measure_again, size, self._found[size])
        finally:
            self._give_back()
        if not self._found:
            raise ConfigError(
                f"--model {self._subject.name}: not even the smallest micro-batch fits on "
                f"{self._device}: give a smaller --seq-len or --micro-batches"
            )
        self._idle_bytes = max(0, self._allocated() - weights)
        self._launch_bound = [
            size for size in sorted(self._found) if self._found[size].may_be_launch_bound
        ]

    # -- which sizes ---------------------------------------------------------------------------

    def _sizes(self, begin: float) -> Iterator[tuple[int, float]]:
        """Sizes to visit, with the seconds of their passes; by what the last visit found."""
        given, seconds = self._options.micro_batches, self._options.seconds
        for size in given or self._doublings(begin + seconds):
            left = begin + seconds - time.monotonic()
            yield size, _PASSES_SHARE * seconds / len(given) if given else max(0.2, left / 4)
            if self._too_large is not None:
                break
        while given is None and self._found and time.monotonic() < begin + _FILL_SHARE * seconds:
            size = widest_middle(
                self._found if self._too_large is None else [*self._found, self._too_large]
            )
            if size is None:
                return
            yield size, _FILL_SECONDS

    def _doublings(self, deadline: float) -> Iterator[int]:
        """1, 2, 4, ...: at least two, until time is up or nothing is gained."""
        for power in range(MOST_SAMPLES.bit_length()):
            yield 2**power
            is_tried = self._device.type != "cuda" and power >= _TRIED_WITHOUT_GPU
            if (power and time.monotonic() > deadline) or self._gains_nothing() or is_tried:
                return

    def _gains_nothing(self) -> bool:
        samples = [self._found[size].row(size)[0] for size in sorted(self._found)[-3:]]
        speeds = [one.samples / (one.forward_ms + one.recompute_backward_ms) for one in samples]
        gains = [after / before for before, after in itertools.pairwise(speeds)]
        return len(gains) == 2 and max(gains) < _KNEE and samples[-1].samples >= _SMALLEST_LAST

    def _visit(self, size: int, seconds: float) -> None:
        self._found[size] = self._bench.measure(size, seconds)

    def _fits(self, measure: Callable[[int, Any], object], size: int, how: Any) -> bool:
        """Measures a size and tells whether it fits; earlier measurements of it are kept."""
        try:
            measure(size, how)
            return True
        except torch.cuda.OutOfMemoryError as error:
            logger.info("a micro-batch of %d does not fit (%s)", size, _first_line(error))
        # Not in the handler: the exception holds the pass's tensors.
        self._bench.clean()
        return False

    # -- launches ------------------------------------------------------------------------------

    def launch_again(self, pauses: int = 1) -> None:
        """Times launches of all sizes that may wait for them, in one pause of ``pauses``: at least
        one turn."""
        deadline = time.monotonic() + _LAUNCH_SHARE * self._options.seconds / pauses
        with self._bench.recomputing():
            for turn in range(-(-_LAUNCH_TURNS // pauses)):
                if turn and time.monotonic() > deadline:
                    return
                self._launch_bound = [
                    size
                    for size in self._launch_bound
                    if self._fits(self._bench.launch_again, size, self._found[size])
                ]

    def launch_beside(self, measure: Callable[[Callable[[], float]], float]) -> None:
        """Measures launches beside updates on the CPU.

        ``measure``: returns the slowdown of a function that launches passes of the smallest size
        and returns the seconds of one.
        """
        if self._device.type == "cuda":  # without a GPU, the host computes
            size = min(self._found)
            self._slowdown = measure(lambda: self._bench.launch_seconds(size))

    def result(self) -> LayerProfile:
        """What has been measured so far."""
        found = [self._found[size] for size in sorted(self._found)]
        rows = [self._found[size].row(size) for size in sorted(self._found)]
        turns = next((one.turns for one in found if one.turns), None)
        return LayerProfile(
            layer=tuple(block for block, _ in rows),
            outside=tuple(around for _, around in rows),
            boundary_bytes=self._bench.boundary_bytes,
            idle_bytes=self._idle_bytes,
            launch_slowdown=self._slowdown,
            launch_spread=spread(turns) if turns else None,
            sums_squares=self._bench.sums_squares,
            block_tensors=self._bench.block_tensors,
        )


def widest_middle(sizes: Iterable[int]) -> int | None:
    """The middle of the relatively widest gap, the first of equal ones; None if there is none.

    >>> widest_middle([1, 2, 4, 8]), widest_middle([1, 2, 3, 4, 8]), widest_middle([1, 2])
    (3, 6, None)
    """
    gaps = [
        (low, high)
        for low, high in itertools.pairwise(sorted(sizes))
        if high - low > 1 and (high <= _FILLED_UP_TO or high > _WIDEST_GAP * low)
    ]
    low, high = max(gaps, key=lambda gap: gap[1] / gap[0], default=(0, 0))
    return (low + high) // 2 or None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
