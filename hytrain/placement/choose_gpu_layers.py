"""How many layers the GPU updates: the solvers, and whether a move there is worth it.

The published closed form balances backward and updates. The pipeline solver predicts the step for
every number of GPU layers from measured costs, and adds by how much measured steps exceeded their
prediction: that is known for the numbers with which training has run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hytrain.cost.prediction import Candidate, Room, predict
from hytrain.cost.step import StepCosts
from hytrain.errors import PlacementError
from hytrain.placement.memory import Bounds

Method = Literal["pipeline", "closed_form"]

WITHIN_BEST = 0.01
"""Share of the step: the fewest GPU layers are taken whose step is at most this much longer than
the shortest, and a move for speed must gain more. Medians of steps are no more exact."""

CPU_SLACK = 0.05
"""Share by which updates on the CPU are assumed to be slower than measured. One GPU layer too few
makes a step longer by that layer's update on the CPU; one too many, by its update on the GPU, which
takes a twentieth of that."""

LITTLE_GAIN = 0.05
"""Share of the step: a move that gains less may follow noise, and waits for a backoff."""

SAVING_COST = 0.005
"""Share of the step that a move for GPU memory may cost: less than is noticed."""


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found.

    Attributes:
        gpu_layers: the choice, within ``bounds``.
        predicted_seconds: the step with it.
        predictions: for 0..L GPU layers, with ``corrections``.
        corrections: seconds that measured steps add to what costs alone predict, for 0..L.
        closed_form_k: the closed form's share of GPU layers, whatever the method.
        bounds: what fits.
        reason: why, for people.
    """

    gpu_layers: int
    predicted_seconds: float
    predictions: tuple[Candidate, ...]
    corrections: tuple[float, ...]
    closed_form_k: float
    bounds: Bounds
    reason: str


def solve(
    costs: StepCosts,
    method: Method,
    bounds: Bounds,
    *,
    alpha: float | None = None,
    residuals: Mapping[int, float] | None = None,
    room: Room | None = None,
) -> Solution:
    """Finds the number of GPU layers.

    ``pipeline`` takes the smallest predicted step with updates on the CPU 5 % slower than measured
    and, within 1 % of it, the fewest GPU layers; ``closed_form`` rounds the published formula,
    halves up. What does not fit becomes the nearest that does (closed form), or the best of what
    fits (pipeline).

    Args:
        costs: each layer's times.
        method: the solver.
        bounds: which numbers fit in memory.
        alpha: GPU over CPU update time for the closed form; None: from ``costs``.
        residuals: seconds by which steps with some numbers of GPU layers took longer than
            predicted; the closed form ignores them.
        room: room on the GPU for gradients on their way to the host; None: for all of them.

    Raises:
        PlacementError: no number fits, ``bounds`` is of another number of layers, ``alpha`` is
            negative or not finite, or the method is unknown.
    """
    num_layers = len(costs.layers)
    if bounds.num_layers != num_layers:
        raise PlacementError(f"bounds of {bounds.num_layers} layers for {num_layers} layers")
    ratio = costs.alpha if alpha is None else alpha
    share = closed_form(costs.backward_seconds, costs.cpu_seconds, ratio)
    added = _corrections(residuals or {}, num_layers)
    # However wrong a prediction was, no step takes less than 0 s.
    predictions = tuple(
        replace(candidate, step_seconds=max(0.0, candidate.step_seconds + more))
        for candidate, more in zip(predict(costs, room=room).candidates, added, strict=True)
    )
    if method == "closed_form":
        unbounded = math.floor(share * num_layers + 0.5)
        choice = bounds.clamp(unbounded)
    elif method == "pipeline":
        slower = predict(_with_slack(costs), room=room).step_seconds
        steps = [max(0.0, step + more) for step, more in zip(slower, added, strict=True)]
        unbounded = _fewest_near_best(steps, range(num_layers + 1))
        choice = bounds.clamp(unbounded)
        if choice != unbounded:
            fitting = range(bounds.min_gpu_layers, bounds.max_gpu_layers + 1)
            choice = _fewest_near_best(steps, fitting)
    else:
        raise PlacementError(f'unknown method "{method}": "pipeline" or "closed_form"')
    return Solution(
        gpu_layers=choice,
        predicted_seconds=predictions[choice].step_seconds,
        predictions=predictions,
        corrections=tuple(added) if residuals else (),
        closed_form_k=share,
        bounds=bounds,
        reason=_reason(costs, predictions, choice, unbounded, bounds),
    )


def _corrections(residuals: Mapping[int, float], num_layers: int) -> list[float]:
    """What to add to the predictions for 0..L GPU layers, interpolated between known numbers.

    If steps with the largest known number of GPU layers exceed their prediction, that is taken for
    the update threads' work, which is gone with all layers on the GPU.
    """
    known = dict(residuals)
    if not known:
        return [0.0] * (num_layers + 1)
    if known[max(known)] > 0.0:
        known.setdefault(num_layers, 0.0)
    numbers = sorted(known)
    return np.interp(range(num_layers + 1), numbers, [known[n] for n in numbers]).tolist()


def _fewest_near_best(steps: Sequence[float], numbers: range) -> int:
    most = min(steps[number] for number in numbers) * (1.0 + WITHIN_BEST)
    return next(number for number in numbers if steps[number] <= most)


def _with_slack(costs: StepCosts) -> StepCosts:
    factor = 1.0 + CPU_SLACK
    layers = tuple(
        replace(
            layer,
            cpu_update=factor * layer.cpu_update,
            cpu_commit=factor * layer.cpu_commit,
            cpu_preview=factor * layer.cpu_preview,
            cpu_late=factor * layer.cpu_late,
        )
        for layer in costs.layers
    )
    return replace(costs, layers=layers)


def worth_moving(solution: Solution, here: int, *, least_gain: float = WITHIN_BEST) -> bool:
    """Whether to move from the present number of GPU layers to the solution's.

    True if the present number does not fit, or if the move gains more than ``least_gain``.
    If a gain of 1 % is enough, also for a move that frees the GPU of at least ``max(2, 10 % of L)``
    layers for a step at most 0.5 % longer.

    Args:
        solution: what a solver found.
        here: GPU layers now.
        least_gain: share of the step.

    Raises:
        PlacementError: ``here`` is not in 0..L.
    """
    num_layers = len(solution.predictions) - 1
    if not 0 <= here <= num_layers:
        raise PlacementError(f"{here} GPU layers: must be in 0..{num_layers}")
    if not solution.bounds.allow(here):
        return True
    freed = here - solution.gpu_layers
    now = solution.predictions[here].step_seconds
    gain = (now - solution.predicted_seconds) / now if now > 0.0 else 0.0
    if gain > least_gain:
        return True
    saves = freed >= solution.bounds.notable_layers and gain >= -SAVING_COST
    return saves and least_gain <= WITHIN_BEST


# -- for people --------------------------------------------------------------------------------


def _reason(
    costs: StepCosts,
    predictions: Sequence[Candidate],
    choice: int,
    unbounded: int,
    bounds: Bounds,
) -> str:
    num_layers = len(costs.layers)
    there = f"{choice} of {num_layers} layers to the GPU" if choice else "no layers to the GPU"
    parts = [_why(costs, predictions, unbounded), there]
    parts.append(f"predicted {predictions[choice].step_seconds:.3f} s")
    alternative = f"{unbounded} would be best: {predictions[unbounded].step_seconds:.3f} s"
    if unbounded > bounds.max_gpu_layers:
        parts.append(f"bounded by GPU memory ({alternative})")
    elif unbounded < bounds.min_gpu_layers:
        parts.append(f"host memory does not hold more of the state ({alternative})")
    return "; ".join(parts)


def _why(costs: StepCosts, predictions: Sequence[Candidate], unbounded: int) -> str:
    update, backward = costs.cpu_seconds, costs.backward_seconds
    seconds = f"CPU update {update:.3g} s, backward {backward:.3g} s"
    if unbounded == 0:
        if predictions[0].bound == "host":
            return f"host-bound, but GPU updates would save nothing: {seconds}"
        return f"the CPU keeps up: {seconds}"
    if update > backward:
        return f"host-bound: CPU update {update:.3g} s > backward {backward:.3g} s"
    return f"no backward is left to hide the first layers' updates: {seconds}"


def closed_form(t_backward: float, t_update: float, alpha: float) -> float:
    """The share of layers to update on the GPU, in [0, 1], as HyTrainDNN solves for it.

    From the balance ``t_B + t_Uk(gpu) = t_U - t_Uk(cpu)`` with ``t_Uk(cpu) = k * t_U`` and
    ``t_Uk(gpu) = alpha * k * t_U``::

        k = (t_U - t_B) / ((1 + alpha) * t_U), clamped to [0, 1]

    It leaves out copies, pipeline fill, unequal layers, memory and the overlap with the next
    forward pass; :mod:`hytrain.cost.prediction` does not.

    Args:
        t_backward: seconds of the backward pass, t_B.
        t_update: seconds the CPU would need to update every layer, t_U; 0 gives 0.
        alpha: GPU over CPU update time of the same parameters.

    Raises:
        PlacementError: an argument is negative or not finite.
    """
    for name, value in (("t_backward", t_backward), ("t_update", t_update), ("alpha", alpha)):
        if not (math.isfinite(value) and value >= 0.0):
            raise PlacementError(f"{name} must be finite and not negative, got {value}")
    if t_update == 0.0:
        return 0.0
    return min(1.0, max(0.0, (t_update - t_backward) / ((1.0 + alpha) * t_update)))
