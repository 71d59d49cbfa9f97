"""What every plan of a part of the space costs at least, before any of its stages is looked at."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from hytrain.tools.hybrid.problem import Problem
from hytrain.tools.hybrid.space import SizeClass


class QuickBounds:
    """Below every plan of a size class and number of micro-batches, whatever the order of types.

    A stage's slowest replica has at least the mean of the samples, and its largest slice at least
    the power of two below: so a layer takes a type of GPU at least m(type, layer), the least
    profiled time of such sizes, and w(layer), the least of all types. With r(type) the least
    m(type, layer) / w(layer), a stage of that type takes t >= r(type) * (its layers' w). Stages are
    no more than units (a mixed one has a unit that counts as of its fastest type), so

        max t >= sum of w / (sum over units of 1 / r(type of the unit)),   sum of t >= sum of w
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._device = np.array([device for device, _, _ in problem.samples])
        self._tp = np.array([tp for _, tp, _ in problem.samples])
        self._share = np.array([share for _, _, share in problem.samples])
        self._times = np.array([one.times for one in problem.samples.values()])
        self._sync = np.array([one.fb_sync for one in problem.samples.values()])
        self._gpus: Counter[str] = Counter()
        for node in problem.nodes:
            self._gpus[node.device] += node.gpus

    def bound(self, size: SizeClass, micro_batches: int) -> float:
        """In ms; infinite where nothing was profiled."""
        samples = self._problem.gbs // micro_batches
        gpus = size.shapes[-1] * size.unit
        can_be = self._tp <= min(gpus, self._problem.max_tp)
        can_be &= 2 * self._share > samples * self._tp / gpus
        if not can_be.any():
            return math.inf
        layers = self._times[can_be].min(axis=0)
        whole = float(layers.sum())
        # Units that two types share count as of the fastest type there is.
        speed = float(size.units - sum(n // size.unit for n in self._gpus.values()))
        for device, number in self._gpus.items():
            own = can_be & (self._device == device)
            if own.any():
                times = self._times[own].min(axis=0)
                ratio = float(np.min(times[layers > 0] / layers[layers > 0], initial=math.inf))
                speed += (number // size.unit) / max(1.0, ratio)
        speed = min(speed, float(size.most))
        peak = max(float(layers.max()), whole / speed) if speed > 0 else math.inf
        again = float(self._sync[can_be].min()) + self._problem.constants.batch_generator_ms
        return (micro_batches - 1) * peak + whole + micro_batches * again
