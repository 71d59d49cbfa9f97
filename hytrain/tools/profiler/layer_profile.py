"""Times and memory of a block, and of what is outside of the blocks, against micro-batch sizes.

A copy of the model with three blocks makes ordinary training passes, back to back, so that the host
runs ahead of a GPU as it does in training. One of the last two blocks keeps its activations, the
others recompute them, in turns from pass to pass: one run measures both, interleaved. What is
reported are medians.

Every size is visited twice where time allows: a host that cannot start small kernels fast enough
does so in one second and not in the next, and training takes a mean of such seconds. Launches of
the sizes that may wait for them are timed in many short turns besides, which whoever profiles
spreads over all that it measures: hosts are faster and slower for tens of seconds on end.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hytrain.errors import ConfigError
from hytrain.formats.profile_file import LayerSample, OutsideSample
from hytrain.hardware.gpu_memory import usable_gpu_bytes
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.tools.profiler.launching import spread
from hytrain.tools.profiler.layer_bench import LayerBench
from hytrain.tools.profiler.layer_samples import DEPTH, Row, SizeMeasurements
from hytrain.tools.profiler.measured_model import MeasuredModel

logger = logging.getLogger(__name__)

_KNEE = 1.03
"""A doubled micro-batch that gains less than this, twice in a row, is the last one ..."""
_SMALLEST_LAST = 8
"""... of at least so many samples: a plan may go far beyond it, on a straight line."""
_PASSES_SHARE = 0.4
"""Of the time, for the first visit's timed passes where the number of sizes is known."""
_LAUNCH_TURNS = 40
"""Of launches, about: within a second hosts launch the same in 0.7 to 1.3 times their mean."""
_LAUNCH_SHARE = 0.4
"""Of the time, for these turns, beyond it; after the first."""
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
        launch_slowdown: of launches beside updates on the CPU; None where it was not measured.
        launch_spread: of launches, nothing beside them, over all turns of the smallest size; None
            where none waits for them.
        sums_squares: whether gradients come with the squares that their norm is made of.
        block_tensors: trained parameters of a block, as tensors.
    """

    layer: tuple[LayerSample, ...]
    outside: tuple[OutsideSample, ...]
    boundary_bytes: int
    idle_bytes: int
    launch_slowdown: float | None = None
    launch_spread: float | None = None
    sums_squares: bool = False
    block_tensors: int = 1


def profile_layer(
    subject: MeasuredModel,
    device: torch.device,
    options: LayerOptions,
    *,
    on_size: Callable[[int, float], None] = lambda size, share: None,
) -> LayerProfile:
    """Measures on the current stream of a device, and nothing else meanwhile.

    Args:
        subject: the model.
        device: where; on a CPU it works for trying, memory of operations' insides not counted.
        options: which sizes, and how long.
        on_size: called with a size when it begins, and the share of the work that is done.

    Raises:
        ConfigError: as :class:`LayerProfiling` and its methods.
    """
    with LayerProfiling(subject, device, options) as layers:
        layers.measure(on_size)
        layers.launch_again()
        return layers.result()


class LayerProfiling:
    """A copy of the model on a device, and what has been measured of it; within ``with``."""

    def __init__(self, subject: MeasuredModel, device: torch.device, options: LayerOptions) -> None:
        """
        Args:
            subject: the model.
            device: where, on its current stream.
            options: which sizes, and how long.

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
        self._is_cuda = device.type == "cuda"
        self._options = options
        self._bench = LayerBench(subject, model, device)
        self._sizes = _Sizes(subject, self._bench, device)
        self._slowdown: float | None = None

    def __enter__(self) -> LayerProfiling:
        return self

    def __exit__(self, *failure: object) -> None:
        self._bench.close()
        # What is measured next must not miss the copy's memory, whoever still has this.
        del self._bench, self._sizes
        self._give_back()

    def measure(self, on_size: Callable[[int, float], None] = lambda size, share: None) -> None:
        """All sizes; on a GPU what passes leave in the allocator is given back to the device.

        Args:
            on_size: called with a size when it begins, and the share of the work that is done.

        Raises:
            ConfigError: the model has no loss, its blocks are not called one after another, or not
                even the smallest size fits.
        """
        try:
            self._sizes.run(self._options, on_size)
        finally:
            self._give_back()

    def launch_again(self, pauses: int = 1) -> None:
        """Launches of all sizes that may wait for them, in some of their turns.

        Args:
            pauses: in how many calls of this all turns are made.
        """
        seconds = _LAUNCH_SHARE * self._options.seconds / pauses
        self._sizes.launch_in_turns(-(-_LAUNCH_TURNS // pauses), time.monotonic() + seconds)

    def launch_beside(self, measure: Callable[[Callable[[], float]], float]) -> None:
        """Launches beside updates on the CPU.

        Args:
            measure: the slowdown; is given what launches passes of the smallest size and returns
                the seconds of one.
        """
        if self._is_cuda:  # without, the host computes
            size = self._sizes.smallest
            self._slowdown = measure(lambda: self._bench.launch_seconds(size))

    def result(self) -> LayerProfile:
        """What has been measured so far."""
        return replace(self._sizes.result(), launch_slowdown=self._slowdown)

    def _give_back(self) -> None:
        if self._is_cuda:
            torch.cuda.empty_cache()


class _Sizes:
    """Which sizes are measured, and what was found."""

    def __init__(self, subject: MeasuredModel, bench: LayerBench, device: torch.device) -> None:
        self._subject = subject
        self._bench = bench
        self._device = device
        self._rows: list[Row] = []
        self._visited: dict[int, SizeMeasurements] = {}
        self._is_cuda = device.type == "cuda"
        self._idle_bytes = 0
        self._launch_bound: list[int] = []
        self._turns: dict[int, list[float]] = {}
        """Seconds of a pass in each turn of launches, by size."""

    def run(self, options: LayerOptions, on_size: Callable[[int, float], None]) -> None:
        begin = time.monotonic()
        weights = self._bench.allocated()
        with self._bench.recomputing():
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
            self._revisit(begin + options.seconds)
        if not self._rows:
            raise ConfigError(
                f"--model {self._subject.name}: not even the smallest micro-batch fits on "
                f"{self._device}: give a smaller --seq-len or --micro-batches"
            )
        idle = torch.cuda.memory_allocated(self._device) - weights if self._is_cuda else 0
        self._idle_bytes = max(0, idle)
        self._launch_bound = [
            size for size in sorted(self._visited) if self._visited[size].may_be_launch_bound
        ]

    @property
    def smallest(self) -> int:
        """Samples, of the sizes measured."""
        return min(self._visited)

    def launch_in_turns(self, turns: int, deadline: float) -> None:
        """Of all sizes that may wait for launches; the first turn whatever the time."""
        with self._bench.recomputing():
            for turn in range(turns):
                if not self._launch_bound or (turn and time.monotonic() > deadline):
                    return
                self._launch_bound = [
                    size for size in self._launch_bound if self._again(size, self._launch)
                ]

    def _launch(self, size: int, found: SizeMeasurements) -> None:
        taken = self._bench.launch_again(size, found)
        if taken is not None:
            self._turns.setdefault(size, []).append(taken)

    def result(self) -> LayerProfile:
        """Of all visits so far."""
        rows = [self._visited[size].row(size) for size in sorted(self._visited)]
        return LayerProfile(
            layer=tuple(block for block, _ in rows),
            outside=tuple(around for _, around in rows),
            boundary_bytes=self._bench.boundary_bytes,
            idle_bytes=self._idle_bytes,
            launch_spread=spread(self._turns[min(self._turns)]) if self._turns else None,
            sums_squares=self._bench.sums_squares,
            block_tensors=self._bench.block_tensors,
        )

    def _measure_if_it_fits(self, size: int, seconds: float) -> Row | None:
        try:
            self._visited[size] = found = self._bench.measure(size, seconds)
            return found.row(size)
        except torch.cuda.OutOfMemoryError as error:
            logger.info("a micro-batch of %d does not fit (%s)", size, _first_line(error))
        # Not in the handler: the exception holds the pass's tensors.
        self._bench.clean()
        return None

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
        for size in sorted(self._visited):
            if time.monotonic() >= deadline:
                break
            self._again(size, self._bench.measure_again)

    def _again(self, size: int, measure: Callable[[int, SizeMeasurements], None]) -> bool:
        """Adds to what was measured of a size; False where it has no room this time."""
        try:
            measure(size, self._visited[size])
            return True
        except torch.cuda.OutOfMemoryError as error:
            # It fitted before; what was measured then counts.
            logger.info("a micro-batch of %d did not fit again (%s)", size, _first_line(error))
        self._bench.clean()
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


def _peak(row: Row) -> int:
    return max(part.peak_bytes for part in row)


def _pass_ms(block: LayerSample) -> float:
    return block.forward_ms + block.recompute_backward_ms


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
