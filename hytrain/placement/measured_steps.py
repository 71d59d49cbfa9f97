"""Predicted steps, corrected by the steps that were measured at other numbers of GPU layers.

A prediction takes forward and backward as they are at the placement at hand. Two things it cannot
know from there:

- *Interference.* Where the GPU waits for the host to launch its kernels, update threads take cores
  and memory bandwidth from the launching thread, so that compute takes longer the more the CPU
  updates. Two placements show it: compute is taken as linear in the worker's busy seconds.
- *The rest.* What the model leaves out shows as the difference of a measured step and its
  prediction. It is added to the predictions of the numbers of layers around, interpolated linearly
  between measured ones; for a measured number the result is what was measured.

Measurements hold for one workload. When steps at an unchanged placement take another time than they
did, the host has become slower or faster for all, which is common where steps are launch-bound, and
the others are scaled; where the change is large, it is another workload and they are forgotten.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from hytrain.placement.costs import StepCosts
from hytrain.placement.prediction import Candidate

ENOUGH_SAMPLES = 4
"""Steps after which a number of GPU layers counts as measured."""

_WINDOW = 25
"""Steps that a median is over at most: the more, the less it scatters."""
_REFERENCE = 9
"""First steps at a placement, which later ones are compared with."""
_RECENT = 7
"""A change is seen in so many steps; some outliers are not."""
_CHANGE = 0.1
"""Share of the step by which it must differ from what it was at this placement, to be another."""
_CHANGE_NOISE = 4.0
"""The same in standard deviations of a step."""
_OTHER_WORKLOAD = 1.33
"""Ratio of steps before and after a change from which on it is taken for another workload."""
_LEAST_SLOWDOWN = 0.05
"""Share of compute that must differ between two placements to be taken for interference."""
_LEAST_WORK = 0.2
"""Share of compute by which the worker's work must differ between them."""
_MOST_SLOPE = 1.0
"""Seconds of compute a second of CPU updates; more is an error of measurement."""

Predict = Callable[[StepCosts], Sequence[Candidate]]


@dataclass(slots=True)
class _Record:
    """Steps at one number of GPU layers, in seconds."""

    first: list[float] = field(default_factory=list)
    last: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    count: int = 0
    compute: float | None = None
    worker: float | None = None

    def add(self, seconds: float) -> None:
        if len(self.first) < _REFERENCE:
            self.first.append(seconds)
        self.last.append(seconds)

    def scale(self, ratio: float) -> None:
        self.first = [ratio * seconds for seconds in self.first]
        self.last = deque((ratio * seconds for seconds in self.last), maxlen=_WINDOW)
        if self.compute is not None:
            self.compute *= ratio

    @property
    def seconds(self) -> float:
        return statistics.median(self.last)

    @property
    def deviation(self) -> float:
        """Standard deviation, from the quartiles of the first steps: two outliers do not show."""
        lower, _, upper = statistics.quantiles(self.first, n=4)
        return (upper - lower) / 1.349

    @property
    def error(self) -> float:
        """Standard error of the median."""
        return 1.2533 * self.deviation / math.sqrt(len(self.last))

    @property
    def has_changed(self) -> bool:
        if len(self.last) < _REFERENCE:
            return False
        before = statistics.median(self.first)
        recent = statistics.median(list(self.last)[-_RECENT:])
        return abs(recent - before) > max(_CHANGE * before, _CHANGE_NOISE * self.deviation)


class MeasuredSteps:
    """Medians of measured steps by number of GPU layers, for one workload.

    Attributes:
        version: differs whenever what is measured would change a choice: a number of GPU layers
            has become measured, or is measured better, or the workload is another one.
    """

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._slope = 0.0
        self.version = 0

    def add(self, gpu_layers: int, seconds: float) -> bool:
        """A step at a settled placement took ``seconds``; returns whether the workload changed.

        All measurements but the latest of this number of GPU layers are then forgotten. After a
        smaller change they are scaled by it.
        """
        record = self._records.setdefault(gpu_layers, _Record())
        record.add(seconds)
        record.count += 1
        self.version += record.count in (ENOUGH_SAMPLES, _REFERENCE, _WINDOW)
        if not record.has_changed:
            return False
        fresh = _Record(count=record.count)
        for recent in list(record.last)[-_RECENT:]:
            fresh.add(recent)
        ratio = fresh.seconds / statistics.median(record.first)
        is_other = not 1.0 / _OTHER_WORKLOAD < ratio < _OTHER_WORKLOAD
        if is_other:
            self._records.clear()
        for other in self._records.values():
            other.scale(ratio)
        self._records[gpu_layers] = fresh
        self.version += 1
        return is_other

    def count(self, gpu_layers: int) -> int:
        """Steps measured at a number of GPU layers; at most the window's."""
        record = self._records.get(gpu_layers)
        return len(record.last) if record else 0

    @property
    def known(self) -> list[int]:
        """The numbers of GPU layers that count as measured, in order."""
        return sorted(k for k, r in self._records.items() if len(r.last) >= ENOUGH_SAMPLES)

    def seconds(self, gpu_layers: int) -> float | None:
        """The median step; None where the number does not count as measured."""
        return self._records[gpu_layers].seconds if gpu_layers in self.known else None

    def error(self, gpu_layers: int, other: int) -> float:
        """Standard error of the difference of two steps, in seconds.

        A number that has not been measured is taken to be as noisy as the other; 0 where neither
        has been.
        """
        known = self.known
        errors = [self._records[k].error for k in (gpu_layers, other) if k in known]
        return math.hypot(*(errors if len(errors) == 2 else errors * 2)) if errors else 0.0

    def describe(self, gpu_layers: int, costs: StepCosts, worker_seconds: float) -> None:
        """Compute and the worker's work in the steps at a number of GPU layers.

        Args:
            gpu_layers: the placement that ``costs`` were measured at.
            costs: its layers' times.
            worker_seconds: for which the worker is busy in such a step.
        """
        record = self._records.get(gpu_layers)
        if record is not None:
            record.compute, record.worker = costs.compute_seconds, worker_seconds

    def interference(self, here: int) -> float:
        """Seconds by which compute grows with each second of the worker's work; 0: none seen.

        From the placement at hand and the one whose work differs most from it; as it was seen
        last, where no other has been measured for this workload.
        """
        at = self._records.get(here)
        if at is None or at.compute is None or at.worker is None or here not in self.known:
            return self._slope
        slope, widest = None, 0.0
        for number in self.known:
            other = self._records[number]
            if other.compute is None or other.worker is None:
                continue
            work, compute = at.worker - other.worker, at.compute - other.compute
            if abs(work) <= widest or abs(work) < _LEAST_WORK * at.compute:
                continue
            widest = abs(work)
            is_seen = abs(compute) > _LEAST_SLOWDOWN * min(at.compute, other.compute)
            slope = compute / work if is_seen else 0.0
        if slope is not None:
            self._slope = min(max(slope, 0.0), _MOST_SLOPE)
        return self._slope

    def correct(
        self, costs: StepCosts, candidates: Sequence[Candidate], here: int, predict: Predict
    ) -> tuple[Candidate, ...]:
        """The candidates with steps as measurements let expect them.

        Args:
            costs: measured at ``here``.
            candidates: predicted from ``costs``, for 0..L GPU layers.
            here: GPU layers now.
            predict: of candidates for 0..L from other costs.
        """
        seconds = [candidate.step_seconds for candidate in candidates]
        slope = self.interference(here)
        if slope > 0.0:
            seconds = _with_interference(costs, candidates, here, slope, predict)
        known = self.known
        if known:
            rest = [self._records[k].seconds - seconds[k] for k in known]
            added = np.interp(range(len(seconds)), known, rest)
            # Compute alone is the least that a step can take, however wrong a prediction was.
            seconds = [max(s + float(a), 0.0) for s, a in zip(seconds, added, strict=True)]
        return tuple(
            replace(candidate, step_seconds=s)
            for candidate, s in zip(candidates, seconds, strict=True)
        )


def _with_interference(
    costs: StepCosts,
    candidates: Sequence[Candidate],
    here: int,
    slope: float,
    predict: Predict,
) -> list[float]:
    """Predicted steps where compute grows by ``slope`` seconds a second of the worker's work.

    Compute is scaled as it would be at both ends, and steps are interpolated between these and
    what is known here: a prediction for each number would take a while.
    """
    compute, work = costs.compute_seconds, [c.worker_seconds for c in candidates]
    factors = [max(0.2, 1.0 + slope * (w - work[here]) / compute) for w in work]
    plain = [candidate.step_seconds for candidate in candidates]
    result = list(plain)
    for end in (0, len(candidates) - 1):
        if math.isclose(factors[end], 1.0):
            continue
        scaled = [c.step_seconds for c in predict(_scaled(costs, factors[end]))]
        for k in range(min(here, end), max(here, end) + 1):
            share = (factors[k] - 1.0) / (factors[end] - 1.0)
            result[k] = plain[k] + share * (scaled[k] - plain[k])
    return result


def _scaled(costs: StepCosts, factor: float) -> StepCosts:
    layers = tuple(
        replace(layer, forward=factor * layer.forward, backward=factor * layer.backward)
        for layer in costs.layers
    )
    return replace(costs, layers=layers, between=factor * costs.between, tail=factor * costs.tail)
