"""Machines whose steps are not what the solver predicts, and a training on one of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

from hytrain.placement.controller import ControllerSettings, PlacementController
from hytrain.placement.costs import LayerBytes, LayerCosts, MemoryLimits, StepCosts
from hytrain.placement.measured_steps import ENOUGH_SAMPLES
from hytrain.placement.memory import Bounds
from hytrain.placement.prediction import predict
from hytrain.placement.records import Decision

PARAMETERS = 50_000_000


class Steps(Protocol):
    """What a training needs to know of a machine."""

    @property
    def layers(self) -> int: ...

    @property
    def noise(self) -> float: ...

    @property
    def drift(self) -> float: ...

    def costs(self, gpu_layers: int) -> StepCosts:
        """What is measured at a placement."""
        ...

    def step_seconds(self, gpu_layers: int) -> float:
        """The truth."""
        ...

    def best(self) -> float:
        """The shortest step."""
        ...

    def is_launch_bound(self, gpu_layers: int) -> bool:
        """Whether a step shows that it is."""
        ...


@dataclass(frozen=True)
class Machine:
    """A step's times, in seconds of the whole model; what the solver is not told is below the line.

    Attributes:
        compute: forward, backward and tail with no update on the CPU.
        cpu: an update of all layers on the CPU.
        gpu: the same on the GPU.
        interference: seconds by which compute grows with each second of the worker's work.
        launches: of an update on the GPU, for all layers, that no measurement of the GPU shows.
        saved: of a step whose layers are all updated on the GPU, for no other reason known.
        late: seconds by which a step ends later for each of the worker's work, which no cost shows.
        waits_hide: that steps are launch-bound shows with most layers on the GPU only.
        noise: standard deviation of a step, as a share of it.
        drift: the same of what changes slowly, over some thirty steps.
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

    def costs(self, gpu_layers: int) -> StepCosts:
        """What is measured at a placement."""
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
        """The truth."""
        return _step_seconds(replace(self, noise=0.0, drift=0.0), gpu_layers)

    def best(self) -> float:
        """The shortest step."""
        return min(self.step_seconds(k) for k in range(self.layers + 1))

    def is_launch_bound(self, gpu_layers: int) -> bool:
        """Whether a step shows that it is."""
        is_hidden = self.waits_hide and gpu_layers < self.layers / 2
        return self.interference > 0.0 and not is_hidden


@cache
def _step_seconds(machine: Machine, gpu_layers: int) -> float:
    predicted = predict(machine.costs(gpu_layers), gpu_layers=[gpu_layers]).step_seconds[0]
    launches = machine.launches * gpu_layers / machine.layers
    late = machine.late * machine.cpu * (1.0 - gpu_layers / machine.layers)
    return predicted + launches + late - machine.saved * (gpu_layers == machine.layers)


class Training:
    """Steps on a machine, as the manager tells the controller of them."""

    def __init__(self, machine: Steps, seed: int = 0, gpu_layers: int = 0) -> None:
        self.machine: Any = machine
        self.random = random.Random(seed)
        n = machine.layers
        self.layers: list[Any] = [
            SimpleNamespace(index=i, name=str(i), placement="gpu" if i < gpu_layers else "cpu")
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
            predicted_seconds=None,
            measured_seconds=None,
            closed_form_k=None,
            bounds=Bounds.unlimited(n),
            costs=None,
            layer_bytes=layer_bytes,
            limits=self.limits,
        )
        mover: Any = self
        self.controller = PlacementController(
            self.layers,
            layer_bytes,
            mover,
            ControllerSettings("pipeline", None, 1, 0),
            first,
            solves=True,
        )
        self.step = 0
        self.drift = 0.0

    def to_gpu(self, layer: Any) -> None:
        layer.placement = "gpu"

    def to_cpu(self, layer: Any) -> None:
        layer.placement = "cpu"

    def release(self) -> None:
        """Nothing is kept."""

    def run(self, steps: int) -> int:
        """Trains; returns the decisions that moved layers."""
        controller, before = self.controller, len(self.controller.decisions)
        for _ in range(steps):
            here = controller.num_gpu_layers
            self.drift = 0.97 * self.drift + self.random.gauss(0.0, 0.243 * self.machine.drift)
            if controller.is_settled:
                seconds = self.machine.step_seconds(here)
                noise = self.random.gauss(0.0, self.machine.noise)
                controller.add_step(
                    seconds * (1 + noise + self.drift), launch_bound=self.launch_bound
                )
            if controller.is_due(self.step) and controller.num_measured >= ENOUGH_SAMPLES:
                costs = self.machine.costs(here)
                wrong = (
                    1 + self.drift + self.random.gauss(0.0, self.machine.noise / 2)
                )  # of a median
                layers = tuple(
                    replace(c, forward=wrong * c.forward, backward=wrong * c.backward)
                    for c in costs.layers
                )
                controller.consider(
                    self.step,
                    replace(costs, layers=layers),
                    self.limits,
                    launch_bound=self.launch_bound,
                )
            self.step += 1
            controller.act(self.step)
        made = controller.decisions[before:]
        return sum(d.gpu_layers_before != d.gpu_layers_target for d in made)

    @property
    def launch_bound(self) -> bool:
        """Of the present placement's steps."""
        return self.machine.is_launch_bound(self.controller.num_gpu_layers)

    @property
    def regret(self) -> float:
        """By how much a step is longer than the best, as a share."""
        here = self.machine.step_seconds(self.controller.num_gpu_layers)
        return here / self.machine.best() - 1
