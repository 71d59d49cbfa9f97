"""Carries placement decisions out: which layer's state moves when, and what if it does not fit.

Deciding is the placement package's; this class keeps the last decision, moves a few layers a step
towards it, and steps back where the device turns out to have not enough memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from hytrain.model.layer_state import LayerState
from hytrain.offload.mover import LayerMover
from hytrain.placement.costs import LayerBytes, MemoryLimits, StepCosts
from hytrain.placement.launch_bound import LaunchBoundPlacement
from hytrain.placement.leaving_moves import LeavingMoves
from hytrain.placement.measured_steps import MeasuredSteps
from hytrain.placement.memory import Bounds, bounds
from hytrain.placement.prediction import predict
from hytrain.placement.records import Decision
from hytrain.placement.refused_numbers import RETRY_STEPS, RefusedNumbers
from hytrain.placement.solve import (
    Method,
    Solution,
    inputs_moved,
    solve,
    worth_moving,
)
from hytrain.placement.trials import Trials, is_other_workload

logger = logging.getLogger(__name__)

_MOVE_BYTES_PER_SECOND = 20e9
"""Of a state on its way through bounce buffers, while it keeps the worker from updating."""
_SETTLED_STEPS = 4
"""Steps after the last move whose times are taken for those of the new placement."""
_SAME_MEMORY = 1.02
"""A GPU counts as large as another that has at most this much more memory."""
_GONE = 8
"""Decisions without launch-bound steps, after which what was settled for those is open again."""
_SOLVE_EVERY = 5
"""Launch-bound steps between two solves for nothing but other costs: their host is busy."""


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """How decisions are made.

    Attributes:
        method: the solver.
        alpha: GPU over CPU update time, where the user gives it.
        interval: steps between two solves.
        staging_bytes: pinned staging on the host.
    """

    method: Method
    alpha: float | None
    interval: int
    staging_bytes: int


class PlacementController:
    """Solves for the number of GPU layers and moves layers there."""

    def __init__(
        self,
        layers: Sequence[LayerState],
        layer_bytes: Sequence[LayerBytes],
        mover: LayerMover,
        settings: ControllerSettings,
        first: Decision,
        *,
        solves: bool,
    ) -> None:
        """
        Args:
            layers: all layers in forward order, the first of them GPU-placed.
            layer_bytes: their sizes.
            mover: re-places them.
            settings: see :class:`ControllerSettings`.
            first: the decision that they are placed by now.
            solves: whether it decides by itself, or only does as it is told.
        """
        self._layers = list(layers)
        self._bytes = tuple(layer_bytes)
        self._mover = mover
        self._settings = settings
        self.solves = solves
        self.decisions: list[Decision] = [first]
        self._solved_with: tuple[StepCosts, Bounds] | None = None
        self._solution: Solution | None = None
        self._solved_at = -_SOLVE_EVERY
        self._solved_for = self.num_gpu_layers
        self._steps = MeasuredSteps()
        self._steps_version = 0
        self._trials = Trials()
        self._launch_bound = LaunchBoundPlacement()
        self._left_for_speed = -1  # most GPU layers that were left for more
        self._leaving = LeavingMoves()
        self._other_steps = 0  # that were not launch-bound, since the last that was
        self.target = self.num_gpu_layers
        self._refused = RefusedNumbers()
        self._settled = 0
        self._warned = False
        self._move_seconds = [layer.state_bytes / _MOVE_BYTES_PER_SECOND for layer in self._bytes]
        # Moves make the worker late: an eighth of the layers a step keeps a hiccup short.
        self._moves_a_step = max(1, -(-len(self._layers) // 8))

    @property
    def num_gpu_layers(self) -> int:
        """GPU-placed layers, always the first ones."""
        return [layer.placement for layer in self._layers].count("gpu")

    @property
    def is_moving(self) -> bool:
        """Whether layers are on their way."""
        return self.target != self.num_gpu_layers

    # -- deciding ------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether to solve at this step: not while layers move, since times then mislead."""
        return self.solves and step % self._settings.interval == 0 and self.is_settled

    @property
    def is_settled(self) -> bool:
        """No layer has moved for long enough that times are those of this placement."""
        return self.target == self.num_gpu_layers and self._settled >= _SETTLED_STEPS

    def consider(
        self, step: int, costs: StepCosts, limits: MemoryLimits, *, launch_bound: bool = False
    ) -> None:
        """Decides anew where costs or memory have changed; sets ``target``.

        Args:
            step: steps made so far.
            costs: what the last steps took.
            limits: what memory there is.
            launch_bound: the GPU waits for the host to launch its kernels.
        """
        allowed = self._allowed(step, limits)
        launch_bound = launch_bound or self._steps.launch_bound
        here, last = self.num_gpu_layers, self._solved_with
        solved_here = last if self._solved_for == here else None
        if solved_here is not None and is_other_workload(solved_here, (costs, allowed)):
            self._restart()
        self._trials.see(step)
        if self._solution is None or self._is_out_of_date(step, costs, allowed, launch_bound):
            self._solution = self._solve(step, costs, allowed, launch_bound=launch_bound)
        solution = self._solution
        self._other_steps = 0 if launch_bound else self._other_steps + 1
        if self._other_steps == _GONE:
            self._launch_bound.restart()
        if launch_bound and self._settings.method == "pipeline":
            number = self._launch_bound.choose(
                here, allowed, solution.predictions, solution.gpu_layers
            )
            if number is not None:
                self._place_launch_bound(step, solution, number, costs, limits)
                return
        # The closed form is there to reproduce the published system: it is followed as it is.
        moves = solution.gpu_layers != here and (
            self._settings.method == "closed_form" or self._is_worth_moving(step, solution)
        )
        if moves:
            if solution.gpu_layers > here:
                self._left_for_speed = max(self._left_for_speed, here)
            self._leaving.see_move(step, here, solution.gpu_layers)
            if self._steps.seconds(solution.gpu_layers) is None:
                self._trials.use()
            self._decide(step, solution, solution.gpu_layers, solution.reason, costs, limits)
        elif self.decisions[-1].costs is None:
            # Nothing moves, but now it is known why.
            reason = f"{solution.reason}; {here} of {len(self._layers)} stay there"
            self._decide(step, solution, here, reason, costs, limits)

    def _is_worth_moving(self, step: int, solution: Solution) -> bool:
        # While numbers are tried, the first predictions may have led to too many layers.
        left = -1 if self._trials.are_left(step) else self._left_for_speed
        return worth_moving(
            solution,
            self.num_gpu_layers,
            self._move_seconds,
            left_for_speed=left,
            leaves_for_little=self._leaving.are_allowed(step),
        )

    def _is_out_of_date(
        self, step: int, costs: StepCosts, allowed: Bounds, launch_bound: bool
    ) -> bool:
        last = self._solved_with
        if last is None or last[1] != allowed or self._steps_version != self._steps.version:
            return True
        if launch_bound and step - self._solved_at < _SOLVE_EVERY:
            return False
        return inputs_moved(last[0], costs)

    def _solve(
        self, step: int, costs: StepCosts, allowed: Bounds, *, launch_bound: bool
    ) -> Solution:
        self._solved_with, self._solved_at = (costs, allowed), step
        self._steps_version = self._steps.version
        here = self._solved_for = self.num_gpu_layers
        may_try = self._trials.are_left(step)
        tried_enough = launch_bound and allowed.allow(here) and not may_try
        return solve(
            costs,
            self._settings.method,
            allowed,
            alpha=self._settings.alpha,
            measured=self._steps,
            here=here,
            launch_bound=launch_bound,
            choices={here, *self._steps.known} if tried_enough else None,
            may_try=may_try,
        )

    def _place_launch_bound(
        self, step: int, solution: Solution, number: int, costs: StepCosts, limits: MemoryLimits
    ) -> None:
        if number == self.num_gpu_layers and self.decisions[-1].costs is not None:
            return  # it is there, and known why
        reason = (
            "launch-bound: the GPU waits for the host to launch kernels, which updates on the CPU "
            f"slow down; {number} of {len(self._layers)} layers to the GPU"
        )
        if number < solution.bounds.max_gpu_layers and self._launch_bound.is_settled:
            reason += ", which was measured to be faster than all that fit"
        elif number < solution.bounds.max_gpu_layers:
            reason = f"launch-bound: {solution.reason}, to compare with all that fit"
        elif number < len(self._layers):
            reason += ", as many as fit"
        self._decide(step, solution, number, reason, costs, limits)

    def _restart(self) -> None:
        """The workload is another one: what was tried for the last one tells nothing."""
        self._trials.restart()
        self._left_for_speed = -1
        self._launch_bound.see_change()

    def add_step(self, seconds: float, *, launch_bound: bool) -> None:
        """A step of the present placement took so many seconds; call it only when settled."""
        here = self.num_gpu_layers
        self._launch_bound.add_step(here, seconds)
        if self._steps.add(here, seconds, launch_bound=launch_bound):
            self._trials.restart()
            self._left_for_speed = -1

    @property
    def num_measured(self) -> int:
        """Steps that were measured at the present placement."""
        return self._steps.count(self.num_gpu_layers)

    def consider_idle(self, step: int, limits: MemoryLimits) -> None:
        """Decides for a rank that computes no samples: its GPU has time for every update.

        Sets ``target`` to the most layers that fit there: the host's cores and memory bandwidth are
        left to ranks that need them, and a step waits for no update on this rank's CPU.

        Args:
            step: steps made so far.
            limits: what memory there is.
        """
        allowed = self._allowed(step, limits)
        here, most, last = self.num_gpu_layers, allowed.max_gpu_layers, self.decisions[-1]
        had_to_leave = last.gpu_layers_target < last.gpu_layers_before
        if most == here or (most > here and had_to_leave and step - last.step < RETRY_STEPS):
            return
        self.target = most
        self._solved_with = None  # should samples come, it is solved anew
        self._record(
            replace(
                last,
                step=step,
                gpu_layers_before=here,
                gpu_layers_target=most,
                reason=f"this rank computes no samples: its GPU updates all that fits there, "
                f"{most} of {len(self._layers)} layers",
                predicted_seconds=None,
                measured_seconds=None,
                closed_form_k=None,
                bounds=allowed,
                costs=None,
                limits=limits,
                corrections=(),
            )
        )

    def _allowed(self, step: int, limits: MemoryLimits) -> Bounds:
        allowed = bounds(self._bytes, limits, self._settings.staging_bytes)
        allowed = self._refused.restrict(allowed, step)
        if allowed.fits:
            return allowed
        # Both sides are full. The placement at hand works as it is; the host would not hold more.
        if not self._warned:
            self._warned = True
            logger.warning(
                "neither side has the memory that its reserve asks for: the host wants at least %d "
                "layers on the GPU, the GPU has memory for %d; training goes on with %d. "
                "Activation checkpointing, a smaller micro-batch or smaller reserves "
                '("hytrain.solver.gpu_memory_reserve_bytes", "host_memory_reserve_bytes") help',
                allowed.min_gpu_layers,
                allowed.max_gpu_layers,
                self.num_gpu_layers,
            )
        here = self.num_gpu_layers
        return Bounds(allowed.num_layers, here, here)

    def _decide(
        self,
        step: int,
        solution: Solution,
        gpu_layers: int,
        reason: str,
        costs: StepCosts,
        limits: MemoryLimits,
    ) -> None:
        self.target = gpu_layers
        self._record(
            Decision(
                step=step,
                gpu_layers_before=self.num_gpu_layers,
                gpu_layers_target=gpu_layers,
                num_layers=len(self._layers),
                reason=reason,
                predicted_seconds=solution.predictions[gpu_layers].step_seconds,
                measured_seconds=None,
                closed_form_k=solution.closed_form_k,
                bounds=solution.bounds,
                costs=costs,
                layer_bytes=self._bytes,
                limits=limits,
                staging_bytes=self._settings.staging_bytes,
                corrections=self._corrections(solution, costs),
            )
        )

    def _corrections(self, solution: Solution, costs: StepCosts) -> tuple[float, ...]:
        """What was measured adds to predictions from the costs alone, for the record."""
        if not self._steps.known or self._settings.method != "pipeline":
            return ()
        plain = predict(costs).step_seconds
        pairs = zip(solution.predictions, plain, strict=True)
        return tuple(corrected.step_seconds - seconds for corrected, seconds in pairs)

    def _record(self, decision: Decision) -> None:
        self.decisions.append(decision)
        logger.info(
            "step %d: %d -> %d GPU layers: %s",
            decision.step,
            decision.gpu_layers_before,
            decision.gpu_layers_target,
            decision.reason,
        )

    def order(self, step: int, gpu_layers: int, reason: str) -> None:
        """Sets the target as somebody else has decided."""
        self.target = gpu_layers
        self._record(
            replace(
                self.decisions[-1],
                step=step,
                gpu_layers_before=self.num_gpu_layers,
                gpu_layers_target=gpu_layers,
                reason=reason,
                predicted_seconds=None,
                measured_seconds=None,
                corrections=(),
            )
        )

    def resume(self, step: int, history: Sequence[Decision]) -> None:
        """The decisions of this run follow on those of an earlier one.

        Where the earlier run had the same layers and the same GPU memory, this one starts where
        that ended; its first solve comes when its own times are known.
        """
        mine = [replace(decision, step=step) for decision in self.decisions[-1:]]
        self.decisions = [*history, *mine]
        self._refused.forget()
        self._leaving = LeavingMoves()  # steps may begin anew at an earlier number
        self._steps = MeasuredSteps()
        self._restart()
        if self.solves and history and self._is_comparable(history[-1]):
            last = mine[0].bounds.clamp(history[-1].gpu_layers_target)
            if last != self.num_gpu_layers:
                self.order(step, last, f"resumed: {last} layers were on the GPU before")

    def _is_comparable(self, earlier: Decision) -> bool:
        now = self.decisions[-1]
        if earlier.layer_bytes != now.layer_bytes:
            return False
        if earlier.limits.gpu is None or now.limits.gpu is None:
            return earlier.limits.gpu is now.limits.gpu
        return earlier.limits.gpu <= now.limits.gpu * _SAME_MEMORY

    def measured(self, seconds: float) -> None:
        """What the step takes with the last decision, once it is carried out."""
        if self.decisions[-1].measured_seconds is None:
            self.decisions[-1] = self.decisions[-1].with_measured(seconds)

    # -- carrying out --------------------------------------------------------------------------

    def act(self, step: int, *, at_once: bool = False) -> None:
        """Moves layers towards the target; called between two steps.

        Args:
            step: steps made so far.
            at_once: all of them, not only a few.
        """
        self._settled += 1
        moves = len(self._layers) if at_once else self._moves_a_step
        while moves and self.num_gpu_layers != self.target:
            self._settled = 0
            moves -= 1
            here = self.num_gpu_layers
            if here < self.target:
                if not self._move_to_gpu(self._layers[here], step):
                    return
            elif not self._move_to_cpu(self._layers[here - 1], step):
                return
        self._mover.release()

    def _move_to_gpu(self, layer: LayerState, step: int) -> bool:
        try:
            self._mover.to_gpu(layer)
        except (torch.OutOfMemoryError, MemoryError):
            self._step_back(layer, step)
            return False
        return True

    def _move_to_cpu(self, layer: LayerState, step: int) -> bool:
        try:
            self._mover.to_cpu(layer)
        except MemoryError as error:
            self._stay(layer, step, error)
            return False
        return True

    def _step_back(self, layer: LayerState, step: int) -> None:
        """There was no memory for a layer's state: it and one more stay on the host."""
        here = self.num_gpu_layers
        # The allocator could not even serve this: the next forward needs some slack.
        last = self._solved_with
        fewest = (
            last[1].min_gpu_layers if last is not None else self.decisions[-1].bounds.min_gpu_layers
        )
        most = max(here - 1, min(here, fewest), 0)
        again = self._refused.refuse_more_than(most, step)
        self.order(
            step,
            most,
            f"the GPU had no memory for the state of layer '{layer.name}' "
            f"({self._bytes[layer.index].state_bytes} bytes): stepping back; more than {most} "
            f"layers are not tried again before step {again}",
        )
        logger.warning("%s", self.decisions[-1].reason)

    def retreat(self, step: int) -> bool:
        """The user's own allocation found no memory on the GPU: some layers leave it, at once.

        Returns:
            Whether any could: the host must have memory for them.
        """
        here = self.num_gpu_layers
        last = self._solved_with
        fewest = last[1].min_gpu_layers if last else self.decisions[-1].bounds.min_gpu_layers
        most = max(here - self._moves_a_step, min(here, fewest), 0)
        if most == here:
            return False
        again = self._refused.refuse_more_than(most, step)
        self.order(
            step,
            most,
            f"the GPU had no memory for an allocation of the model's: more than {most} layers are "
            f"not tried again before step {again}",
        )
        logger.warning("%s", self.decisions[-1].reason)
        self.act(step, at_once=True)
        return self.num_gpu_layers < here

    def _stay(self, layer: LayerState, step: int, error: MemoryError) -> None:
        """The host had no memory for a layer's state: it stays on the GPU."""
        here = self.num_gpu_layers
        again = self._refused.refuse_fewer_than(here, step)
        self.order(
            step,
            here,
            f"the host had no memory for the state of layer '{layer.name}' ({error}): it stays on "
            f"the GPU; fewer than {here} layers there are not tried again before step "
            f"{again}",
        )
        logger.warning("%s", self.decisions[-1].reason)
