"""Predicted steps, corrected by the steps that were measured at other numbers of GPU layers.

Where the GPU sets the pace, a prediction leaves out little, and that hardly depends on the
workload: at each measured number of GPU layers it is kept as the difference of its steps and what
was predicted for them then. A change of the workload shows in the costs, and all predictions follow
it at once. What steps take longer than predicted with the most GPU layers that were measured is the
work of the update threads, as far as is known: with more GPU layers it is taken to shrink as their
work does, until one of those numbers is measured as well.

Where steps are launch-bound, a prediction cannot know two things from the placement at hand:

- *Interference.* Update threads take cores and memory bandwidth from the launching thread, so that
  compute takes longer the more the CPU updates. Two placements show it: compute is taken as linear
  in the worker's busy seconds.
- *The rest.* It is large there, and costs scatter as much: so the measured steps themselves are
  what holds. When steps at an unchanged placement take another time than they did, the host has
  become slower or faster for all, which is common, and the others are scaled; where the change is
  large, it is another workload and they are forgotten.

Between measured numbers of layers what is added is interpolated linearly. Where steps are not
launch-bound they have one dip: a number is not predicted to be faster than a measured one that lies
between it and the best.
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
_LATEST = 16
"""Steps that the residual is of, at most: as many as costs are medians over, so that both scatter
and change at once."""
_MILESTONES = (ENOUGH_SAMPLES, _REFERENCE, _WINDOW)
"""Numbers of steps at which a median is worth solving with again."""
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
    launch_bound: int = 0
    """Of so many steps the GPU waited for launches."""
    compute: float | None = None
    worker: float | None = None
    residual: float | None = None
    is_news: bool = False
    """The steps are known better than when the residual was taken."""

    def add(self, seconds: float, *, launch_bound: bool) -> None:
        self.launch_bound += launch_bound
        if len(self.first) < _REFERENCE:
            self.first.append(seconds)
        self.last.append(seconds)
        self.count += 1
        self.is_news |= self.count in _MILESTONES

    def scale(self, ratio: float) -> None:
        self.first = [ratio * seconds for seconds in self.first]
        self.last = deque((ratio * seconds for seconds in self.last), maxlen=_WINDOW)
        if self.compute is not None:
            self.compute *= ratio
        if self.residual is not None:
            self.residual *= ratio

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

    def since_change(self) -> _Record:
        """The steps from the change on; those before it would count as noise."""
        latest = list(self.last)[-_RECENT:]
        before, now = statistics.median(self.first), statistics.median(latest)
        fresh = _Record()
        for seconds in latest:
            if abs(seconds - now) < abs(seconds - before):
                fresh.add(seconds, launch_bound=2 * self.launch_bound > self.count)
        return fresh


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

    def add(self, gpu_layers: int, seconds: float, *, launch_bound: bool) -> bool:
        """A step at a settled placement took ``seconds``; returns whether the workload changed.

        All measurements but the latest of this number of GPU layers are then forgotten. After a
        smaller change of launch-bound steps they are scaled by it.
        """
        record = self._records.setdefault(gpu_layers, _Record())
        record.add(seconds, launch_bound=launch_bound)
        self.version += record.count in _MILESTONES
        if not record.has_changed:
            return False
        fresh = record.since_change()
        ratio = fresh.seconds / statistics.median(record.first)
        is_other = not self.launch_bound or not 1.0 / _OTHER_WORKLOAD < ratio < _OTHER_WORKLOAD
        if is_other:
            self._records.clear()
        for other in self._records.values():
            other.scale(ratio)
        self._records[gpu_layers] = fresh
        self.version += 1
        return is_other

    @property
    def launch_bound(self) -> bool:
        """Whether most steps at any measured number of GPU layers were.

        With few layers on the GPU the wait for the CPU may hide it.
        """
        known = [self._records[number] for number in self.known]
        return any(2 * record.launch_bound > record.count for record in known)

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

    def describe(self, here: Candidate, costs: StepCosts) -> None:
        """What is predicted of the steps at the placement at hand.

        Args:
            here: predicted from ``costs``.
            costs: as measured there.
        """
        record = self._records.get(here.gpu_layers)
        if record is None:
            return
        record.compute, record.worker = costs.compute_seconds, here.worker_seconds
        # Not whenever costs change: some are known sooner than steps that show the change.
        if record.is_news:
            record.is_news = False
            latest = statistics.median(list(record.last)[-_LATEST:])
            record.residual = latest - here.step_seconds

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
        self,
        costs: StepCosts,
        candidates: Sequence[Candidate],
        here: int,
        predict: Predict,
        *,
        launch_bound: bool,
    ) -> tuple[Candidate, ...]:
        """The candidates with steps as measurements let expect them.

        Args:
            costs: measured at ``here``.
            candidates: predicted from ``costs``, for 0..L GPU layers.
            here: GPU layers now.
            predict: of candidates for 0..L from other costs.
            launch_bound: the GPU waits for the host to launch its kernels.
        """
        self.describe(candidates[here], costs)
        seconds = [candidate.step_seconds for candidate in candidates]
        slope = self.interference(here) if launch_bound else 0.0
        if slope > 0.0:
            seconds = _with_interference(costs, candidates, here, slope, predict)
        work = [candidate.worker_seconds for candidate in candidates]
        added = self._added(seconds, work, launch_bound=launch_bound)
        # However wrong a prediction was, no step takes less than nothing.
        corrected = [max(s + a, 0.0) for s, a in zip(seconds, added, strict=True)]
        if not launch_bound:
            corrected = self._with_one_dip(corrected)
        return tuple(
            replace(candidate, step_seconds=s)
            for candidate, s in zip(candidates, corrected, strict=True)
        )

    def _with_one_dip(self, seconds: Sequence[float]) -> list[float]:
        """Behind a measured number that is slower than the best of them, no step is shorter.

        What updates on the CPU add to a step shrinks with each GPU layer, what those on the GPU add
        grows: steps have one dip. Residuals of two numbers could make a second one between them.
        """
        known, result = self.known, list(seconds)
        best = min(known, key=lambda number: seconds[number], default=0)
        for number in known:
            behind = range(number) if number < best else range(number + 1, len(result))
            if number != best:
                for k in set(behind).difference(known):
                    result[k] = max(result[k], seconds[number])
        return result

    def _added(
        self, seconds: Sequence[float], work: Sequence[float], *, launch_bound: bool
    ) -> list[float]:
        """What to add to the predictions for 0..L GPU layers, in which the worker has ``work``."""
        added = {k: self._records[k].residual for k in self.known}
        if launch_bound:
            added = {k: self._records[k].seconds - seconds[k] for k in self.known}
        known = {k: value for k, value in added.items() if value is not None}
        if not known:
            return [0.0] * len(seconds)
        result = np.interp(range(len(seconds)), list(known), list(known.values())).tolist()
        most = max(known)
        if not launch_bound and known[most] > 0.0 and work[most] > 0.0:
            for k in range(most + 1, len(seconds)):
                result[k] = known[most] * min(work[k] / work[most], 1.0)
        return result


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
