"""The engine: DeepSpeed's, with hytrain's optimizer. Its parts are the files beside this one."""

from __future__ import annotations

import logging
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import nn

from hytrain.checkpoint.async_save import AsyncSaver
from hytrain.checkpoint.gather import gather_to_first
from hytrain.checkpoint.reader import LoadRequest
from hytrain.checkpoint.save_contents import collect_module_state, shared_parameters
from hytrain.comm.collectives import ShardCollectives
from hytrain.config import HyTrainConfig
from hytrain.engine.batch_training import BatchTraining
from hytrain.engine.build import build_settings, engine_view
from hytrain.engine.build_optimizer import build_optimizer
from hytrain.engine.checkpoints import EngineCheckpoints
from hytrain.engine.config_checks import make_folder
from hytrain.engine.data_position import count_batches
from hytrain.engine.deepspeed_internals import (
    DeepSpeedEngine,
    HookSnapshot,
    autocast_if_enabled,
    state_group_of_engine,
)
from hytrain.engine.metrics_file import DecisionLog, MetricsFile
from hytrain.engine.parameter_access import StateAccess
from hytrain.engine.parameter_attributes import ParameterAttributes, ParameterOffload
from hytrain.engine.plan_watch import PlanReport, PlanWatch
from hytrain.engine.run_report import RunReport, report_step
from hytrain.engine.sequence_groups import sequence_degree_of
from hytrain.engine.termination import Termination, close_at_exit, finish_save_at_exit, is_failing
from hytrain.engine.tracing import Tracing
from hytrain.engine.training_warnings import StepWarnings, warn_of_factors
from hytrain.engine.weight_handover import WeightHandover
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import ConfigError, EngineClosedError, HyTrainError, NestedReductionError
from hytrain.formats.moment_kinds import SPLIT
from hytrain.formats.plan_file import read_plan
from hytrain.formats.trace_file import PHASE_OPTIMIZER
from hytrain.hardware.host_share import share_host
from hytrain.kernels.host_memory import return_freed
from hytrain.optimizer.global_batch import NumValid, valid_labels
from hytrain.optimizer.layer_guards import LayerGuards
from hytrain.optimizer.loss_scaling import check_graph
from hytrain.optimizer.pass_guide import PassGuide
from hytrain.optimizer.statistics import StepStatistics
from hytrain.placement.peak_memory import PhasePeak
from hytrain.placement.records import Decision
from hytrain.zero3.weight_passes import BUCKET_BYTES

logger = logging.getLogger(__name__)


class HyTrainEngine(DeepSpeedEngine):
    """DeepSpeed's engine with updates that overlap backward and the next forward.

    What DeepSpeed's engine offers works as it does there. Documented here are methods that are new,
    or whose arguments differ.
    """

    hytrain_config: HyTrainConfig
    batch_training: BatchTraining
    """Steps over a global batch; see :meth:`train_batch`."""
    _guards: LayerGuards
    _added_hooks: HookSnapshot
    _checkpoints: EngineCheckpoints
    _tracing: Tracing
    _collectives: ShardCollectives | None = None
    _plan_watch: PlanWatch | None = None
    _saver: AsyncSaver | None = None
    _termination: Termination | None = None
    _run_report: RunReport | None = None
    _metrics: MetricsFile | None = None
    _in_forward = False
    _coalesces = False

    def __init__(self, section: HyTrainConfig, *args: Any, **kwargs: Any) -> None:
        """``section``: the configuration's "hytrain" section, with its plan's decisions."""
        make_folder("hytrain.trace.dir", section.trace.dir)
        make_folder("hytrain.checkpoint.sigterm_dir", section.checkpoint.sigterm_dir)
        # nn.Module's __init__ has not run: plain attributes are safe, modules are not.
        object.__setattr__(self, "hytrain_config", section)
        hooks = HookSnapshot(kwargs["model"])
        object.__setattr__(self, "_added_hooks", hooks)
        try:
            self._build(*args, **kwargs)
        except BaseException:
            if self._collectives is not None:
                self._collectives.close()
            # Nothing of this engine stays on the model, which may be given to another one.
            optimizer = vars(self).get("optimizer")
            if isinstance(optimizer, HyTrainZeroOptimizer):
                optimizer.destroy()
            hooks.note()
            hooks.remove()
            raise
        hooks.note()

    def _build(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        optimizer = self.open_optimizer()
        self._guards = LayerGuards(self._model, PassGuide(optimizer.passes, optimizer.kept))
        optimizer.weights.when_closed(self._guards.close)
        access = StateAccess(optimizer.kept, optimizer.passes, self._model.parameters())
        optimizer.weights.when_closed(access.detach)
        if int(self.zero_optimization_stage()) == 3:
            self._offer_zero3(optimizer)
        self._watch_plan(optimizer)
        self._checkpoints = EngineCheckpoints(self, optimizer, self._module_tensors)
        self._handover = WeightHandover(optimizer.kept, self._module_tensors)
        optimizer.before_close.append(self._handover.close)
        self._prepare_saves(optimizer)
        trace = self.hytrain_config.trace
        self._tracing = Tracing(optimizer, self._model, trace, self.global_steps)
        optimizer.before_close.append(self._tracing.close)
        self._start_reports(optimizer)
        self._unblock_throughput_timer(kwargs["config"])
        self.batch_training = BatchTraining(self, self.hytrain_config, optimizer)
        optimizer.weights.when_closed(self.batch_training.close)
        self._step_warnings = StepWarnings(self._model)
        warn_of_factors()
        close_at_exit(optimizer)

    def _offer_zero3(self, optimizer: HyTrainZeroOptimizer) -> None:
        """Sets what libraries expect on parameters and on the optimizer under ZeRO-3."""
        attributes = ParameterAttributes(self._model, optimizer.weights, optimizer.kept)
        optimizer.parameter_offload = ParameterOffload(self._model, optimizer.weights)
        optimizer.weights.when_closed(attributes.detach)
        optimizer.weights.when_closed(optimizer.parameter_offload.detach)

    def _watch_plan(self, optimizer: HyTrainZeroOptimizer) -> None:
        name = self.hytrain_config.plan
        if name is not None:  # initialize() has made it this file's path, and checked the plan
            device = optimizer.pipeline.streams.device
            self._plan_watch = PlanWatch(read_plan(Path(name)), optimizer.collectives, device)

    def _prepare_saves(self, optimizer: HyTrainZeroOptimizer) -> None:
        settings = self.hytrain_config.checkpoint
        is_split = self.hytrain_config.master == SPLIT
        if settings.is_async and (is_split or optimizer.pipeline.streamed.layers):
            why = "the state is streamed to updates on the GPU"
            if is_split:
                why = (
                    "half of a master weight is the training copy, which may be written to at any "
                    'time ("hytrain.master": "split")'
                )
            logger.warning(
                '"hytrain.checkpoint.async": save_checkpoint returns when the checkpoint is '
                "written, since %s",
                why,
            )
        elif settings.is_async:
            saver = self._saver = AsyncSaver(
                optimizer.kept, lambda: int(self.global_steps), optimizer.placement.host
            )
            optimizer.before_close.append(lambda: saver.close(abandon=is_failing()))
            finish_save_at_exit(saver)
            self._checkpoints.prepare()
        if settings.sigterm_dir is not None:
            is_ordered = not optimizer.pipeline.norm.settings.direct
            self._termination = Termination(optimizer.collectives, is_ordered=is_ordered)
            optimizer.before_close.append(self._termination.close)

    def _start_reports(self, optimizer: HyTrainZeroOptimizer) -> None:
        rank, name = int(self.global_rank), self.hytrain_config.metrics
        if rank == 0:
            self._run_report = RunReport(self, optimizer)
            optimizer.before_close.append(self._run_report.close)
        if name is not None:
            device = optimizer.pipeline.streams.device
            log = DecisionLog(self.placement_decisions)
            self._metrics = MetricsFile(name, rank, log, device)
            optimizer.before_close.append(self._metrics.close)

    def _unblock_throughput_timer(self, config: Mapping[str, Any]) -> None:
        """Keeps DeepSpeed's throughput timer from waiting for the device twice a step.

        That is its default. Updates on the GPU could then not run beside the next forward, and the
        host could not launch ahead. A configuration that sets "synchronized" keeps its value.
        """
        asked = config.get("timers", {}).get("throughput", {})
        if "synchronized" not in asked:
            self.tput_timer.config.synchronized = False

    # -- construction, as DeepSpeed's asks for it ------------------------------------------------

    def deepspeed_io(self, *arguments: Any, **named: Any) -> Any:
        """Returns DeepSpeed's loader over a data set; checkpoints save its position.

        Ranks that share sequences get the same samples.
        """
        mpu, degree = self.mpu, self._sequence_degree()
        if degree > 1:  # DeepSpeed asks the mpu, and parallel_state_sp does not know
            rank = int(self.global_rank) // degree
            self.mpu = SimpleNamespace(
                get_data_parallel_world_size=lambda: self.dp_world_size,
                get_data_parallel_rank=lambda: rank,
            )
        try:
            return count_batches(super().deepspeed_io(*arguments, **named))
        finally:
            self.mpu = mpu

    def get_optimizer_configuration(
        self,
        optimizer_parameters: dict[str, Any],
        adam_w_mode: bool,
        allow_legacy_fallback: bool = False,
        **kwargs: Any,
    ) -> tuple[type[torch.optim.AdamW] | type[torch.optim.Adam], dict[str, Any]]:
        """Returns torch's Adam or AdamW, of which only the parameter groups are used.

        DeepSpeed would compile its own CPU Adam here.
        """
        del allow_legacy_fallback, kwargs
        for key in ("torch_adam", "fp32_optimizer_states"):
            optimizer_parameters.pop(key, None)
        self._bias_correction = optimizer_parameters.pop("bias_correction", True)
        return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam), {}

    def zero_force_ds_cpu_optimizer(self) -> bool:
        """False: any torch optimizer will do, since its step is never called."""
        return False

    def _scheduler_from_config(self, optimizer: Any) -> Any:
        # torch's schedulers insist on a torch.optim.Optimizer; both share their param_groups.
        del optimizer
        return super()._scheduler_from_config(self.basic_optimizer)

    # DeepSpeed's base names no class of optimizers: what the checker infers is a list of its own.
    def _configure_zero_optimizer(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, optimizer: torch.optim.Optimizer | None
    ) -> HyTrainZeroOptimizer:
        assert optimizer is not None, "initialize() has seen that there is one"
        if not self.__dict__.get("_bias_correction", True):
            for group in optimizer.param_groups:
                group["bias_correction"] = False
        collectives = self._collectives = ShardCollectives(state_group_of_engine(self.mpu))
        collectives.start_watch()
        device = torch.device(cast(Any, self.device))
        collectives.start_gate(device, is_wanted=self.hytrain_config.wait_in_stream)
        return_freed()  # before the host's free memory is read
        with collectives.reporting_failures():
            return build_optimizer(
                self._model,
                optimizer,
                self.hytrain_config,
                build_settings(self, share_host(collectives, device)),
                collectives,
                engine_view(self),
            )

    def _configure_distributed_model(self, model: nn.Module) -> None:
        if int(self.zero_optimization_stage()) == 3:
            # The model may not fit on the device: its layers go there one by one.
            self.dont_change_device = True
        super()._configure_distributed_model(model)
        # DeepSpeed leaves these unset with an mpu; after an engine with a mesh its values differ.
        degree, ranks = (
            self._sequence_degree(),
            dist.get_world_size(state_group_of_engine(self.mpu)),
        )
        self.sequence_parallel_size, self.seq_dp_world_size = degree, ranks
        self.dp_world_size = ranks // degree

    def _sequence_degree(self) -> int:
        """The number of ranks that share each sequence."""
        mesh: Any = self.mesh_device
        if self.mpu is None and mesh is not None:
            return int(mesh.size(1))
        return sequence_degree_of(self.mpu)

    def _broadcast_model(self) -> None:
        """Broadcasts rank 0's parameters; under ZeRO-3 each layer is broadcast when it is sharded.

        DeepSpeed's method supports neither 0-dimensional nor transposed parameters.
        """
        if self.dist_backend is None or int(self.zero_optimization_stage()) == 3:
            return
        collectives = ShardCollectives(state_group_of_engine(self.mpu))
        for parameter in self._model.parameters():
            if not hasattr(parameter, "ds_optim_param"):  # DeepSpeed's OptimizedLinear: shards
                collectives.broadcast_from_first(parameter.data)

    def open_optimizer(self) -> HyTrainZeroOptimizer:
        """Returns the engine's optimizer.

        Raises:
            EngineClosedError: the engine is not fully built.
        """
        optimizer = self.optimizer
        if not isinstance(optimizer, HyTrainZeroOptimizer):
            raise EngineClosedError("the engine is not fully built")
        return optimizer

    def _module_tensors(self) -> Mapping[str, Any]:
        """Returns the module's state dict without waiting for values: for names and shapes."""
        with self._guards.reading_names():
            return self._model.state_dict(keep_vars=True)

    @property
    def _model(self) -> nn.Module:
        return cast(nn.Module, self.module)  # untyped in DeepSpeed

    # -- training ------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model's forward; each layer waits for its own newest weights only.

        Raises:
            torch.OutOfMemoryError: the device's memory is used up. If k is solved, state has been
                moved off the device by then, if possible: the forward can be repeated, or a whole
                call of :meth:`train_batch`. The message says so.
        """
        optimizer = self.open_optimizer()
        optimizer.passes.begin_forward(enters_model=False)
        if self._tracing.recorder is not None:
            self._tracing.recorder.count_tokens(kwargs.get("input_ids", next(iter(inputs), None)))
        try:
            with self.watching_reads():
                return super().forward(*inputs, **kwargs)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{error}\n{optimizer.free_gpu_memory()}") from error

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """Like DeepSpeedEngine.backward; also publishes an exception to ranks that wait here.

        Raises:
            RankFailedError: another rank has failed; the message has its error.
            OutOfStepError: the ranks have made different numbers of backward passes.
            LossGraphError: the loss depends on no trained parameter.
            torch.OutOfMemoryError: the device's memory is used up. With one rank, and if k is
                solved, state has been moved off the device by then, if possible: the step can be
                repeated from the forward of its first micro-batch. The message says so.
        """
        optimizer = self.open_optimizer()
        with optimizer.collectives.reporting_failures():
            check_graph(loss, int(self.global_rank))
            try:
                # Other losses are refused: announced, they would count as unfinished backwards.
                if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                    optimizer.passes.announce_backward()
                return super().backward(loss, retain_graph, scale_wrt_gas)
            except torch.OutOfMemoryError as error:
                done = optimizer.free_gpu_memory_after_backward()
                raise torch.OutOfMemoryError(f"{error}\n{done}") from error

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Returns the loss, scaled for ``loss.backward()``; also if :attr:`module` computed it."""
        # Not announced: its end would not be seen if the forward was called on the module.
        check_graph(loss, int(self.global_rank))
        return super().scale(loss)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the last one of a step, also makes the optimizer's step.

        Raises:
            AbortedBackwardError: the last backward ended with an exception; the next micro-batch is
                the first of the step.
            RankFailedError: another rank has failed; the message has its error.
            OutOfStepError: the ranks have made different numbers of backward passes.
            CheckpointError: an asynchronous save has failed. The step was made.
            SystemExit: SIGTERM has come, and a checkpoint was saved, if it could be.
            NestedReductionError: called in a block of :meth:`coalesce_grad_reduction`.
            LossScaleError: gradients overflow at the smallest loss scale; the step was skipped.
        """
        optimizer = self.open_optimizer()
        if self._coalesces:
            raise NestedReductionError(
                "step() within coalesce_grad_reduction() (or no_sync()): call it behind the block"
            )
        optimizer.passes.refuse_aborted()
        # DeepSpeed clears it only if the loss came from the engine's own forward.
        self._manual_backward_expected = False
        steps, tracing = self.global_steps, self._tracing
        with optimizer.collectives.reporting_failures():
            try:
                with tracing.phase(PHASE_OPTIMIZER):
                    super().step(lr_kwargs)
            finally:
                # If step() raises, DeepSpeed would otherwise take each later backward for the last
                # one of a step (accumulation that the script manages).
                self._running_engine_step = False
            is_made = self.global_steps != steps
            if is_made:
                tracing.step_made(self.global_steps)
                report_step(self, optimizer)
                made = int(self.global_steps)
                if self._run_report is not None:
                    self._run_report.after_step(made)
                if self._metrics is not None:
                    self._metrics.add_step(made, optimizer.statistics.latest())
            if is_made and self._plan_watch is not None:
                self._plan_watch.after_step(optimizer.rank_state(self.batch_training.host_bytes))
        if is_made:
            self._step_warnings.after_step()
        if self._saver is not None:
            self._saver.check()
        if (
            is_made
            and self._termination is not None
            and self._termination.is_due(self.global_steps)
        ):
            self._termination.finish(self._save_at_end)

    def _save_at_end(self) -> None:
        folder = str(self.hytrain_config.checkpoint.sigterm_dir)
        logger.warning("SIGTERM: saving step %d in %s, then ending", self.global_steps, folder)
        self.save_checkpoint(folder)
        self.wait_for_checkpoint()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Like DeepSpeed's, between two steps: adapts accumulation, which is counted from here.

        Raises:
            ConfigError: a step is under way, a plan or ``batch_sizes`` deals the samples, or the
                size is not a multiple of one micro-batch on each rank.
        """
        passes, internals = self.open_optimizer().passes, cast(Any, self)
        steps = int(internals.gradient_accumulation_steps())
        unit = int(internals.train_micro_batch_size_per_gpu()) * int(internals.dp_world_size)
        if train_batch_size < unit or train_batch_size % unit:
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): it must be a multiple of {unit}, a "
                "micro-batch on each rank"
            )
        if self.hytrain_config.batch_shares() is not None:
            raise ConfigError(
                "set_train_batch_size with unequal batches: build the engine anew with other "
                '"hytrain.batch_sizes", or another plan'
            )
        if self.micro_steps % steps or passes.open_step.has_gradients:
            raise ConfigError(
                "set_train_batch_size within a step: its first micro-batches were divided by the "
                f"old number ({steps}); call it after the step() that ends one"
            )
        super().set_train_batch_size(train_batch_size)
        # DeepSpeed finds the end of a step by this count, modulo the new number.
        self.micro_steps = self.micro_steps // steps * int(internals.gradient_accumulation_steps())

    def zero_grad(self) -> None:
        """Drops the gradients of the step's micro-batches so far, in every stage.

        A collective if there are any. A step() right after it is skipped: nothing is updated.

        Raises:
            ConfigError: a backward is running, or updates are committed directly and have begun.
        """
        # It looks at every parameter's gradient, and reads no weight.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            super().zero_grad()
        optimizer = self.open_optimizer()
        with optimizer.collectives.reporting_failures():
            optimizer.zero_grad()

    @contextmanager
    def coalesce_grad_reduction(self) -> Generator[None]:
        """A block whose backward passes belong to one step, which is made after the block.

        Like DeepSpeed's: below ZeRO-3 gradients are reduced once, when the block has ended; until
        then a rank keeps the whole unreduced gradient. In ZeRO-3 each backward reduces, since
        weights are gathered and released in it anyway. Either way step() applies the sum.

        Raises:
            NestedReductionError: step() in the block, or a block in another or in no_sync().
            ConfigError: the script manages gradient accumulation itself.
        """
        internals: Any = self
        if not internals.managed_gradient_accumulation():
            raise ConfigError(
                "coalesce_grad_reduction() with gradient accumulation that the script manages "
                "itself: gradients are summed until step() anyway; leave it out"
            )
        if internals.inside_no_sync_ctxt or self._coalesces:
            raise NestedReductionError(
                "coalesce_grad_reduction() nested in no_sync() or another such block: leave one "
                "of them out"
            )
        boundary = vars(self).get("_is_gradient_accumulation_boundary")
        self._coalesces = True
        internals.set_gradient_accumulation_boundary(False)
        # Under ZeRO-3 the plan of a backward has reductions among the gathers: they stay.
        internals.inside_no_sync_ctxt = not self.open_optimizer().weights.is_sharded
        try:
            yield
        finally:
            internals.inside_no_sync_ctxt = False
            self._coalesces = False
            # Gradients that no backward has announced as the step's last are reduced in step().
            internals._is_gradient_accumulation_boundary = boundary

    def train_batch(
        self, data_iter: Iterator[Any], num_valid: NumValid | None = None
    ) -> torch.Tensor:
        """Makes one step over a global batch, however unequally the ranks share it; a collective.

        The gradient is that of the mean over the valid tokens of the *global* batch, as on one GPU
        that computes all of it. Gradients are reduced once, in the last micro-batch's backward, so
        that ranks may have different numbers of micro-batches; until then a rank keeps the whole
        unreduced gradient (2 bytes a parameter in bf16). Under ZeRO-3 they are reduced in every
        backward: a rank with fewer micro-batches than another takes part in the others' gathers
        and reductions with nothing of its own. With ``"hytrain.accumulation": "layer_major"`` all
        micro-batches pass through one layer before the next, and each layer is reduced after *its*
        last one: no unreduced gradient is kept, except in the first step.

        Each micro-batch draws its random numbers from a stream of its own.

        Args:
            data_iter: yields this rank's next micro-batches, on the device: as many as follow from
                ``"hytrain.batch_sizes"`` and ``"micro_batch_sizes"``, or
                ``gradient_accumulation_steps`` without them. A mapping is passed to the model by
                name, anything else by position.
            num_valid: counts the terms of a micro-batch's mean loss; default: the labels other than
                -100, without the first of each sample, as causal language models count.

        Returns:
            The global batch's mean loss before the update, fp32, on the device.

        Raises:
            UnsupportedError: the loss, or what it is a mean over, cannot be determined.
            StopIteration: the iterator ends before the step's last micro-batch.
            Exception: raised by the model, or by step() instead of a step. Nothing is left behind:
                weights and state are those of the last step, and the next call begins a new one.
        """
        data = self._tracing.loading(data_iter)
        return self.batch_training.train(data, num_valid or valid_labels)

    def _start_timers(self, timer_names: Iterable[str]) -> None:
        """Starts timers; stops those still running first, after a pass or step that raised."""
        internals: Any = self
        for name in timer_names:
            if internals.timers(name).started_:
                internals.timers(name).stop()
        super()._start_timers(timer_names)

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        """Runs DeepSpeed's prologue, whose timers know one forward at a time: the first counts."""
        if self._in_forward and self.open_optimizer().passes.open_step.layer_major:
            internals: Any = self
            # What DeepSpeed's prologue does to the inputs, without its timers.
            return (internals._cast_inputs_half(inputs), kwargs) if self.fp16_auto_cast() else None
        self._in_forward = True
        return super()._forward_prologue(inputs, kwargs)

    def _forward_epilogue(self) -> None:
        if self._in_forward:
            self._in_forward = False
            super()._forward_epilogue()

    @contextmanager
    def watching_reads(self) -> Generator[None]:
        """Context of a forward; in the first one, weights that autograd saves are recorded."""
        with self._guards.watching():
            yield

    def autocasting(self) -> AbstractContextManager[None]:
        """DeepSpeed's autocast, for a forward of the module that bypasses the engine."""
        return autocast_if_enabled(self)

    def give_up_forward(self) -> None:
        """Ends a forward that has begun and will not finish."""
        self._forward_epilogue()

    def train_batch_size(self) -> int:
        """The number of samples in a step, over all ranks."""
        shares = self.hytrain_config.batch_shares()
        return int(super().train_batch_size()) if shares is None else shares.global_batch

    def step_statistics(self) -> StepStatistics:
        """Returns the last step's statistics on this rank.

        Raises:
            HyTrainError: no step has been made.
        """
        return self.open_optimizer().statistics.latest()

    def recent_steps(self) -> list[StepStatistics]:
        """Returns the last steps' statistics (at most 1,000) on this rank, oldest first."""
        return self.open_optimizer().statistics.recent()

    def plan_report(self) -> PlanReport:
        """Compares the prediction of ``"hytrain.plan"`` with the last steps; a collective.

        Rank 0 prints this table by itself after the first steps in which no layer moved, after the
        engine's 43rd step at the latest.

        Raises:
            HyTrainError: there is no plan, or too few steps have been made.
        """
        if self._plan_watch is None:
            raise HyTrainError('there is no plan to compare with: set "hytrain.plan"')
        return self._plan_watch.report()

    def set_gpu_fraction(self, value: float | Literal["solve"]) -> None:
        """Changes k between two steps: state moves while training goes on.

        Args:
            value: share of the layers, counted from the first, whose state is to be on the GPU;
                "solve" lets the solver decide from the next step on.

        Raises:
            ConfigError: called between backward and step, or the share is out of range or does
                not fit in memory.
            MemoryBudgetError: no placement fits the memory that is available now.
        """
        self.open_optimizer().set_gpu_fraction(value)

    def memory_peaks(self) -> dict[str, PhasePeak]:
        """Returns this rank's peak memory by phase: "build", "step", "save", "load", "evaluation".

        Bytes of pageable and pinned host memory and of GPU memory, for the current placement and
        accumulation, on top of what the process used before. Those of the first placement were
        checked against the limits of control groups and process before anything was allocated.
        Activations are not included: add them, or ``in_flight`` (gradients that wait for the CPU's
        update) if that is more. Host copies of asynchronous saves are included as far as the host
        had room; their temporary copies on the GPU are not.
        """
        peaks = self.open_optimizer().placement.memory_peaks()
        copies = 0 if self._saver is None else self._saver.copy_bytes
        return {name: replace(peak, host=peak.host + copies) for name, peak in peaks.items()}

    def placement_decisions(self, since: int = 0) -> list[Decision]:
        """Returns this rank's decisions about k, oldest first, each with its reason.

        Args:
            since: number of decisions to leave out, from the oldest.
        """
        return self.open_optimizer().placement.decisions[since:]

    def synchronize(self) -> None:
        """Waits for every update: then all weights are the newest, readable from any stream.

        A collective: ranks gather each other's updates here, or where weights are used. Between
        backward and :meth:`step` the weights are those of the last step again. The engine calls
        it before ``state_dict``, checkpoints and ``eval``.
        """
        self.open_optimizer().synchronize()

    # nn.Module's methods return the module, DeepSpeed's return None.
    def train(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, mode: bool = True
    ) -> HyTrainEngine:
        """Like nn.Module.train; switching to evaluation synchronizes first."""
        if not mode and "_guards" in vars(self):
            self.synchronize()
        super().train(mode)
        return self

    def eval(self) -> HyTrainEngine:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Like nn.Module.eval; synchronizes first. (DeepSpeed's does not go through train().)"""
        return self.train(False)

    # -- weights and state -----------------------------------------------------------------------

    @contextmanager
    def gathered_parameters(self) -> Generator[None]:
        """Makes all weights whole on every rank within the block; a collective.

        Outside of it a rank has only its shards under ZeRO-3; below ZeRO-3 this is
        :meth:`synchronize`. What is written into parameters meanwhile is lost.
        """
        optimizer = self.open_optimizer()
        optimizer.synchronize()
        with optimizer.weights.gathered():
            optimizer.pipeline.streams.synchronize()
            yield

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Returns the module's state dict with the newest weights.

        Under ZeRO-3 this is a collective: the weights are gathered on rank 0's host, layer by
        layer; other ranks get an empty dict.
        """
        optimizer = self.open_optimizer()
        if not optimizer.weights.is_sharded or optimizer.weights.are_readable:
            return super().module_state_dict(
                destination, prefix, keep_vars, exclude_frozen_parameters
            )
        state = collect_module_state(
            optimizer.kept,
            self._module_tensors,
            with_frozen=not exclude_frozen_parameters,
            as_copies=False,
        )
        found = {} if destination is None else destination
        found.update({prefix + name: tensor for name, tensor in state.items()})
        return found

    def iterate_weights(
        self,
        *,
        dtype: torch.dtype | None = None,
        on_host: bool = False,
        bucket_bytes: int = BUCKET_BYTES,
        exclude_frozen_parameters: bool = False,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Iterates over (name, whole tensor) of the state dict, without gathering the whole model.

        For an inference engine, between steps: the newest weights, in any order, tied ones under
        each of their names. On several ranks the iteration is a collective under ZeRO-3, elsewhere
        only its start is: every rank must take all tensors, even if it needs none. It also works
        while states are off the device (:meth:`offload_states`).

        A tensor must not be written: below ZeRO-3 it may be the training weight itself. It is valid
        until the next one is asked for; on a GPU, also for work queued on the current stream by
        then.

        Args:
            dtype: dtype of floating-point tensors, buffers included; None: their own.
            on_host: yield copies in pinned host memory, which holds two buckets and is kept for the
                next time until :meth:`destroy`. False: tensors on the device that computes.
            bucket_bytes: bytes gathered and copied at a time, while the next bucket is gathered:
                memory is at most two buckets (and one tensor, if ``dtype`` changes it). A larger
                parameter is a bucket of its own.
            exclude_frozen_parameters: leave out frozen parameters, as for adapters alone.

        Raises:
            ConfigError: an update, a load or another such iteration came before the last tensor.
            OutOfStepError: a rank has left the iteration and gone on to something else.
            RankFailedError: a rank has failed, or ended.
            HostMemoryError: the host has no memory for two buckets.
        """
        return self._handover.iterate(
            dtype, bucket_bytes, on_host=on_host, with_frozen=not exclude_frozen_parameters
        )

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> OrderedDict[str, Any] | None:
        kept = self.open_optimizer().kept
        state = collect_module_state(
            kept, self._module_tensors, with_frozen=not exclude_frozen_parameters, as_copies=True
        )
        return OrderedDict(state) if kept.collectives.rank == 0 else None

    def _get_param_fragment_func(self, param: nn.Parameter) -> torch.Tensor:
        """Returns a checkpoint's part of a frozen parameter that is whole on this rank: all."""
        return param.detach().cpu()

    def _get_shared_params(self) -> dict[str, str]:
        """Returns tied parameters: name -> the name under which the tensor is stored."""
        return shared_parameters(self._model)

    def save_16bit_model(
        self,
        save_dir: str,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Like DeepSpeed's; a collective: under ZeRO-3 the weights are gathered on rank 0.

        Returns:
            Whether a file was written: False under ZeRO-3 if
            ``stage3_gather_16bit_weights_on_model_save`` is not set.
        """
        config: Any = self._config
        is_sharded = self.open_optimizer().weights.is_sharded
        if is_sharded and not config.zero_config.gather_16bit_weights_on_model_save:
            logger.warning(
                "%s/%s is not written: set stage3_gather_16bit_weights_on_model_save",
                save_dir,
                save_filename,
            )
            return False
        return bool(super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters))

    def zero_optimization_partition_weights(self) -> bool:
        """False: keeps DeepSpeed's own ZeRO-3 handling away from modules and checkpoints."""
        return False

    def fp32_state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """Returns master weights and moments as of the last step; a collective.

        Returns:
            On rank 0, parameter name (as in ``module.named_parameters()``) -> {"fp32", "exp_avg",
            "exp_avg_sq"}, fp32 tensors of the parameter's shape on the CPU; on other ranks an
            empty dict. Frozen parameters have none, tied ones appear once.
        """
        optimizer = self.open_optimizer()
        optimizer.flush()
        return gather_to_first(
            optimizer.layer_states, optimizer.collectives, optimizer.pipeline.streams.device
        )

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Literal[True]:
        """Saves a universal checkpoint, without any effect on training; a collective.

        The checkpoint appears under its tag only when all of it is written. Until then an older one
        under this tag stays whole (the disk must hold both); then it is removed. Other files in the
        tag's folder stay.

        With ``"hytrain.checkpoint.async"`` it returns at once, and the checkpoint is written during
        the next steps; it first waits for one that is still being written. Errors are then raised
        after a later step, by :meth:`wait_for_checkpoint`, or by the next save.

        Args:
            save_dir: folder of checkpoints, made if missing. If hosts do not share it, each has a
                part, and ``hytrain checkpoint merge`` joins the parts.
            tag: name of the checkpoint, the same on all ranks; default ``global_step<n>``.
            client_state: saved as well, and returned by :meth:`load_checkpoint`.
            save_latest: whether loading without a tag finds this one.
            exclude_frozen_parameters: leave frozen weights out.

        Returns:
            True.

        Raises:
            CheckpointError: a rank could not write, or was given what cannot be saved; raised on
                all ranks. The tag's older checkpoint and ``latest`` are unchanged.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self.wait_for_checkpoint()
        self._checkpoints.save(
            str(save_dir),
            name,
            dict(client_state or {}),
            latest=save_latest,
            no_frozen=exclude_frozen_parameters,
            saver=self._saver,
        )
        return True

    def wait_for_checkpoint(self) -> None:
        """Waits until the last asynchronous save has ended; returns at once if there is none.

        Raises:
            CheckpointError: the save failed, and no call has raised that yet; on all ranks.
        """
        if self._saver is not None:
            self._saver.wait()

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Loads a universal checkpoint, saved with any number of ranks and any layout.

        A collective. Gradients since the last step are dropped, and the next micro-batch is the
        first of a step. With ``load_module_only`` or without ``load_optimizer_states`` only
        weights are loaded: master weights are the checkpoint's fp32 ones if it has them,
        moments and step counts start at zero, hyper-parameters stay as they are. Otherwise the
        random number generators (Python's, numpy's, torch's and the device's) go on where they
        were, if the number of ranks is the same.

        Args:
            load_dir: folder of checkpoints.
            tag: name of the checkpoint; default: the one that ``latest`` names, or
                ``latest_universal`` if that one is DeepSpeed's own and was converted.
            load_module_strict: refuse a checkpoint whose names differ from the model's; otherwise
                what both have is loaded. Parameters that it lacks keep weights and moments, and a
                parameter group of such parameters only keeps its step count and hyper-parameters.
            load_optimizer_states: moments, step counts and the parameter groups' hyper-parameters.
            load_lr_scheduler_states: the LR scheduler's state.
            load_module_only: load weights only, without counters and schedule.
            custom_load_fn: called as ``custom_load_fn(src=module state, dst=module)`` to load the
                weights. Master weights are then the checkpoint's with ``load_optimizer_states``;
                without, they are what the function left in the module.

        Returns:
            (path of the model states' file, client state); (None, None) with a warning if no tag is
            given and there is no ``latest``. A client state with objects other than tensors,
            containers, numbers and text is refused without "hytrain.checkpoint.run_pickled_code".

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged or another model's:
                raised on all ranks, before anything is touched. Or loading failed half-way: the
                engine's state is incomplete.
        """
        self.wait_for_checkpoint()
        self.open_optimizer().passes.refuse_away()
        request = LoadRequest(
            strict=load_module_strict,
            module_only=load_module_only,
            optimizer_states=load_optimizer_states,
            scheduler_states=load_lr_scheduler_states,
            custom_load=custom_load_fn,
            trusted=self.hytrain_config.checkpoint.run_pickled_code,
        )
        name = None if tag is None else str(tag)
        loaded = self._checkpoints.load(Path(load_dir), name, request)
        has_history = loaded[0] is not None and not load_module_only
        if self._metrics is not None and has_history:
            self._metrics.decisions.skip_history()
        self._tracing.begin(self.global_steps)
        return loaded

    # -- between phases --------------------------------------------------------------------------

    def offload_states(
        self,
        include: Container[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Frees the device's memory for another phase (generation, say); a collective.

        After :meth:`reload_states` training continues bit for bit; until then, whatever needs the
        states raises. Parameters that are whole on this rank can be read meanwhile, on the host.
        Activations of a forward whose graph is still alive stay on the device.

        Args:
            include: names, or members of DeepSpeed's ``OffloadStateTypeEnum``; default: all of
                them. "lp_params" is the training copy and frozen parameters, "hp_params" and
                "optim_states" are master weights and moments of layers that are updated on the
                device (others are on the host anyway), "lp_grads" gradients of a step that is not
                final, "contiguous_grad_buffer" buffers for gradients.
            device: "cpu"; "none" does nothing.
            pin_memory: copies are as fast as the link; the pinned memory is kept for the next
                time, until :meth:`destroy`. False: pageable memory, given back by
                :meth:`reload_states`.
            non_blocking: return while copies are still in flight; call
                ``torch.cuda.synchronize()`` before parameters are read on the host.

        Raises:
            ConfigError: a name is unknown, a backward is running, weights are gathered, or updates
                are committed directly and have begun.
            UnsupportedError: ``device`` is another one.
            HostMemoryError: the host has not enough memory; nothing has been moved.
        """
        self.wait_for_checkpoint()
        optimizer = self.open_optimizer()
        with optimizer.collectives.reporting_failures():
            optimizer.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Brings back what :meth:`offload_states` has taken off the device.

        Args:
            non_blocking: return while copies are still in flight; work that is launched on the
                device from here on runs after them.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory. What has come back stays
                there; free some, and call this again.
        """
        self.open_optimizer().reload_states(non_blocking)

    # -- end -------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Stops the update worker and frees pinned memory; the engine cannot be used any more.

        Below ZeRO-3 the model keeps its weights: those of the last step, on every rank. This is a
        collective if that step's updates have not been gathered yet. While an exception is being
        handled, other ranks may not come: the weights are then left as they are.
        """
        optimizer = vars(self).get("optimizer")
        if isinstance(optimizer, HyTrainZeroOptimizer) and sys.exc_info()[1] is None:
            optimizer.kept.finish_weights()
        self._added_hooks.remove()
        super().destroy()
