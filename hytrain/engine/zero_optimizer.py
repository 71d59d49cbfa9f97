"""The optimizer that DeepSpeed's engine calls: a step's order, and attributes that others read.

It has no algorithm of its own. :class:`PassTracker` follows the passes, its
:class:`GradientCollector` takes gradients over, and updates run in the pipeline; :class:`KeptState`
has what outlives a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.engine.deepspeed_internals import ZeROOptimizer
from hytrain.engine.full_collections import FullCollections
from hytrain.engine.parameter_attributes import ParameterOffload
from hytrain.engine.plan_watch import RankMeasured
from hytrain.engine.state_view import OptimizerState
from hytrain.errors import ConfigError, UnsupportedError, UnusedParametersError
from hytrain.kernels.clipping import Outcome
from hytrain.model.layer_state import LayerState
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.optimizer.engine_view import EngineView, StepSettings
from hytrain.optimizer.gradients import GradientCollector
from hytrain.optimizer.hyper import HyperParameters
from hytrain.optimizer.kept_state import KeptState
from hytrain.optimizer.loss_scaling import LossScaler, LossScaling
from hytrain.optimizer.offloaded_states import OffloadedStates, kinds_to_offload
from hytrain.optimizer.pass_tracker import PassTracker
from hytrain.optimizer.state_dict import load_state_dict, state_dict
from hytrain.optimizer.statistics import StatisticsRecorder
from hytrain.placement.manager import PlacementManager
from hytrain.trace.profiler_spans import span
from hytrain.zero3.weight_passes import WeightPasses


class HyTrainZeroOptimizer(ZeROOptimizer):
    """ZeRO-1/2/3 with overlapped, exact CPU and GPU updates."""

    # Attributes that DeepSpeed's engine reads from a ZeRO optimizer.
    torch_autocast_gradscaler = None
    overflow = False
    """Whether the last step was skipped."""
    _global_grad_norm: float | torch.Tensor | None = None
    parameter_offload: ParameterOffload
    """Set under ZeRO-3 only: libraries recognize ZeRO-3 by it."""

    def __init__(
        self,
        hyper: HyperParameters,
        pipeline: UpdatePipeline,
        collectives: ShardCollectives,
        settings: StepSettings,
        engine: EngineView,
        placement: PlacementManager,
        weights: WeightPasses,
        scaling: LossScaling,
        parameters: Iterable[torch.nn.Parameter],
    ) -> None:
        super().__init__()
        self.optimizer = hyper.optimizer
        self.pipeline = pipeline
        self.collectives = collectives
        self.settings = settings
        self.placement = placement
        self.weights = weights
        self.scaling = scaling
        self.statistics = StatisticsRecorder()
        self.passes = PassTracker(
            pipeline, collectives, hyper, settings, engine, placement, weights, self, scaling
        )
        self.kept = KeptState(self.passes, hyper)
        self._state = OptimizerState(self.kept)
        self.before_close: list[Callable[[], None]] = []
        """Called by :meth:`destroy` before anything is closed; last one first."""
        self._hyper = hyper
        self.offloaded = OffloadedStates(self.kept, self.passes, parameters)
        self.before_close.append(self.offloaded.close)
        self._full_collections = FullCollections(collectives)
        self.before_close.append(self._full_collections.close)

    # -- the passes, as DeepSpeed's engine reports them ------------------------------------------

    def backward_prologue(self) -> None:
        """Notes that a backward has begun: the output of the engine's forward gets its gradient."""
        self.passes.backward_prologue()

    def enter_backward(self) -> None:
        """Sets DeepSpeed's mark that a backward runs: once, even if several outputs announce it.

        For two forwards with one loss DeepSpeed would count two backwards and end only one; for two
        forwards and then two backwards it would queue only one end.
        """
        if self._backward_active_depth == 0:
            self._backward_hook_state.post_backward_callback_queued = False
            super().enter_backward()

    def scale_if_loss(self, value: Any) -> Any:
        """Returns the loss, times the loss scale if there is one."""
        return self.scaling.apply(value)

    def needs_scaler(self) -> bool:
        """Whether DeepSpeed must refuse a plain ``loss.backward()``: also with a static scale."""
        return self.scaling.is_used and not self.passes.open_step.for_inputs

    def backward_epilogue(self, **kwargs: Any) -> None:
        """See :meth:`PassTracker.backward_epilogue`."""
        del kwargs
        self.passes.backward_epilogue()

    @property
    def is_backward_marked(self) -> bool:
        """Whether DeepSpeed considers a backward to be running."""
        # Read at every use of weights: not by DeepSpeed's own name for it, a second property.
        return self._backward_hook_state.backward_active_depth > 0

    def clear_backward_marks(self) -> None:
        """Resets DeepSpeed's depth and callback: an aborted backward's would be the next one's."""
        self._backward_active_depth = 0
        self.clear_backward_seen_flag()

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Does nothing: layers are reduced as they become final, the rest in step()."""

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Does nothing, for the same reason."""
        del pipeline_parallel

    def finalize_gradient_accumulation_boundary(self) -> None:
        """Does nothing: step() completes whatever the backward passes left."""

    # -- step ------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """Makes the update of all gradients since the last step final, or skips it.

        Sets ``overflow`` if it was skipped, also because :meth:`zero_grad` left nothing. Returns
        while updates are still running; each layer's next forward waits for that layer.

        Raises:
            AbortedBackwardError: the last backward ended with an exception.
            AbortedStepError: the last step failed midway.
            UnsupportedError: a closure is given, or parameter groups are not those that the engine
                was built with, or ask for what the kernels do not support; nothing was changed.
            WorkerError: the update worker failed.
            UnusedParametersError: a parameter got no gradient and ``ignore_unused_parameters`` is
                false.
            LossScaleError: gradients overflow at the smallest loss scale; the step was skipped.
        """
        if closure is not None:
            raise UnsupportedError(
                "step(closure) is not supported: call engine.backward, then step"
            )
        with span("step"):
            self._step()

    def _step(self) -> None:
        passes, collector = self.passes, self.collector
        passes.check_open()
        passes.refuse_aborted()
        if self.settings.refuse_unused:
            self._refuse_unused()
        if passes.open_step.skip_dropped():
            # There is nothing to update with, on any rank.
            self._record(Outcome(scale=0.0, norm=0.0, coefficient=1.0, skip=True))
            return
        self._run_hooks("pre")
        self._hyper.check()
        passes.written.adopt()  # since the last forward
        if not passes.open_step.begun:
            passes.begin_update()
        step = passes.open_step
        if not step.is_open and collector.has_left:
            passes.begin_backward()  # it bypassed the engine
            passes.end_backward()
        if not step.is_open and not step.backward.reduces:
            # No backward on this rank, or the last one has reduced nothing: the rank takes part in
            # the others' collectives with the gradients it has, or zeros. The wait is that of
            # PassTracker.begin_backward, in the same place among the collectives.
            self.pipeline.wait_all()
            passes.meet_in_backward()
            step.begin_backward(reduces=False)
            collector.begin()
        collector.complete(consume=True)
        passes.reducer.send_held()
        self.collectives.meet("the end of a step", self._hyper.words)
        self.pipeline.launch_outcome()
        self.placement.end_backward(collector.num_firings)
        # Before updates on the device: releasing a layer makes compute, and with it the update
        # stream, wait for its gather. Otherwise a gather could send a half overwritten shard.
        self.weights.forget()
        self._full_collections.backward_launched()
        outcome = self.pipeline.finish_step(self._hyper.read())
        passes.open_step.end()
        self._record(outcome)
        if not self.settings.overlap_forward:
            self.synchronize()
        self.scaling.end_step(overflow=self.overflow)
        if not self.overflow:
            self._run_hooks("post")

    def _run_hooks(self, when: Literal["pre", "post"]) -> None:
        """Runs the step hooks that users registered on the client's optimizer.

        Nothing calls that optimizer's step. "pre" hooks also run before a step that turns out to be
        skipped, which is decided on the device. Hooks see no gradients: these left
        ``parameter.grad`` in backward.
        """
        hooks = getattr(self.optimizer, f"_optimizer_step_{when}_hooks")
        for hook in list(hooks.values()):
            hook(self.optimizer, (), {})

    def _refuse_unused(self) -> None:
        """Raises an UnusedParametersError if a parameter got no gradient, as configured."""
        unused = self.collector.unused()
        if unused:
            raise UnusedParametersError(
                f"{len(unused)} parameters got no gradient in the last backward ({unused[0]}, ...) "
                'and "zero_optimization.ignore_unused_parameters" is false: set it to true, after '
                "which their gradient counts as zero, or use them in the loss"
            )

    def _record(self, outcome: Outcome | None) -> None:
        self.overflow = outcome is not None and outcome.skip
        # torch's schedulers check this flag: the basic optimizer's own step is never called.
        vars(self.optimizer)["_opt_called"] = True
        if not self.overflow:
            self._hyper.count_step()
        if outcome is None:
            self._global_grad_norm = self.pipeline.norm.norm_tensor()
        else:  # inf like DeepSpeed's, not NaN
            self._global_grad_norm = outcome.norm if math.isfinite(outcome.norm) else math.inf
        worker = self.statistics.record(
            self.pipeline,
            outcome,
            step=max(self.steps, default=0),
            gpu_fraction=self.pipeline.num_gpu_layers / len(self.pipeline.layers),
        )
        self.placement.end_step(outcome, worker)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See :meth:`PassTracker.drop_gradients`."""
        del set_to_none
        self.passes.drop_gradients()

    # -- the loss scale, under DeepSpeed's names -------------------------------------------------

    @property
    def loss_scaler(self) -> LossScaler | None:
        """The rule by which the scale moves; None if there is no scale."""
        return self.scaling.scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the scale moves by itself."""
        return self.scaling.scaler is not None and self.scaling.scaler.dynamic

    @property
    def loss_scale(self) -> float:
        """The factor for the next loss."""
        return self.scaling.scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        if self.scaling.scaler is None:
            raise ConfigError(
                f"the loss scale was set to {value:g}, but there is none without fp16: set "
                '"fp16.enabled", or scale losses by optimizer.override_loss_scale(...)'
            )
        self.scaling.scaler.cur_scale = value

    cur_scale = loss_scale

    @property
    def custom_loss_scaler(self) -> bool:
        """Whether the user moves the scale: see :meth:`override_loss_scale`."""
        return self.scaling.external is not None

    @property
    def external_loss_scale(self) -> float | None:
        """The user's scale; None if the user set none."""
        return self.scaling.external

    def override_loss_scale(self, loss_scale: float) -> None:
        """Sets the scale of losses from the next step on, in any precision."""
        self.scaling.external = float(loss_scale)

    # -- placement -------------------------------------------------------------------------------

    def set_gpu_fraction(self, value: float | Literal["solve"]) -> None:
        """Sets the placement, between two steps; see :meth:`HyTrainEngine.set_gpu_fraction`."""
        self.passes.check_open()
        if self.passes.open_step.begun:
            raise ConfigError("layers move between steps only: call this after step()")
        self.placement.set_gpu_fraction(value)

    def free_gpu_memory(self) -> str:
        """Moves state to the host, if possible, after a forward ran out of device memory.

        Returns what was done and what can be done, as text for users.
        """
        return self.placement.free_gpu_memory(
            may_move=not self.passes.open_step.begun,
            where="forward",
            again="this micro-batch's forward, or all of engine.train_batch",
        )

    def free_gpu_memory_after_backward(self) -> str:
        """Like :meth:`free_gpu_memory`, after a backward that ran out of memory; drops its step.

        On several ranks, which wait in that step, or after a commit, which cannot be taken back,
        nothing is dropped or moved.
        """
        if self.collectives.world_size == 1 and not self.pipeline.is_partly_committed:
            self.passes.clean_up_aborted()
        return self.placement.free_gpu_memory(
            may_move=not self.passes.open_step.begun,
            where="backward",
            again="the step from the forward of its first micro-batch",
        )

    # -- parameter groups and state --------------------------------------------------------------

    @property
    def steps(self) -> list[int]:
        """The number of steps that each parameter group has made, without skipped ones."""
        return self._hyper.steps

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The basic optimizer's own list, which schedulers write to.

        Raises:
            UnsupportedError: the list was replaced by groups of other parameters.
        """
        return self._hyper.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self._hyper.groups = groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises an UnsupportedError: the state is laid out and sharded when it is built."""
        del param_group
        raise UnsupportedError(
            "add_param_group was called, but the optimizer's state is laid out when the engine is "
            "built: pass all parameters that will ever be trained, in their groups, to "
            "hytrain.initialize (model_parameters or optimizer), or build a new engine"
        )

    @property
    def state(self) -> OptimizerState:
        """This rank's step and moments by parameter: see :class:`OptimizerState`."""
        return self._state

    @property
    def bit16_groups(self) -> list[list[torch.nn.Parameter]]:
        """The trained parameters of each group, whose shapes DeepSpeed's checkpoints list."""
        trained = {id(slot.parameter) for layer in self.layer_states for slot in layer.layout.slots}
        return [[p for p in group["params"] if id(p) in trained] for group in self.param_groups]

    round_robin_bit16_groups = bit16_groups
    """The name that DeepSpeed looks for first, in every stage."""

    def state_dict(self) -> dict[str, Any]:
        """See :func:`hytrain.optimizer.state_dict.state_dict`."""
        return state_dict(self.kept)

    def load_state_dict(
        self, state_dict_list: Mapping[str, Any] | Sequence[Mapping[str, Any]]
    ) -> None:
        """See :func:`hytrain.optimizer.state_dict.load_state_dict`."""
        load_state_dict(self.kept, state_dict_list)

    def synchronize(self) -> None:
        """See :meth:`KeptState.synchronize`."""
        self.kept.synchronize()

    def flush(self) -> None:
        """See :meth:`KeptState.flush`."""
        self.kept.flush()

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """See :meth:`HyTrainEngine.offload_states`."""
        kinds = kinds_to_offload(include, device)
        self.offloaded.offload(kinds, pin=pin_memory, non_blocking=non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """See :meth:`HyTrainEngine.reload_states`."""
        self.offloaded.reload(non_blocking=non_blocking)

    @property
    def offloaded_states(self) -> set[str]:
        """Names of the states that :meth:`offload_states` has taken off the device."""
        return {kind.value for kind in self.offloaded.kinds}

    # -- parts -----------------------------------------------------------------------------------

    @property
    def layer_states(self) -> list[LayerState]:
        """The layers in forward order."""
        return self.pipeline.layers

    @property
    def collector(self) -> GradientCollector:
        """The part that takes gradients over from autograd."""
        return self.passes.collector

    @property
    def dp_process_group(self) -> Any:
        """The ranks that share the state."""
        return self.collectives.group

    def rank_state(self, activation_bytes: int) -> RankMeasured:
        """Returns this rank's last step in figures; ``activation_bytes``: of host memory."""
        controller = self.placement.controller
        latest = self.statistics.latest()
        # None if updates are committed directly: nothing is clipped then.
        coefficient = latest.clip_coefficient
        is_clipped = coefficient is not None and coefficient < 1.0 and not latest.skipped
        return RankMeasured(
            step_seconds=latest.step_seconds,
            clipped_share=float(is_clipped),
            gpu_bytes=None,  # measured only for a report, as it takes time
            host_bytes=self.placement.host_bytes + self.weights.host_bytes + activation_bytes,
            gpu_layers=controller.num_gpu_layers,
            num_layers=len(self.pipeline.layers),
            is_settled=not controller.moves.is_moving,
        )

    def destroy(self) -> None:
        """Stops the worker, frees pinned memory, detaches from the model. May be called twice."""
        if self.passes.open_step.is_closed:
            return
        while self.before_close:
            self.before_close.pop()()
        self.passes.close()
        self.pipeline.close()
        self.weights.close()
        self.collectives.close()
