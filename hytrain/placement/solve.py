"""How many layers the GPU updates: the solvers, and whether a move there is worth its price."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hytrain.errors import PlacementError
from hytrain.placement.closed_form import closed_form
from hytrain.placement.costs import StepCosts
from hytrain.placement.measured_steps import MeasuredSteps
from hytrain.placement.memory import Bounds
from hytrain.placement.prediction import Candidate, predict

Method = Literal["pipeline", "closed_form"]
Limit = Literal["gpu_memory", "host_memory"]

WITHIN_BEST = 0.01
"""The fewest GPU layers are taken whose step is at most this much longer than the shortest."""

CPU_SLACK = 0.05
"""Share by which updates on the CPU may take longer than measured before that shows in the choice.
With one GPU layer too few a step is as much longer as that layer's update on the CPU takes; with
one too many, by its update on the GPU, a twentieth of it."""

WORTH_GAIN = 0.01
"""Share of the step that a move must win to be made for speed."""

_LAUNCH_BOUND_GAIN = 0.04
"""The same of a launch-bound step: what else the host does changes it by more."""

_UNEXPLAINED = 0.03
"""Share of the predicted step by which steps must be longer for another number to be tried, however
they scatter."""

SAVING_COST = 0.005
"""Share of the step that a move may cost to be made for GPU memory."""

_LITTLE = 0.03
"""Share of the step: moves off the GPU that win more need not wait (`leaving_moves.py`)."""

HORIZON_STEPS = 100
"""Steps in which a move for speed must have paid for itself; few trainings are shorter."""

_SURE = 2.0
"""Standard errors of a difference of steps that a gain must exceed to be believed."""

# Of its step: what a time may change by before the change counts at all, as a share of the
# tolerance. Times of a millisecond are all noise.
_NEGLIGIBLE = 0.1


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found.

    Attributes:
        gpu_layers: the choice, within ``bounds``.
        predicted_seconds: the step with it.
        predictions: for 0..L GPU layers; corrected by what was measured, where anything was.
        noise_seconds: a gain over the present placement must be larger to be believed.
        closed_form_k: the closed form's share of GPU layers, whatever the method.
        unbounded_gpu_layers: the choice if memory did not bound it.
        bounds: what fits.
        limited_by: which memory keeps the choice from ``unbounded_gpu_layers``; None: neither.
        reason: why, for people.
    """

    gpu_layers: int
    predicted_seconds: float
    predictions: tuple[Candidate, ...]
    closed_form_k: float
    unbounded_gpu_layers: int
    bounds: Bounds
    limited_by: Limit | None
    reason: str
    noise_seconds: float = 0.0


def solve(
    costs: StepCosts,
    method: Method,
    bounds: Bounds,
    *,
    alpha: float | None = None,
    measured: MeasuredSteps | None = None,
    here: int = 0,
    launch_bound: bool = False,
    choices: Collection[int] | None = None,
    may_try: bool = False,
) -> Solution:
    """The number of GPU layers.

    ``pipeline`` takes the smallest predicted step and, within 1 % of it, the fewest GPU layers,
    also if updates on the CPU took 5 % longer than measured (where steps are not launch-bound);
    ``closed_form`` rounds the published formula, halves up. What does not fit becomes the nearest
    that does (closed form), or the best of what fits (pipeline).

    Args:
        costs: what each layer takes.
        method: the solver.
        bounds: which numbers fit in memory.
        alpha: GPU over CPU update time for the closed form; None: from ``costs``.
        measured: steps at this and other placements, which correct what is predicted; the closed
            form takes no notice of them.
        here: GPU layers now.
        launch_bound: the GPU waits for the host to launch its kernels: a move must win more, and
            measured steps count for more.
        choices: the numbers of GPU layers to choose from, where any of them fits; None: all.
        may_try: where steps take longer than predicted, a number that has not been measured may be
            moved to although steps scatter by more than it wins: what it wins is known then.

    Raises:
        PlacementError: no number fits, ``bounds`` is of another number of layers, ``alpha`` is
            negative or not finite, or the method is unknown.
    """
    num_layers = len(costs.layers)
    if bounds.num_layers != num_layers:
        raise PlacementError(f"bounds of {bounds.num_layers} layers for {num_layers} layers")
    ratio = costs.alpha if alpha is None else alpha
    share = closed_form(costs.backward_seconds, costs.cpu_seconds, ratio)
    plain = predictions = predict(costs).candidates
    noise, note = 0.0, ""
    if measured is not None and method == "pipeline":
        predictions = measured.correct(
            costs,
            predictions,
            here,
            lambda other: predict(other).candidates,
            launch_bound=launch_bound,
        )
        note = _measurements(measured, here) if launch_bound else ""
    if method == "closed_form":
        unbounded = math.floor(share * num_layers + 0.5)
        choice = bounds.clamp(unbounded)
    elif method == "pipeline":
        # Of launch-bound steps the host's launches for a layer may cost as much as its update.
        slack = None if launch_bound else _with_slack(costs, plain, predictions)
        unbounded = _fewest_near_best(predictions, slack)
        choice = bounds.clamp(unbounded)
        allowed = predictions[bounds.min_gpu_layers : bounds.max_gpu_layers + 1]
        chosen_from = [c for c in allowed if choices is None or c.gpu_layers in choices]
        if choice != unbounded or choices is not None:
            choice = _fewest_near_best(chosen_from or allowed, slack)
        if measured is not None:
            noise = _SURE * measured.error(here, choice)
            unexplained = predictions[here].step_seconds - plain[here].step_seconds
            is_unknown = measured.seconds(choice) is None
            if may_try and is_unknown and unexplained > _UNEXPLAINED * plain[here].step_seconds:
                noise = 0.0
        least_gain = _LAUNCH_BOUND_GAIN if launch_bound else WORTH_GAIN
        noise = max(noise, least_gain * predictions[here].step_seconds)
    else:
        raise PlacementError(f'unknown method "{method}": "pipeline" or "closed_form"')
    limited_by = _limit(unbounded, bounds)
    return Solution(
        gpu_layers=choice,
        predicted_seconds=predictions[choice].step_seconds,
        predictions=predictions,
        closed_form_k=share,
        unbounded_gpu_layers=unbounded,
        bounds=bounds,
        limited_by=limited_by,
        reason=_reason(costs, predictions, choice, unbounded, limited_by) + note,
        noise_seconds=noise,
    )


def _fewest_near_best(candidates: Sequence[Candidate], slack: Sequence[float] | None) -> int:
    """The fewest GPU layers near the shortest step, with the CPU as fast as measured or slower.

    Args:
        candidates: to choose from.
        slack: seconds of a step with each of 0..L GPU layers, with a slower CPU; None: as measured.
    """
    steps = {c.gpu_layers: c.step_seconds for c in candidates}
    near = _near_best(steps)
    if slack is None:
        return min(near)
    return min(near & _near_best({k: slack[k] for k in steps}), default=min(near))


def _near_best(steps: Mapping[int, float]) -> set[int]:
    most = min(steps.values()) * (1.0 + WITHIN_BEST)
    return {number for number, seconds in steps.items() if seconds <= most}


def _with_slack(
    costs: StepCosts, plain: Sequence[Candidate], corrected: Sequence[Candidate]
) -> list[float]:
    """Steps with 0..L GPU layers where the CPU is slower than measured.

    Args:
        costs: as measured.
        plain: what is predicted from them.
        corrected: the same, corrected by measured steps.
    """
    factor = 1.0 + CPU_SLACK
    layers = tuple(
        replace(
            layer,
            cpu_update=factor * layer.cpu_update,
            cpu_commit=factor * layer.cpu_commit,
            cpu_preview=factor * layer.cpu_preview,
        )
        for layer in costs.layers
    )
    slower = predict(replace(costs, layers=layers)).step_seconds
    return [
        seconds + c.step_seconds - p.step_seconds
        for seconds, p, c in zip(slower, plain, corrected, strict=True)
    ]


def _limit(unbounded: int, bounds: Bounds) -> Limit | None:
    if unbounded > bounds.max_gpu_layers:
        return "gpu_memory"
    if unbounded < bounds.min_gpu_layers:
        return "host_memory"
    return None


# -- for people --------------------------------------------------------------------------------


def _reason(
    costs: StepCosts,
    predictions: Sequence[Candidate],
    choice: int,
    unbounded: int,
    limited_by: Limit | None,
) -> str:
    num_layers = len(costs.layers)
    there = f"{choice} of {num_layers} layers to the GPU" if choice else "no layers to the GPU"
    parts = [_why(costs, predictions, unbounded), there]
    parts.append(f"predicted {predictions[choice].step_seconds:.3f} s")
    alternative = f"{unbounded} would be best: {predictions[unbounded].step_seconds:.3f} s"
    if limited_by == "gpu_memory":
        parts.append(f"bounded by GPU memory ({alternative})")
    elif limited_by == "host_memory":
        parts.append(f"host memory does not hold more of the state ({alternative})")
    return "; ".join(parts)


def _measurements(measured: MeasuredSteps, here: int) -> str:
    """What the steps at other placements have taught, for people."""
    others = [number for number in measured.known if number != here]
    if not others:
        return ""
    text = "; measured: " + ", ".join(
        f"{measured.seconds(number):.3f} s with {number}" for number in measured.known
    )
    slope = measured.interference(here)
    if slope > 0.0:
        text += (
            f"; launch-bound: each second of CPU updates lengthens forward and backward by "
            f"{slope:.2f} s"
        )
    return text


def _why(costs: StepCosts, predictions: Sequence[Candidate], unbounded: int) -> str:
    update, backward = costs.cpu_seconds, costs.backward_seconds
    host_bound = predictions[0].bound == "host"
    if unbounded == 0 and not host_bound:
        return f"the CPU keeps up: CPU update {update:.3g} s, backward {backward:.3g} s"
    if unbounded == 0:
        return (
            f"host-bound, but GPU updates would win nothing: CPU update {update:.3g} s, "
            f"backward {backward:.3g} s"
        )
    if update > backward:
        return f"host-bound: CPU update {update:.3g} s > backward {backward:.3g} s"
    # The gradients of the first layers come last: nothing is left to hide their updates behind.
    return (
        f"updates and copies of the first layers end late: CPU update {update:.3g} s, "
        f"backward {backward:.3g} s"
    )


# -- hysteresis --------------------------------------------------------------------------------


def worth_moving(
    solution: Solution,
    current_gpu_layers: int,
    move_seconds: Sequence[float],
    horizon_steps: int = HORIZON_STEPS,
    left_for_speed: int = -1,
    leaves_for_little: bool = True,
) -> bool:
    """Whether to move from the current number of GPU layers to the solution's.

    True where the current number does not fit; where the move wins more than 1 % of the step and
    more than measurements scatter, and within ``horizon_steps`` more than it costs; or where it
    frees the GPU of at least ``max(2, 10 % of L)`` layers for a step at most 0.5 % longer.

    Args:
        solution: of a solver.
        current_gpu_layers: as it is.
        move_seconds: for how long the move of each of the L layers stalls training, an estimate.
        horizon_steps: steps in which a move must have paid for itself.
        left_for_speed: the GPU is not freed of layers down to this number, or below: training has
            been there and went on to more, and noise would lead it to and fro.
        leaves_for_little: layers may leave the GPU for less than 3 % of a step.

    Raises:
        PlacementError: ``current_gpu_layers`` is not in 0..L.
    """
    num_layers = len(solution.predictions) - 1
    if not 0 <= current_gpu_layers <= num_layers:
        raise PlacementError(f"{current_gpu_layers} GPU layers: must be in 0..{num_layers}")
    if not solution.bounds.allow(current_gpu_layers):
        return True
    freed = current_gpu_layers - solution.gpu_layers
    if freed == 0:
        return False
    current = solution.predictions[current_gpu_layers].step_seconds
    gain = current - solution.predicted_seconds
    moved = sorted((current_gpu_layers, solution.gpu_layers))
    if freed > 0 and gain <= _LITTLE * current and not leaves_for_little:
        return False
    pays = gain * horizon_steps > sum(move_seconds[slice(*moved)])
    if gain > max(WORTH_GAIN * current, solution.noise_seconds) and pays:
        return True
    if solution.gpu_layers <= left_for_speed:
        return False
    return freed >= solution.bounds.notable_layers and -gain <= SAVING_COST * current


def inputs_moved(old: StepCosts, new: StepCosts, tolerance: float = 0.02) -> bool:
    """Whether costs have changed so much that solving again may give another result.

    Compared are sums over the layers. One has moved when it changed by more than ``tolerance``
    of itself and by more than a tenth of ``tolerance`` of the step's compute: a ``tail`` of a
    millisecond that doubles decides nothing. ``clipped_share`` has when it changed by more than
    ``tolerance``; other layers, or other chunks, always have.
    """
    if [layer.parameters for layer in old.layers] != [layer.parameters for layer in new.layers]:
        return True
    if old.chunk_elements != new.chunk_elements:
        return True
    if abs(new.clipped_share - old.clipped_share) > tolerance:
        return True
    negligible = _NEGLIGIBLE * tolerance * old.compute_seconds
    return any(
        abs(after - before) > max(tolerance * before, negligible)
        for before, after in zip(_sums(old), _sums(new), strict=True)
    )


def _sums(costs: StepCosts) -> list[float]:
    layers = costs.layers
    return [
        costs.forward_seconds,
        costs.between,
        costs.backward_seconds,
        costs.tail,
        sum(layer.cpu_update for layer in layers),
        sum(layer.cpu_commit for layer in layers),
        sum(layer.cpu_preview for layer in layers),
        sum(layer.to_host for layer in layers),
        sum(layer.to_device for layer in layers),
        sum(layer.gpu_update for layer in layers),
    ]
