"""Predicts one rank's step with 0, 1, ... L layers on the GPU, counted from the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hytrain.cost.simulate import Rank, first_on_gpu
from hytrain.cost.step import StepCosts
from hytrain.errors import PlacementError

HOST_BOUND_SHARE = 0.02
"""A step is host-bound if compute stands still for more than this share of it."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """The predicted steady state with the first ``gpu_layers`` layers updated on the GPU.

    Attributes:
        worker_seconds: time per step in which the CPU worker is busy.
        exposed_seconds: time in which compute stands still for weights or for room for gradients.
        gpu_update_seconds: time in which the GPU updates its layers.
    """

    gpu_layers: int
    step_seconds: float
    worker_seconds: float
    exposed_seconds: float
    gpu_update_seconds: float

    @property
    def bound(self) -> Literal["host", "gpu"]:
        """What the step waits for: "host" if waits are more than 2 % of it."""
        return "host" if self.exposed_seconds > HOST_BOUND_SHARE * self.step_seconds else "gpu"


@dataclass(frozen=True, slots=True)
class Prediction:
    """All candidates, in the order in which they were requested."""

    candidates: tuple[Candidate, ...]

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """Each candidate's step, in seconds."""
        return tuple(candidate.step_seconds for candidate in self.candidates)


Room = Callable[[int], Sequence[int] | None]
"""From the number of GPU layers: how many elements of gradients on their way to the host have room
on the GPU once each layer's has come; None: all of them."""


def predict(
    costs: StepCosts, *, gpu_layers: Sequence[int] | None = None, room: Room | None = None
) -> Prediction:
    """The predicted steady state for each candidate number of GPU layers.

    ``gpu_layers``: the candidates; None for 0..L. ``room``: see :data:`Room`; None: all gradients
    have room.

    Raises:
        PlacementError: a candidate is not in 0..L.
    """
    num_layers = len(costs.layers)
    numbers = range(num_layers + 1) if gpu_layers is None else gpu_layers
    for number in numbers:
        if not 0 <= number <= num_layers:
            raise PlacementError(f"{number} GPU layers: must be in 0..{num_layers}")
    rank = Rank(costs, first_on_gpu(0, num_layers))
    final, compute = rank.final_alone(), costs.compute_seconds
    found: list[Candidate] = []
    for number in numbers:
        rank.place(first_on_gpu(number, num_layers))
        held_to = None if room is None else room(number)
        exposed = worker = 0.0
        for clipped, share in ((False, 1.0 - costs.clipped_share), (True, costs.clipped_share)):
            if share > 0.0:
                times, held = final, 0.0
                if held_to is not None:
                    times, held = rank.hold_back(final, held_to, clipped=clipped)
                updates = rank.updates(times, clipped=clipped)
                exposed += share * (held + rank.forward(updates.ready).exposed)
                worker += share * updates.worker
        step = compute + rank.gpu_update_seconds + exposed
        found.append(Candidate(number, step, worker, exposed, rank.gpu_update_seconds))
    return Prediction(tuple(found))
