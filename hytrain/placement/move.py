"""Carries placement decisions out: which layer's state moves when, and what if it does not fit.

The controller keeps the last decision, moves a few layers a step towards it, and steps back where
a side turns out to have not enough memory. Where master weights are split, those of a layer on the
CPU become whole, or split again, by a move to the GPU and back.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

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
    master_words,
)
from hytrain.placement.records import Decision

logger = logging.getLogger(__name__)

SETTLED_STEPS = 4
"""Steps after the last move whose times are taken for those of the new placement: the marks of a
step are read one step later, and the first ones fill the allocator's caches."""
_SAME_MEMORY = 1.02
"""A GPU counts as large as another that has at most this much more memory: drivers differ."""


class PlacementController:
    """Solves for the number of GPU layers and moves layers there."""

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
            first: the decision that they are placed by now, with their sizes.
            solves: whether it decides by itself, or a user or a plan does.
        """
        self._layers = list(layers)
        self.streams = any(layer.is_streamed for layer in first.layer_bytes)
        """Whether state of layers on the host is streamed to updates on the GPU."""
        self._staging_bytes = first.staging_bytes
        self._beside_whole = first.staging_bytes + first.save_bytes
        """Bytes of the host beside state, where master weights are whole that could be split."""
        self._least_here = first.bounds.min_gpu_layers
        """The fewest layers on the GPU with which the host held the others when memory was last
        looked at."""
        self._mover = mover
        self._solver = solver
        self.solves = solves
        self.decisions: list[Decision] = [first]
        self.target = self.num_gpu_layers
        self._changing_form: list[LayerState] = []
        """Layers on the CPU whose master weights are to be whole, or split, and are not yet."""
        self._settled_steps = 0
        # Moves make the worker late: an eighth of the layers a step keeps a hiccup short.
        self._moves_a_step = max(1, -(-len(self._layers) // 8))
        self._warned = False
        self._forget()

    def _forget(self) -> None:
        """Nothing is known of other placements, and everything may be tried."""
        self._most, self._no_gpu_memory = len(self._layers), Backoff()
        self._fewest, self._no_host_memory = 0, Backoff()
        self._no_memory_for_forms = Backoff()
        self.see_other_workload()

    def see_other_workload(self) -> None:
        """The workload is another one: what was measured for the last one tells nothing."""
        self._residuals: dict[int, float] = {}
        self._predicted: deque[float] = deque(maxlen=WINDOW)  # steps at the present placement
        self._little_moves = Backoff()
        self._launch_bound = LaunchBoundPlacement()

    @property
    def num_gpu_layers(self) -> int:
        """GPU-placed layers, always the first ones."""
        return [layer.placement for layer in self._layers].count("gpu")

    @property
    def layer_bytes(self) -> tuple[LayerBytes, ...]:
        """The layers' sizes, as the last decision has them."""
        return self.decisions[-1].layer_bytes

    @property
    def is_moving(self) -> bool:
        """Whether layers are on their way."""
        return self.target != self.num_gpu_layers or bool(self._changing_form)

    # -- deciding ------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether to solve at this step: not while layers move, since times then mislead."""
        return self.solves and step % self._solver.interval == 0 and self.is_settled

    @property
    def is_settled(self) -> bool:
        """No layer has moved for long enough that times are those of this placement."""
        return self._settled_steps >= SETTLED_STEPS and not self.is_moving

    def add_step(self, seconds: float) -> None:
        """A step of the present placement took so long; call it only when settled."""
        self._launch_bound.add_step(self.num_gpu_layers, seconds)

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
            estimate: gives what the last steps took, layer by layer; where launch-bound steps have
                settled it is not called, which would take the host as long as many launches.
            seconds: what these steps took in all; None: as predicted from the estimate.
            num_steps: measured steps that both are medians of.
            launch_bound: the GPU waits for the host to launch its kernels.
        """
        allowed, here = self._allowed(step, limits), self.num_gpu_layers
        is_known, is_certain = self.decisions[-1].costs is not None, num_steps >= MANY_STEPS
        self._see_launches(
            step, launch_bound, is_certain=is_certain and here == allowed.max_gpu_layers
        )
        compared = self._launch_bound
        if is_known and compared.is_settled and compared.choose(here, allowed, here) == here:
            return  # the GPU waits for the host's launches: the less the host does the better
        costs = estimate()
        if costs is None:
            return
        costs = self.with_late(costs, limits)
        room = partial(gradient_room, self.layer_bytes, limits)
        if seconds is not None:
            # Some costs are known sooner than steps that show a change: of both it is the median.
            predicted = predict(costs, gpu_layers=[here], room=room)
            self._predicted.append(predicted.step_seconds[0])
            self._residuals[here] = seconds - median(list(self._predicted)[-num_steps:])
        method = self._solver.method
        solution = solve(
            costs,
            method,
            allowed,
            alpha=self._solver.alpha,
            residuals=self._residuals if method == "pipeline" else None,
            room=room,
        )
        number, reason = self._choose(step, solution, is_certain=is_certain)
        # Warns once why nothing moves.
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
        """The same with the layers that would be updated late, by what the host has room for."""
        first = first_late_layers(self.layer_bytes, limits, self._beside_whole)
        return replace(costs, late_from=tuple(first)) if first else costs

    def _has_other_room(self, step: int, costs: StepCosts, allowed: Bounds) -> bool:
        """Whether the host has no room for all whole master weights on it, or for many more."""
        if not costs.late_from or not self._no_memory_for_forms.is_over(step):
            return False
        here, num_layers = self.num_gpu_layers, len(self._layers)
        late = late_layers(self.layer_bytes, here)
        more = num_layers - costs.first_late(here) - late
        return more > 0 or -more >= allowed.notable_layers

    def _choose(self, step: int, solution: Solution, *, is_certain: bool) -> tuple[int, str]:
        """The number to move to, and why."""
        here, solved = self.num_gpu_layers, solution.gpu_layers
        if self._solver.method == "closed_form":
            # It is there to reproduce the published system: it is followed as it is.
            return solved, solution.reason
        if self._launch_bound.is_seen:
            number = self._launch_bound.choose(here, solution.bounds, solved)
            if number is not None:
                return number, self._words_of_launch_bound(number)
        if self._is_worth_moving(step, solution, is_certain=is_certain):
            return solved, solution.reason
        if solved == here:
            return here, solution.reason
        stay = f"no change: {solved} of {counted(len(self._layers), 'layer')} on the GPU would save"
        return here, f"{stay} too little; {solution.reason}"

    def _see_launches(self, step: int, launch_bound: bool, *, is_certain: bool) -> None:
        """Whether this workload's steps are launch-bound, which only shows with few CPU updates."""
        if launch_bound or not is_certain:
            self._launch_bound.is_seen |= launch_bound
        elif self._launch_bound.is_seen and self._little_moves.is_over(step):
            self._launch_bound = LaunchBoundPlacement()
            self._little_moves.fail(step)

    def _is_worth_moving(self, step: int, solution: Solution, *, is_certain: bool) -> bool:
        here = self.num_gpu_layers
        if not is_certain:
            return worth_moving(solution, here, least_gain=STEP_CHANGE)
        if worth_moving(solution, here, least_gain=LITTLE_GAIN):
            return True
        moves = self._little_moves.is_over(step) and worth_moving(solution, here)
        if moves:
            # Noise, and what else runs on the host, make it small gains without end.
            self._little_moves.fail(step)
        return moves

    def _words_of_launch_bound(self, number: int) -> str:
        num_layers = len(self._layers)
        reason = (
            "launch-bound: the GPU waits for the host to launch kernels, which updates on the CPU "
            f"slow down; {number} of {num_layers} layers to the GPU"
        )
        if not self._launch_bound.is_settled:
            return f"{reason}, to compare the solver's choice with all that fit"
        return reason if number == num_layers else f"{reason}, as many as fit"

    def consider_idle(self, step: int, limits: MemoryLimits, reason: str) -> None:
        """Decides for a rank whose GPU has time for every update, or makes them anyway.

        Sets ``target`` to the most layers that fit there: the host's cores and memory bandwidth are
        left to ranks that need them, and a step waits for no update on this rank's CPU.

        ``reason``: why all that fits is to be there.
        """
        allowed, here = self._allowed(step, limits), self.num_gpu_layers
        most = allowed.max_gpu_layers
        if most == here or (most > here and not self._little_moves.is_over(step)):
            return
        if most < here:
            self._little_moves.fail(step)  # others have taken memory there: not to and fro
        self.decide(
            step,
            most,
            f"{reason}, {most} of {len(self._layers)} layers",
            bounds=allowed,
            limits=limits,
            costs=None,
            closed_form_k=None,
        )

    def _fitting(self, step: int, limits: MemoryLimits) -> Bounds:
        """What fits, as far as is known, and has not turned out not to."""
        fitting = bounds(self.layer_bytes, limits, self._staging_bytes)
        if not self._no_gpu_memory.is_over(step):
            most = min(fitting.max_gpu_layers, self._most)
            fitting = replace(fitting, max_gpu_layers=most)
        if not self._no_host_memory.is_over(step):
            fewest = max(fitting.min_gpu_layers, self._fewest)
            fitting = replace(fitting, min_gpu_layers=fewest)
        self._least_here = fitting.min_gpu_layers
        return fitting

    def _allowed(self, step: int, limits: MemoryLimits) -> Bounds:
        """The same, or the placement at hand alone where nothing fits."""
        allowed = self._fitting(step, limits)
        if allowed.fits:
            return allowed
        # Both sides are full. The placement at hand works as it is; the host would not hold more.
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
        """Sets the target; ``found`` are other fields of the decision than those of the last."""
        self.target = gpu_layers
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
        self._changing_form = [
            layer
            for layer, planned in zip(self._layers, layers, strict=True)
            if layer.placement == "cpu" and layer.index >= gpu_layers
            if layer.form.host_master != planned.host_master
        ]
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
        if self._no_memory_for_forms.is_over(step):
            return layers
        return tuple(
            replace(planned, host_master=layer.form.host_master)
            if layer.placement == "cpu"
            else planned
            for layer, planned in zip(self._layers, layers, strict=True)
        )

    def resume(self, step: int, history: Sequence[Decision]) -> None:
        """The decisions of this run follow on those of an earlier one.

        Where the earlier run had the same layers and the same GPU memory, this one starts where
        that ended; its first solve comes when its own times are known.
        """
        mine = [replace(decision, step=step) for decision in self.decisions[-1:]]
        self.decisions = [*history, *mine]
        self._forget()
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
        """What the step takes with the last decision, once it is carried out."""
        if self.decisions[-1].measured_seconds is None:
            self.decisions[-1] = replace(self.decisions[-1], measured_seconds=seconds)

    # -- carrying out --------------------------------------------------------------------------

    def apply_moves(self, step: int, *, at_once: bool = False) -> None:
        """Moves layers towards the target; called between two steps.

        ``at_once``: all of them, not only a few.
        """
        self._settled_steps += 1
        moves = 2 * len(self._layers) if at_once else self._moves_a_step
        while moves and self.is_moving:
            self._settled_steps = 0
            self._predicted.clear()
            moves -= 1
            here = self.num_gpu_layers
            if here >= self.target and self._changing_form:
                # Before layers come to the host, for which it makes room.
                self._change_form(self._changing_form.pop(0), step)
                continue
            try:
                if here < self.target:
                    self._mover.to_gpu(self._layers[here])
                else:
                    self._to_cpu(self._layers[here - 1])
            except (torch.OutOfMemoryError, MemoryError) as error:
                if here < self.target:
                    self._step_back(self._layers[here], step)
                else:
                    self._stay(self._layers[here - 1], step, error)
                return
        self._mover.release()

    def _to_cpu(self, layer: LayerState) -> None:
        master = self.layer_bytes[layer.index].host_master
        layer.form = replace(layer.form, host_master=master)
        self._mover.to_cpu(layer)

    def _change_form(self, layer: LayerState, step: int) -> None:
        """Has a layer's master weights whole on the CPU, or split, as was decided.

        Raises:
            HostMemoryError: the host has not even the memory any more that the layer had there.
        """
        before = layer.form.host_master
        try:
            self._mover.to_gpu(layer)
        except (torch.OutOfMemoryError, MemoryError):
            self._keep_forms(step, f"the GPU had no memory for the state of layer '{layer.name}'")
            return
        try:
            self._to_cpu(layer)
        except MemoryError as error:
            layer.form = replace(layer.form, host_master=before)
            self._mover.to_cpu(layer)
            self._keep_forms(step, f"the host had no memory for layer '{layer.name}' ({error})")

    def _keep_forms(self, step: int, reason: str) -> None:
        """No other layer's master weights become whole, or split, for now."""
        again = self._no_memory_for_forms.fail(step)
        reason += f": master weights on the CPU stay as they are until step {again}"
        self.decide(step, self.target, reason)
        logger.warning("%s", self.decisions[-1].reason)

    def _step_back(self, layer: LayerState, step: int) -> None:
        """There was no memory for a layer's state: it and one more stay on the host."""
        # The allocator could not even serve this: the next forward needs some slack.
        self._refuse_more(
            step,
            1,
            f"the GPU had no memory for the state of layer '{layer.name}' "
            f"({self.layer_bytes[layer.index].state_bytes} bytes): stepping back",
        )

    def retreat(self, step: int, limits: MemoryLimits) -> bool:
        """The user's own allocation found no memory on the GPU: some layers leave it, at once.

        Returns:
            Whether any could: the host must have memory for them.
        """
        here = self.num_gpu_layers
        self._fitting(step, limits)  # what the host holds now
        if self._fewer(self._moves_a_step) == here:
            return False
        reason = "the GPU had no memory for an allocation of the model's"
        self._refuse_more(step, self._moves_a_step, reason)
        self.apply_moves(step, at_once=True)
        return self.num_gpu_layers < here

    def _fewer(self, layers: int) -> int:
        """So many GPU layers less than now, as far as the host holds them."""
        here = self.num_gpu_layers
        return max(here - layers, min(here, self._least_here), 0)

    def _refuse_more(self, step: int, layers: int, reason: str) -> None:
        """So many layers leave the GPU, which has no memory for them."""
        self._most = self._fewer(layers)
        again = self._no_gpu_memory.fail(step)
        self.decide(
            step,
            self._most,
            f"{reason}; more than {self._most} layers are not tried again before step {again}",
        )
        logger.warning("%s", self.decisions[-1].reason)

    def _stay(self, layer: LayerState, step: int, error: BaseException) -> None:
        """The host had no memory for a layer's state: it stays on the GPU."""
        self._fewest = here = self.num_gpu_layers
        again = self._no_host_memory.fail(step)
        self._no_memory_for_forms.fail(step)
        self.decide(
            step,
            here,
            f"the host had no memory for the state of layer '{layer.name}' ({error}): it stays on "
            f"the GPU; fewer than {here} layers there are not tried again before step {again}",
        )
        logger.warning("%s", self.decisions[-1].reason)
