"""Decides repeatedly how many layers are on the GPU, and has layers moved accordingly.

It keeps all decisions, moves a few layers per step towards the last one, and decides for another
number if a side turns out to have too little memory.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

from hytrain.config import SolverConfig
from hytrain.cost.prediction import predict
from hytrain.cost.step import StepCosts
from hytrain.model.layer_state import LayerState
from hytrain.offload.mover import LayerMover
from hytrain.placement.allocator_watch import advise_on_gaps
from hytrain.placement.backoff import Backoff
from hytrain.placement.choose_gpu_layers import (
    LITTLE_GAIN,
    Solution,
    solve,
    worth_moving,
)
from hytrain.placement.costs import LayerBytes, MemoryLimits, counted
from hytrain.placement.launch_bound import LaunchBoundPlacement
from hytrain.placement.measure import MANY_STEPS, STEP_CHANGE, WINDOW
from hytrain.placement.memory import (
    Bounds,
    all_split,
    as_kept,
    bounds,
    first_late_layers,
    gpu_peak_bytes,
    gradient_room,
    late_layers,
)
from hytrain.placement.memory_report import master_words
from hytrain.placement.moves import LayerMoves, MissingMemory
from hytrain.placement.records import Decision
from hytrain.placement.refused_memory import RefusedMemory

logger = logging.getLogger(__name__)

_SAME_MEMORY = 1.02
"""A GPU counts as no smaller than one with at most this many times its memory: drivers differ."""


@dataclass(slots=True)
class _Workload:
    """What steps of this workload have shown.

    Attributes:
        residuals: by number of GPU layers, seconds that measured steps take beyond the prediction.
        predicted: predicted seconds of the last steps at the present placement.
        little_moves: when a move that gains little may be made again.
    """

    residuals: dict[int, float] = field(default_factory=dict[int, float])
    predicted: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    little_moves: Backoff = field(default_factory=Backoff)
    launch_bound: LaunchBoundPlacement = field(default_factory=LaunchBoundPlacement)


class PlacementController:
    """Solves for the number of GPU layers and has layers moved there."""

    def __init__(
        self,
        layers: Sequence[LayerState],
        mover: LayerMover,
        solver: SolverConfig,
        first: Decision,
        *,
        solves: bool,
    ) -> None:
        """
        Args:
            layers: all layers in forward order, the first of them GPU-placed.
            first: the decision by which they are placed now, with their sizes.
            solves: whether it decides by itself, or a user or a plan does.
        """
        self.moves = LayerMoves(layers, mover)
        self._refused = RefusedMemory(len(layers))
        self._workload = _Workload()
        self.streams = any(layer.is_streamed for layer in first.layer_bytes)
        """Whether state of layers on the host is streamed to updates on the GPU."""
        self._staging_bytes = first.staging_bytes
        self._beside_whole = first.staging_bytes + first.save_bytes
        """Host bytes beside the state, if master weights that could be split are whole."""
        self._least_here = first.bounds.min_gpu_layers
        """The fewest layers on the GPU with which the others fitted on the host when memory was
        last checked."""
        self._solver = solver
        self.solves = solves
        self.decisions: list[Decision] = [first]
        self._warned = False

    def see_other_workload(self) -> None:
        """Forgets what was measured: the workload is another one."""
        self._workload = _Workload()

    @property
    def num_gpu_layers(self) -> int:
        """GPU-placed layers, always the first ones."""
        return self.moves.num_gpu_layers

    @property
    def layer_bytes(self) -> tuple[LayerBytes, ...]:
        """The layers' sizes, as the last decision has them."""
        return self.decisions[-1].layer_bytes

    # -- deciding ------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether to solve at this step: not while layers move, since times then mislead."""
        return self.solves and step % self._solver.interval == 0 and self.moves.is_settled

    def add_step(self, seconds: float) -> None:
        """Adds the time of a step at the present placement; to be called only when settled."""
        self._workload.launch_bound.add_step(self.num_gpu_layers, seconds)

    def consider(
        self,
        step: int,
        estimate: Callable[[], StepCosts | None],
        limits: MemoryLimits,
        *,
        seconds: float | None = None,
        num_steps: int = MANY_STEPS,
        launch_bound: bool = False,
    ) -> None:
        """Decides anew; sets ``target``.

        Args:
            estimate: returns what the last steps took, layer by layer. It takes the host as long as
                many launches, and is not called once launch-bound steps have settled.
            seconds: what these steps took in all; None: as predicted from the estimate.
            num_steps: how many measured steps both are medians of.
            launch_bound: whether the GPU waits for the host to launch its kernels.
        """
        allowed, here = self._allowed(step, limits), self.num_gpu_layers
        is_known, is_certain = self.decisions[-1].costs is not None, num_steps >= MANY_STEPS
        self._see_launches(
            step, launch_bound, is_certain=is_certain and here == allowed.max_gpu_layers
        )
        compared = self._workload.launch_bound
        if is_known and compared.is_settled and compared.choose(here, allowed, here) == here:
            return  # the GPU waits for the host's launches: the less the host does, the better
        costs = estimate()
        if costs is None:
            return
        costs = self.with_late(costs, limits)
        room = partial(gradient_room, self.layer_bytes, limits)
        if seconds is not None:
            # Some costs show a change sooner than steps do: the medians of both are compared.
            predicted = predict(costs, gpu_layers=[here], room=room)
            self._workload.predicted.append(predicted.step_seconds[0])
            measured = median(list(self._workload.predicted)[-num_steps:])
            self._workload.residuals[here] = seconds - measured
        method = self._solver.method
        solution = solve(
            costs,
            method,
            allowed,
            alpha=self._solver.alpha,
            residuals=self._workload.residuals if method == "pipeline" else None,
            room=room,
        )
        number, reason = self._choose(step, solution, is_certain=is_certain)
        # If nothing moves, the first such decision logs why.
        if number != here or not is_known or self._has_other_room(step, costs, allowed):
            self.decide(
                step,
                number,
                reason,
                predicted_seconds=solution.predictions[number].step_seconds,
                closed_form_k=solution.closed_form_k,
                bounds=allowed,
                costs=costs,
                limits=limits,
                corrections=solution.corrections,
            )

    def with_late(self, costs: StepCosts, limits: MemoryLimits) -> StepCosts:
        """Adds to the costs which layers would be updated late, by the host's room."""
        first = first_late_layers(self.layer_bytes, limits, self._beside_whole)
        return replace(costs, late_from=tuple(first)) if first else costs

    def _has_other_room(self, step: int, costs: StepCosts, allowed: Bounds) -> bool:
        """Whether the host lacks room for its whole master weights, or has room for many more."""
        if not costs.late_from or not self._refused.allows_forms(step):
            return False
        here, num_layers = self.num_gpu_layers, len(self.layer_bytes)
        late = late_layers(self.layer_bytes, here)
        more = num_layers - costs.first_late(here) - late
        return more > 0 or -more >= allowed.notable_layers

    def _choose(self, step: int, solution: Solution, *, is_certain: bool) -> tuple[int, str]:
        """The number to move to, and why."""
        here, solved = self.num_gpu_layers, solution.gpu_layers
        if self._solver.method == "closed_form":
            # It reproduces the published system and is followed as it is.
            return solved, solution.reason
        if self._workload.launch_bound.is_seen:
            number = self._workload.launch_bound.choose(here, solution.bounds, solved)
            if number is not None:
                return number, self._words_of_launch_bound(number)
        if self._is_worth_moving(step, solution, is_certain=is_certain):
            return solved, solution.reason
        if solved == here:
            return here, solution.reason
        layers = counted(len(self.layer_bytes), "layer")
        stay = f"no change: {solved} of {layers} on the GPU would save"
        return here, f"{stay} too little; {solution.reason}"

    def _see_launches(self, step: int, launch_bound: bool, *, is_certain: bool) -> None:
        """Notes whether steps are launch-bound, which shows only with few updates on the CPU."""
        if launch_bound or not is_certain:
            self._workload.launch_bound.is_seen |= launch_bound
        elif self._workload.launch_bound.is_seen and self._workload.little_moves.is_over(step):
            self._workload.launch_bound = LaunchBoundPlacement()
            self._workload.little_moves.fail(step)

    def _is_worth_moving(self, step: int, solution: Solution, *, is_certain: bool) -> bool:
        here = self.num_gpu_layers
        if not is_certain:
            return worth_moving(solution, here, least_gain=STEP_CHANGE)
        if worth_moving(solution, here, least_gain=LITTLE_GAIN):
            return True
        moves = self._workload.little_moves.is_over(step) and worth_moving(solution, here)
        if moves:
            # Noise, and other load on the host, let it see small gains without end.
            self._workload.little_moves.fail(step)
        return moves

    def _words_of_launch_bound(self, number: int) -> str:
        num_layers = len(self.layer_bytes)
        reason = (
            "launch-bound: the GPU waits for the host to launch kernels, which updates on the CPU "
            f"slow down; {number} of {num_layers} layers to the GPU"
        )
        if not self._workload.launch_bound.is_settled:
            return f"{reason}, to compare the solver's choice with all that fit"
        return reason if number == num_layers else f"{reason}, as many as fit"

    def consider_idle(self, step: int, limits: MemoryLimits, reason: str) -> None:
        """Decides for a rank whose GPU has time for every update, or makes them in any case.

        Sets ``target`` to the most layers that fit there: the host's cores and memory bandwidth are
        left to ranks that need them, and a step waits for no update on this rank's CPU.

        ``reason``: why all layers that fit are to be there.
        """
        allowed, here = self._allowed(step, limits), self.num_gpu_layers
        most = allowed.max_gpu_layers
        if most == here or (most > here and not self._workload.little_moves.is_over(step)):
            return
        if most < here:
            self._workload.little_moves.fail(step)  # others have taken memory: no moves to and fro
        self.decide(
            step,
            most,
            f"{reason}, {most} of {len(self.layer_bytes)} layers",
            bounds=allowed,
            limits=limits,
            costs=None,
            closed_form_k=None,
        )

    def _fitting(self, step: int, limits: MemoryLimits) -> Bounds:
        """The bounds as far as they are known, without what has lately turned out not to fit."""
        fitting = bounds(self.layer_bytes, limits, self._staging_bytes)
        fitting = self._refused.within(fitting, step)
        self._least_here = fitting.min_gpu_layers
        return fitting

    def _allowed(self, step: int, limits: MemoryLimits) -> Bounds:
        """The bounds of :meth:`_fitting`, or only the present placement if nothing fits."""
        allowed = self._fitting(step, limits)
        if allowed.fits:
            return allowed
        # Both sides are full. The present placement works; the host would not hold more.
        here = self.num_gpu_layers
        if not self._warned:
            self._warned = True
            logger.warning(
                "neither side has the memory that its reserve asks for: the host wants at least %d "
                "layers on the GPU, the GPU has memory for %d; training goes on with %d. "
                "Activation checkpointing, a smaller micro-batch or smaller reserves "
                '("hytrain.solver.gpu_memory_reserve_bytes", "host_memory_reserve_bytes") help',
                allowed.min_gpu_layers,
                allowed.max_gpu_layers,
                here,
            )
        return Bounds(allowed.num_layers, here, here)

    def decide(self, step: int, gpu_layers: int, reason: str, **found: Any) -> None:
        """Sets the target; ``found``: fields of the decision that differ from the last one's."""
        last, other = self.decisions[-1], {"decider": "training", "corrections": ()}
        other |= {"predicted_seconds": None, "measured_seconds": None}
        limits = found.get("limits", last.limits)
        layers = self._to_be_kept(step, limits, gpu_layers)
        other |= {"layer_bytes": layers, "host_master_reason": master_words(layers, gpu_layers)}
        decision = replace(
            last,
            step=step,
            gpu_layers_before=self.num_gpu_layers,
            gpu_layers_target=gpu_layers,
            reason=reason,
            **(other | found),
        )
        self.decisions.append(decision)
        self.moves.set_target(gpu_layers, layers)
        logger.info(
            "step %d: %d -> %d GPU layers: %s",
            decision.step,
            decision.gpu_layers_before,
            decision.gpu_layers_target,
            decision.reason,
        )
        if limits.gpu is not None and gpu_layers > decision.gpu_layers_before:
            counts = (gpu_layers, decision.gpu_layers_before)
            planned, before = (gpu_peak_bytes(layers, limits, count) for count in counts)
            advise_on_gaps(planned, limits.gpu, before)

    def _to_be_kept(
        self, step: int, limits: MemoryLimits, gpu_layers: int
    ) -> tuple[LayerBytes, ...]:
        """The layers, with master weights on the CPU whole as far as there is room."""
        layers = as_kept(self.layer_bytes, limits, self._beside_whole, gpu_layers)
        if self._refused.allows_forms(step):
            return layers
        return tuple(
            replace(planned, host_master=layer.form.host_master)
            if layer.placement == "cpu"
            else planned
            for layer, planned in zip(self.moves.layers, layers, strict=True)
        )

    def resume(self, step: int, history: Sequence[Decision]) -> None:
        """Continues the decisions of an earlier run.

        If the earlier run had the same layers and the same GPU memory, this one starts where
        that ended; its first solve comes when its own times are known.
        """
        mine = [replace(decision, step=step) for decision in self.decisions[-1:]]
        self.decisions = [*history, *mine]
        # Nothing is known of other placements, and everything may be tried.
        self._refused, self._workload = RefusedMemory(len(self.layer_bytes)), _Workload()
        if self.solves and history and self._is_comparable(history[-1]):
            last = self._allowed(step, mine[0].limits).clamp(history[-1].gpu_layers_target)
            if last != self.num_gpu_layers:
                self.decide(step, last, f"resumed: {last} layers were on the GPU before")

    def _is_comparable(self, earlier: Decision) -> bool:
        now = self.decisions[-1]
        if all_split(earlier.layer_bytes) != all_split(now.layer_bytes):
            return False
        if earlier.limits.gpu is None or now.limits.gpu is None:
            return earlier.limits.gpu is now.limits.gpu
        return earlier.limits.gpu <= now.limits.gpu * _SAME_MEMORY

    def measured(self, seconds: float) -> None:
        """Notes the step's seconds with the last decision, once that is carried out."""
        if self.decisions[-1].measured_seconds is None:
            self.decisions[-1] = replace(self.decisions[-1], measured_seconds=seconds)

    # -- carrying out --------------------------------------------------------------------------

    def apply_moves(self, step: int, *, at_once: bool = False) -> None:
        """Moves layers towards the target; called between two steps.

        ``at_once``: all of them, not only a few.
        """
        if self.moves.apply(partial(self._see_missing, step), at_once=at_once):
            self._workload.predicted.clear()

    def _see_missing(self, step: int, missing: MissingMemory) -> None:
        """Sets another target for a while, since a layer could not be moved."""
        here, reason = self.num_gpu_layers, missing.reason
        if missing.what == "gpu":
            # The allocator could not even serve this: the next forward needs some slack.
            num_bytes = self.layer_bytes[missing.layer.index].state_bytes
            self._refuse_more(step, 1, f"{reason} ({num_bytes} bytes): stepping back")
            return
        if missing.what == "host":
            again = self._refused.refuse_fewer_than(here, step)
            reason += f": it stays on the GPU; fewer than {here} layers there are not tried again "
            reason += f"before step {again}"
            self.decide(step, here, reason)
        else:
            again = self._refused.refuse_forms(step)
            reason += f": master weights on the CPU stay as they are until step {again}"
            self.decide(step, self.moves.target, reason)
        logger.warning("%s", reason)

    def retreat(self, step: int, limits: MemoryLimits) -> bool:
        """Moves some layers off the GPU at once, as an allocation of the user's found no memory.

        Returns:
            Whether any could be moved: the host must have memory for them.
        """
        here = self.num_gpu_layers
        self._fitting(step, limits)  # what the host holds now
        if self._fewer(self.moves.per_step) == here:
            return False
        reason = "the GPU had no memory for an allocation of the model's"
        self._refuse_more(step, self.moves.per_step, reason)
        self.apply_moves(step, at_once=True)
        return self.num_gpu_layers < here

    def _fewer(self, layers: int) -> int:
        """The number of GPU layers with ``layers`` fewer than now, as far as the host has room."""
        here = self.num_gpu_layers
        return max(here - layers, min(here, self._least_here), 0)

    def _refuse_more(self, step: int, layers: int, reason: str) -> None:
        """Has ``layers`` layers leave the GPU, which has no memory for them."""
        fewer = self._fewer(layers)
        again = self._refused.refuse_more_than(fewer, step)
        self.decide(
            step,
            fewer,
            f"{reason}; more than {fewer} layers are not tried again before step {again}",
        )
        logger.warning("%s", self.decisions[-1].reason)
