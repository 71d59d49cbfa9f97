"""Simulated machines whose steps differ from the solver's prediction, and trainings on them."""

from __future__ import annotations

import random
import statistics
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

from hytrain.config import SolverConfig
from hytrain.cost.prediction import predict
from hytrain.cost.step import LayerCosts, StepCosts
from hytrain.model.state_format import StateFormat
from hytrain.placement.controller import PlacementController
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.measure import CostEstimator, InitialRates
from hytrain.placement.memory import Bounds, bounds
from hytrain.placement.records import Decision
from hytrain.placement.solve_schedule import SolveSchedule
from hytrain.placement.step_timer import StepSample

PARAMETERS = 50_000_000
PASSES = 5
"""The worker's passes over which a median is taken."""


class Steps(Protocol):
    """What a training needs to know about a machine."""

    @property
    def layers(self) -> int: ...

    @property
    def noise(self) -> float: ...

    @property
    def drift(self) -> float: ...

    @property
    def outliers(self) -> float: ...

    def costs(self, gpu_layers: int) -> StepCosts:
        """Returns the costs that are measured at a placement."""
        ...

    def step_seconds(self, gpu_layers: int) -> float:
        """Returns the true length of a step."""
        ...

    def best(self) -> float:
        """Returns the length of the shortest step."""
        ...

    def is_launch_bound(self, gpu_layers: int) -> bool:
        """Whether a step shows that it is launch-bound."""
        ...


@dataclass(frozen=True)
class Machine:
    """A step's times, in seconds of the whole model; the solver is told none after ``gpu``.

    Attributes:
        compute: forward, backward and tail with no update on the CPU.
        cpu: an update of all layers on the CPU.
        gpu: the same on the GPU.
        interference: seconds by which compute grows per second of the worker's work.
        launches: launch time of the GPU updates of all layers, which no GPU measurement shows.
        saved: seconds that a step saves if all layers are updated on the GPU, for no known reason.
        late: seconds by which a step ends later per second of the worker's work; no cost shows it.
        waits_hide: steps that wait for the CPU, with less than half of the layers on the GPU, do
            not show that they are launch-bound.
        noise: standard deviation of a step's length, as a share of it.
        drift: the same for slow changes, over some thirty steps.
        outliers: share of steps that something else delays, by up to twice their length.
    """

    layers: int
    compute: float
    cpu: float
    gpu: float
    interference: float = 0.0
    launches: float = 0.0
    saved: float = 0.0
    late: float = 0.0
    waits_hide: bool = False
    noise: float = 0.0
    drift: float = 0.0
    outliers: float = 0.0

    def costs(self, gpu_layers: int) -> StepCosts:
        """Returns the costs that are measured at a placement."""
        n = self.layers
        work = self.cpu * (n - gpu_layers) / n
        stretch = 1.0 + self.interference * work / self.compute
        layer = LayerCosts(
            name="layer",
            parameters=PARAMETERS,
            forward=stretch * self.compute / 3 / n,
            backward=stretch * self.compute * 0.6 / n,
            to_host=self.cpu / 4 / n,
            cpu_update=self.cpu / n,
            cpu_commit=0.85 * self.cpu / n,
            cpu_preview=0.5 * self.cpu / n,
            to_device=self.cpu / 4 / n,
            gpu_update=self.gpu / n,
        )
        return StepCosts((layer,) * n, tail=stretch * self.compute / 15, chunk_elements=PARAMETERS)

    def step_seconds(self, gpu_layers: int) -> float:
        """Returns the true length of a step."""
        return _step_seconds(replace(self, noise=0.0, drift=0.0, outliers=0.0), gpu_layers)

    def best(self) -> float:
        """Returns the length of the shortest step."""
        return min(self.step_seconds(k) for k in range(self.layers + 1))

    def is_launch_bound(self, gpu_layers: int) -> bool:
        """Whether a step shows that it is launch-bound."""
        is_hidden = self.waits_hide and gpu_layers < self.layers / 2
        if is_hidden and _waits(replace(self, noise=0.0, drift=0.0, outliers=0.0), gpu_layers):
            return False
        return self.interference > 0.0


@cache
def _step_seconds(machine: Machine, gpu_layers: int) -> float:
    predicted = predict(machine.costs(gpu_layers), gpu_layers=[gpu_layers]).step_seconds[0]
    launches = machine.launches * gpu_layers / machine.layers
    late = machine.late * machine.cpu * (1.0 - gpu_layers / machine.layers)
    return predicted + launches + late - machine.saved * (gpu_layers == machine.layers)


@cache
def _waits(machine: Machine, gpu_layers: int) -> bool:
    (found,) = predict(machine.costs(gpu_layers), gpu_layers=[gpu_layers]).candidates
    return found.bound == "host"


class Training:
    """Steps on a machine, with noise on each part of a step.

    The real schedule selects the steps to measure, and the real estimator evaluates them.
    """

    def __init__(self, machine: Steps, seed: int = 0, gpu_layers: int = 0) -> None:
        self.machine: Any = machine
        self.random = random.Random(seed)
        n = machine.layers
        self.layers: list[Any] = [
            SimpleNamespace(
                index=i,
                name=str(i),
                placement="gpu" if i < gpu_layers else "cpu",
                form=StateFormat(),
            )
            for i in range(n)
        ]
        self.limits = MemoryLimits(gpu=None, gpu_reserve=0, gpu_base=0, host=10**13, host_reserve=0)
        layer_bytes = tuple(LayerBytes("layer", PARAMETERS) for _ in range(n))
        first = Decision(
            step=0,
            gpu_layers_before=gpu_layers,
            gpu_layers_target=gpu_layers,
            num_layers=n,
            reason="the first",
            bounds=Bounds(n, 0, n),
            layer_bytes=layer_bytes,
            limits=self.limits,
        )
        mover: Any = self
        self.controller = PlacementController(
            self.layers, mover, SolverConfig(), first, solves=True
        )
        self.step = 0
        self.drift = 0.0
        self.estimator = CostEstimator(
            layer_bytes, PARAMETERS, InitialRates(1e-9, 1e-11), updates_overlap=True
        )
        self.schedule = SolveSchedule(self.controller, self.estimator, lambda _step: self.limits)
        self._estimate = self.estimator.costs
        self.estimator.costs = self._costs
        self.num_measured = 0
        self._measures = True
        self._passes: deque[float] = deque(maxlen=PASSES)
        self._last: StepSample | None = None
        """The last sample, which is read one step later."""

    def to_gpu(self, layer: Any) -> None:
        layer.placement = "gpu"

    def to_cpu(self, layer: Any) -> None:
        layer.placement = "cpu"

    def release(self) -> None:
        """Releases nothing: no memory is held."""

    def run(self, steps: int) -> int:
        """Trains; returns the number of decisions that moved layers."""
        controller, before = self.controller, len(self.controller.decisions)
        for _ in range(steps):
            self.drift = 0.97 * self.drift + self.random.gauss(0.0, 0.243 * self.machine.drift)
            self._observe()
            self.step += 1
            controller.apply_moves(self.step)
        made = controller.decisions[before:]
        return sum(d.gpu_layers_before != d.gpu_layers_target for d in made)

    def _observe(self) -> None:
        schedule = self.schedule
        samples = [self._last] if self._last is not None else []
        if samples:
            schedule.add_samples(samples)
        self._last = self._sample() if self._measures else None
        # The worker reports every step, on the machine as it is now: its medians adapt sooner.
        self._passes.append(1 + self.random.gauss(0.0, self.machine.noise))
        schedule.consider()
        schedule.steps = self.step + 1
        if not self.controller.moves.is_settled:
            self.estimator.forget_earlier()
        self.num_measured += self._measures
        self._measures = schedule.measures_next()

    def _costs(self) -> StepCosts | None:
        """Returns the costs estimated from samples, with update and copy times from the worker."""
        costs = self._estimate()
        if costs is None:
            return None
        now = self.machine.costs(self.controller.num_gpu_layers).layers
        wrong = statistics.median(self._passes)
        layers = tuple(
            replace(
                layer,
                cpu_update=wrong * truth.cpu_update,
                cpu_commit=wrong * truth.cpu_commit,
                cpu_preview=wrong * truth.cpu_preview,
                to_host=wrong * truth.to_host,
                to_device=wrong * truth.to_device,
                gpu_update=truth.gpu_update,
            )
            for layer, truth in zip(costs.layers, now, strict=True)
        )
        return replace(costs, layers=layers)

    def _sample(self) -> StepSample:
        here, noise = self.controller.num_gpu_layers, self.machine.noise
        costs, gauss = self.machine.costs(here), self.random.gauss
        common = 1 + self.drift + gauss(0.0, noise)
        seconds = common * self.machine.step_seconds(here)
        # A delay of one part of a step need not affect the others.
        forward, backward, tail = (common * (1 + gauss(0.0, noise)) for _ in range(3))
        held_up = 0.0
        if self.random.random() < self.machine.outliers:
            held_up = seconds * self.random.random() * 2
        return StepSample(
            forward=[forward * layer.forward for layer in costs.layers],
            cpu_wait=0.0,
            gpu_wait=0.0,
            between=0.0,
            backward=[backward * layer.backward for layer in costs.layers],
            tail=tail * costs.tail + held_up,
            gpu_update={},
            seconds=seconds + held_up,
            launch_bound=self.launch_bound,
        )

    @property
    def launch_bound(self) -> bool:
        """Whether steps at the present placement show that they are launch-bound."""
        return self.machine.is_launch_bound(self.controller.num_gpu_layers)

    @property
    def regret(self) -> float:
        """By how much a step is longer than the best one, as a share of that."""
        here = self.machine.step_seconds(self.controller.num_gpu_layers)
        return here / self.best - 1

    @property
    def best(self) -> float:
        """The length of the shortest step among the placements that fit."""
        return min(self.machine.step_seconds(k) for k in self._fitting)

    @property
    def _fitting(self) -> range:
        layer_bytes = [LayerBytes("layer", PARAMETERS)] * self.machine.layers
        allowed = bounds(layer_bytes, self.limits, 0)
        return range(allowed.min_gpu_layers, allowed.max_gpu_layers + 1)
