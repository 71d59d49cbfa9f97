"""The optimizer that DeepSpeed's engine talks to.

It holds no algorithm of its own: gradients come from the collector, updates run in the pipeline,
the norm decides; this class keeps the order of a step. What DeepSpeed reads is its base class's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

import torch

from hytrain.engine.kept_state import KeptState
from hytrain.engine.plan_watch import RankState
from hytrain.errors import ConfigError, UnsupportedError
from hytrain.kernels.norm import Outcome
from hytrain.optimizer.statistics import StatisticsRecorder, StepStatistics


class HyTrainZeroOptimizer(KeptState):
    """ZeRO-1/2/3 with overlapped, exact CPU and GPU updates."""

    overflow = False
    """Whether the last step was skipped."""
    _global_grad_norm: float | torch.Tensor | None = None

    @cached_property
    def statistics(self) -> StatisticsRecorder:
        """What the steps have taken."""
        return StatisticsRecorder()

    # -- step ----------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Makes the update of all gradients since the last step final, or skips it.

        Sets ``overflow`` where it was skipped, also since :meth:`zero_grad` left nothing. Returns
        while updates are still running; each layer's next forward waits for that layer.

        Raises:
            AbortedBackwardError: the last backward ended with an exception.
            UnsupportedError: a closure is given, or parameter groups are not those that the engine
                was built with, or ask for what the kernels do not have; nothing was changed.
            WorkerError: the update worker failed.
        """
        if closure is not None:
            raise UnsupportedError(
                "step(closure) is not supported: call engine.backward, then step"
            )
        self._check_open()
        self.refuse_aborted()
        self._groups.check(self.param_groups)
        if self._was_dropped:
            self._skip_dropped()
            return
        if not self._step_begun:
            self._begin_step()
        if not self.collector.open and not self._was_reduced:
            # No backward on this rank: it takes part in the others' collectives with zeros.
            self.pipeline.wait_all()
            self._meet_in_backward()
            self.collector.begin(early=False)
        self.collector.complete(consume=True)
        self._send_held()
        self.collectives.meet("the end of a step")
        self.pipeline.launch_outcome()
        self.placement.end_backward(self.collector.num_firings)
        self.weights.forget()
        outcome = self.pipeline.finish_step(self._read_hyper())
        self._step_begun = False
        self._was_reduced = False
        self.has_gradients = False
        self._record(outcome)
        if not self.settings.overlap_forward:
            self.synchronize()

    def _skip_dropped(self) -> None:
        """There is nothing to update with, on any rank."""
        self._was_dropped = False
        self.overflow = True
        self._global_grad_norm = 0.0
        vars(self.optimizer)["_opt_called"] = True

    def _send_held(self) -> None:
        """Layers whose gradient was reduced by an earlier backward, or withdrawn since."""
        for gradient in self.collector.layers:
            state = self.pipeline.layers[gradient.layout.index]
            if not state.sent:
                held, gradient.held = gradient.held, None
                assert held is not None
                with self.pipeline.reducing():
                    self._send(state, held)

    def _record(self, outcome: Outcome | None) -> None:
        self.overflow = outcome is not None and outcome.skip
        # torch's schedulers look for it: the basic optimizer's own step is never called.
        vars(self.optimizer)["_opt_called"] = True
        if not self.overflow:
            self.steps = [step + 1 for step in self.steps]
        self._global_grad_norm = (
            self.pipeline.norm.norm_tensor() if outcome is None else outcome.norm
        )
        worker = self.statistics.record(
            self.pipeline,
            outcome,
            step=max(self.steps, default=0),
            gpu_fraction=self.pipeline.num_gpu_layers / len(self.pipeline.layers),
        )
        self.placement.end_step(outcome, worker)

    def set_gpu_fraction(self, value: float | Literal["solve"]) -> None:
        """Places layers by hand, between two steps; see :class:`PlacementManager`.

        Raises:
            ConfigError: a step is under way, or the number is not in [0, 1] or does not fit.
        """
        self._check_open()
        if self._step_begun or any(state.sent for state in self.pipeline.layers):
            raise ConfigError("layers are re-placed between steps only: call this after step()")
        self.placement.set_gpu_fraction(value)

    def make_gpu_room(self) -> str:
        """The user's forward found no room on the device: state moves to the host, if it may.

        Returns:
            What was done and what can be done, for people.
        """
        may_move = not self._step_begun and not any(s.sent for s in self.pipeline.layers)
        return self.placement.make_gpu_room(may_move=may_move)

    def step_statistics(self) -> StepStatistics:
        """What the last step took; see :class:`~hytrain.optimizer.statistics.StepStatistics`."""
        return self.statistics.latest()

    def rank_state(self, activation_bytes: int) -> RankState:
        """This rank after its last step, for :class:`~hytrain.engine.plan_watch.PlanWatch`.

        Args:
            activation_bytes: that activations have taken of the host's memory.
        """
        controller = self.placement.controller
        latest = self.statistics.latest()
        # None where updates are committed directly: nothing is clipped then.
        coefficient = latest.clip_coefficient
        return RankState(
            step_seconds=latest.step_seconds,
            is_clipped=coefficient is not None and coefficient < 1.0 and not latest.skipped,
            host_bytes=self.placement.host_bytes + self.weights.host_bytes + activation_bytes,
            gpu_layers=controller.num_gpu_layers,
            num_layers=len(self.pipeline.layers),
            is_settled=not controller.is_moving,
        )

    # -- end -----------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Stops the worker, frees pinned memory, detaches from the model. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self.collector.remove_hooks()
        self.collector.discard()
        self.weights.forget()
        self.pipeline.close()
        self.weights.close()
        self.collectives.close()
