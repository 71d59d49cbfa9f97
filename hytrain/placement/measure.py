"""Estimates the costs that a decision is made from, out of measurements of the last steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean, median
from typing import Literal

from hytrain import _C
from hytrain.cost.step import LayerCosts, StepCosts
from hytrain.kernels.host_limits import has_coherent_gpu
from hytrain.placement.costs import LayerBytes
from hytrain.placement.step_timer import StepSample

WINDOW = 16
"""The most steps that medians are over while nothing changes: the more, the less they scatter."""
CONFIRMING = 3
"""Steps in a row that must differ from those before to count as a change. They are also enough to
decide by, since their median is blind to an outlier."""
STEP_CHANGE = 0.15
"""Share by which they must differ: more than steps scatter, or a median of few of them errs."""
MANY_STEPS = 8
"""Samples whose median scatters half as much as one does: after a move or a change, so many steps
in a row are measured before a move that gains little is decided."""
_RATES = 5
"""How many rates, one a step, medians are over for the worker and the copies: they follow a change
within three steps."""
_PCIE_RATE, _C2C_RATE = 20e9, 400e9
"""Bytes/s each way of copies until they are measured; NVLink-C2C carries 450e9 (GH200, GB200)."""
_LARGE_SHARE = 0.25
"""Share of the median or largest layer's size. Smaller layers tell nothing about the others:
launches take most of their time."""

# Bytes of memory traffic per parameter in the four passes, with bf16 gradients and weights: the
# time of one pass tells that of the others until they have been measured.
_Kind = Literal["update", "commit", "preview", "late"]
_TRAFFIC: dict[_Kind, int] = {"update": 30, "commit": 26, "preview": 16, "late": 26}


@dataclass(frozen=True, slots=True)
class InitialRates:
    """Rates that are assumed until they have been measured on real steps.

    Attributes:
        cpu_seconds_per_parameter: time of commit_then_preview.
        gpu_seconds_per_parameter: time of the update on the GPU.
        copy_seconds_per_byte: time of a copy between host and device, either way.
    """

    cpu_seconds_per_parameter: float
    gpu_seconds_per_parameter: float
    copy_seconds_per_byte: float = field(
        default_factory=lambda: 1 / (_C2C_RATE if has_coherent_gpu() else _PCIE_RATE)
    )


@dataclass(slots=True)
class _OpenJob:
    """A layer's update in a step; only its next one tells whether a second pass followed."""

    update: float
    counts: bool
    preview: float | None = None


class CostEstimator:
    """Medians of the last steps' times, for every layer on either side.

    The CPU's times are rates per parameter over all layers on the CPU: so they hold for layers on
    the GPU as well, under the present contention for memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerBytes],
        chunk_elements: int,
        rates: InitialRates,
        *,
        updates_overlap: bool,
    ) -> None:
        """
        Args:
            rates: the rates to begin with.
            updates_overlap: whether updates "on the GPU" run beside the next forward (on a GPU), or
                before it (on a CPU).
        """
        self._updates_overlap = updates_overlap
        self._layers = list(layers)
        self._chunk_elements = chunk_elements
        self.update_threads: int | None = None
        """The threads of the CPU's updates that are measured."""
        self._rates = rates
        self._history: deque[StepSample] = deque(maxlen=WINDOW)
        self._alike = 0
        """The number of latest samples that are of the present placement and workload."""
        self._changed = 0
        """The number of latest ones among these that differ from the others."""
        self._clipped: deque[bool] = deque(maxlen=WINDOW)
        self._jobs: dict[int, _OpenJob] = {}
        self._passes: dict[_Kind, deque[float]] = {kind: deque(maxlen=_RATES) for kind in _TRAFFIC}
        self._latest: _Kind | None = None
        self._sums: dict[_Kind, tuple[float, int]] = {}
        self._least = _LARGE_SHARE * median([layer.parameters for layer in layers])
        self._gpu_rates: deque[float] = deque(maxlen=_RATES)
        self._to_host: deque[float] = deque(maxlen=_RATES)
        self._to_device: deque[float] = deque(maxlen=_RATES)

    # -- measurements --------------------------------------------------------------------------

    def add_samples(self, samples: Iterable[StepSample]) -> float:
        """Adds times on the compute stream.

        Returns:
            the factor by which compute takes longer, if a change is certain now; 1 if not.
        """
        ratio = 1.0
        for sample in samples:
            before = self._samples[: self._alike - self._changed]
            self._history.append(sample)
            self._alike = min(self._alike + 1, WINDOW)
            is_change = len(before) >= CONFIRMING and is_step_change(before, sample)
            self._changed = self._changed + 1 if is_change else 0
            if self._changed == CONFIRMING:
                self._alike, self._changed = CONFIRMING, 0
                ratio = _usual(self._samples, _compute) / _usual(before, _compute)
            self._add_gpu_rate(sample)
        return ratio

    def forget_earlier(self) -> None:
        """Separates earlier samples from the next ones, which are of another placement."""
        self._alike = self._changed = 0

    @property
    def _samples(self) -> list[StepSample]:
        """The samples that medians are over."""
        return list(self._history)[-max(CONFIRMING, self._alike) :]

    @property
    def num_samples(self) -> int:
        """Steps of the present placement and workload that the medians are over."""
        return self._alike

    @property
    def is_changing(self) -> bool:
        """Whether the latest step differs from those before; the next ones tell if that lasts."""
        return self._changed > 0

    def _add_gpu_rate(self, sample: StepSample) -> None:
        largest = max(layer.parameters for layer in self._layers)
        rates = [
            seconds / self._layers[index].parameters
            for index, seconds in sample.gpu_update.items()
            if self._layers[index].parameters >= _LARGE_SHARE * largest
        ]
        if rates:
            # Later layers' updates share the GPU with the next forward: the fastest did not.
            self._gpu_rates.append(min(rates))

    def add_spans(self, spans: Iterable[_C.JobSpan]) -> None:
        """Adds the worker's jobs since the last call, in the order they ended; one call a step."""
        for span in spans:
            seconds = (span.end_ns - span.begin_ns - span.wait_gradient_ns) / 1e9
            job = self._jobs.get(span.layer)
            if span.job_pass == _C.Pass.update:
                if job is not None:
                    self._close(span.layer, job)
                # Without a gradient of an earlier step to commit it is another, shorter pass.
                self._jobs[span.layer] = _OpenJob(seconds, span.committed)
            elif span.job_pass == _C.Pass.direct:
                self._add("update", span.layer, seconds)
            elif span.job_pass == _C.Pass.late:
                self._add("late", span.layer, seconds)
            elif span.job_pass == _C.Pass.preview and job is not None:
                job.preview = seconds
            elif span.job_pass in (_C.Pass.drop, _C.Pass.withdraw, _C.Pass.leave):
                self._jobs.pop(span.layer, None)
        for kind, (seconds, parameters) in list(self._sums.items()):
            # A small layer alone tells nothing about the others.
            if parameters >= self._least:
                self._passes[kind].append(seconds / parameters)
                self._latest = kind
                del self._sums[kind]

    def _close(self, layer: int, job: _OpenJob) -> None:
        if job.preview is not None:
            self._add("preview", layer, job.preview)
        if job.counts:
            self._add("update" if job.preview is None else "commit", layer, job.update)

    def _add(self, kind: _Kind, layer: int, seconds: float) -> None:
        before, parameters = self._sums.get(kind, (0.0, 0))
        self._sums[kind] = before + seconds, parameters + self._layers[layer].parameters

    def add_copies(self, statistics: _C.WorkerStatistics) -> None:
        """Adds what copies took on their streams."""
        if statistics.to_host_bytes and statistics.to_host_ns:
            self._to_host.append(statistics.to_host_ns / 1e9 / statistics.to_host_bytes)
        if statistics.to_device_bytes and statistics.to_device_ns:
            self._to_device.append(statistics.to_device_ns / 1e9 / statistics.to_device_bytes)

    def add_outcome(self, *, clipped: bool) -> None:
        """Adds whether a step's gradient was clipped."""
        self._clipped.append(clipped)

    # -- what follows --------------------------------------------------------------------------

    @property
    def step_seconds(self) -> float | None:
        """The median step; None before enough samples of the present placement."""
        if self._alike < CONFIRMING:
            return None
        return median([s.seconds for s in self._samples])

    @property
    def launch_bound(self) -> bool:
        """Whether the GPU waited for the host to launch its kernels, in most of the last steps."""
        return 2 * sum(sample.launch_bound for sample in self._samples) > len(self._samples)

    @property
    def gpu_seconds_per_parameter(self) -> float:
        """Time of the update on the GPU, which it has to itself."""
        if self._gpu_rates:
            return median(self._gpu_rates)
        return self._rates.gpu_seconds_per_parameter

    def cpu_seconds_per_parameter(self, kind: _Kind) -> float:
        """Time of one of the worker's passes; if not measured yet, from that of the latest pass."""
        if self._passes[kind]:
            return median(self._passes[kind])
        if self._latest is not None:
            return median(self._passes[self._latest]) * _TRAFFIC[kind] / _TRAFFIC[self._latest]
        return self._rates.cpu_seconds_per_parameter * _TRAFFIC[kind] / _TRAFFIC["update"]

    def costs(self) -> StepCosts | None:
        """What the last steps took, without waits and GPU updates; None before the first sample."""
        samples = self._samples
        if not samples:
            return None
        forward = _medians([self._forward(s) for s in samples])
        backward = _medians([self._backward(s) for s in samples])
        passes = {kind: self.cpu_seconds_per_parameter(kind) for kind in _TRAFFIC}
        gpu = self.gpu_seconds_per_parameter
        to_host = median(self._to_host or [self._rates.copy_seconds_per_byte])
        to_device = median(self._to_device or [self._rates.copy_seconds_per_byte])
        layers = tuple(
            LayerCosts(
                name=layer.name,
                parameters=layer.parameters,
                forward=forward[index],
                backward=backward[index],
                to_host=to_host * layer.parameters * layer.gradient_itemsize,
                cpu_update=passes["update"] * layer.parameters,
                cpu_commit=passes["commit"] * layer.parameters,
                cpu_preview=passes["preview"] * layer.parameters,
                cpu_late=passes["late"] * layer.parameters,
                to_device=to_device * layer.parameters * layer.weights_itemsize,
                gpu_update=gpu * layer.parameters,
            )
            for index, layer in enumerate(self._layers)
        )
        return StepCosts(
            layers=layers,
            between=median([s.between for s in samples]),
            tail=median([s.tail for s in samples]),
            clipped_share=fmean(self._clipped) if self._clipped else 0.0,
            chunk_elements=self._chunk_elements,
            update_threads=self.update_threads,
        )

    def _forward(self, sample: StepSample) -> list[float]:
        """Each layer's forward as if no update on the GPU had run beside it.

        An update takes the GPU's bandwidth from the forward beside it: the part of the update for
        which forward did not wait has slowed forward down.
        """
        if sample.updates_in_backward:
            return sample.forward
        return self._without(self._update_seconds(sample) - sample.gpu_wait, sample.forward)

    def _backward(self, sample: StepSample) -> list[float]:
        """Each layer's backward as if no update on the GPU had run beside it."""
        if not sample.updates_in_backward:
            return sample.backward
        return self._without(self._update_seconds(sample), sample.backward)

    def _update_seconds(self, sample: StepSample) -> float:
        rate = self.gpu_seconds_per_parameter
        return rate * sum(self._layers[index].parameters for index in sample.gpu_update)

    def _without(self, beside: float, each: list[float]) -> list[float]:
        total = sum(each)
        if not self._updates_overlap or total <= 0.0 or beside <= 0.0:
            return each
        share = max(0.5, 1.0 - beside / total)
        return [seconds * share for seconds in each]


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """The median of each column. Numpy takes longer for so few numbers, and the GPU may wait."""
    return [median(column) for column in zip(*rows, strict=True)]


def is_step_change(before: Sequence[StepSample], sample: StepSample) -> bool:
    """Whether a step, or its compute, differs from the usual by more than steps scatter."""
    pairs = [(_usual(before, of), of(sample)) for of in (attrgetter("seconds"), _compute)]
    return any(abs(now - usual) > STEP_CHANGE * usual for usual, now in pairs)


def _usual(samples: Sequence[StepSample], of: Callable[[StepSample], float]) -> float:
    return median([of(sample) for sample in samples[-MANY_STEPS:]])


def _compute(sample: StepSample) -> float:
    return sample.seconds - sample.cpu_wait - sample.gpu_wait
