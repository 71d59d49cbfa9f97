"""Forward and backward passes between two steps: which gradients count, and for what.

Hooks and DeepSpeed's engine report the passes; layers' gradients go to the update pipeline as they
become final. Layer-major passes are in :mod:`hytrain.layer_major.layer_passes`; the order of a step
is in :mod:`hytrain.engine.zero_optimizer`.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, Protocol

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.errors import (
    AbortedBackwardError,
    AbortedStepError,
    ConfigError,
    EngineClosedError,
    StatesOffloadedError,
)
from hytrain.model.layer_state import LayerState
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.optimizer.autograd_task import call_at_end, graph_task
from hytrain.optimizer.engine_view import EngineView, StepSettings
from hytrain.optimizer.gradients import GradientCollector
from hytrain.optimizer.hyper import HyperParameters
from hytrain.optimizer.layer_gradient import LayerGradient
from hytrain.optimizer.loss_scaling import LossScaling
from hytrain.optimizer.reduction import GradientReducer
from hytrain.optimizer.step_state import StepPhase, StepState
from hytrain.optimizer.written_weights import WrittenWeights
from hytrain.placement.manager import PlacementManager
from hytrain.trace.profiler_spans import span
from hytrain.trace.recorder import Recorder
from hytrain.zero3.weight_passes import WeightPasses

logger = logging.getLogger(__name__)


class BackwardMarks(Protocol):
    """DeepSpeed's own marks of a backward that runs, on its optimizer."""

    @property
    def is_backward_marked(self) -> bool: ...
    def clear_backward_marks(self) -> None: ...


class PassTracker:
    """Follows the passes between two steps, and passes gradients on as they become final."""

    def __init__(
        self,
        pipeline: UpdatePipeline,
        collectives: ShardCollectives,
        hyper: HyperParameters,
        settings: StepSettings,
        engine: EngineView,
        placement: PlacementManager,
        weights: WeightPasses,
        marks: BackwardMarks,
        scaling: LossScaling,
    ) -> None:
        self.scaling = scaling
        self.pipeline = pipeline
        self.collectives = collectives
        self.settings = settings
        self.weights = weights
        self.timer = placement.timer
        self.open_step = StepState()
        self._placement = placement
        self._hyper = hyper
        self._engine = engine
        self._marks = marks
        self.forward_task: int | None = None
        """The graph task in which the model's forward runs, -1 for none; None outside of it."""
        self._has_warned_of_drop = False
        self.away: frozenset[str] = frozenset()
        """Kinds of states that are off the device (offload_states): if any, passes are refused."""
        self.trace: Recorder | None = None
        """Recorder of the passes; None while no step is recorded."""
        layers = pipeline.layers
        gradients = [LayerGradient(layer.layout, layer.gradient_dtype) for layer in layers]
        self.reducer = GradientReducer(
            gradients, pipeline, collectives, settings, placement, scaling, self.open_step
        )
        self.collector = GradientCollector(
            gradients,
            pipeline.streams.device,
            self.open_step,
            self.reducer,
            self.begin_unannounced,
            collectives=collectives,
            direct=pipeline.norm.settings.direct,
        )
        self.written = WrittenWeights(pipeline, self.reducer, self.collector)
        if collectives.world_size > 1 and weights.schedule is not None:
            # Reductions take their places among the gathers.
            self.collector.reduce_schedule = weights.schedule
            weights.schedule.reduces(self.collector)

    # -- a step over a global batch --------------------------------------------------------------

    @contextmanager
    def summing_over_ranks(self) -> Generator[None]:
        """Context of a step whose losses are weighted by their shares of the global batch.

        Gradients of earlier backward passes count as they would in any other step.
        """
        self.clean_up_aborted()
        self.open_step.begin_batch()
        if self.open_step.has_gradients and self.settings.unscale != 1.0:
            self.end_micro_batch()
            self.reducer.withdraw_all()
            reduced = 1.0 if self.settings.divide_first else self.settings.unscale
            # Without this wait compute could scale a shard before a reduction writes it.
            self.pipeline.streams.compute_waits_for_communication()
            self.collector.scale(self.settings.unscale, reduced)
        with self.open_step.summing_over_ranks():
            yield

    # -- backward ------------------------------------------------------------------------------

    def backward_prologue(self) -> None:
        """Begins a backward: the engine's forward output receives its gradient."""
        step = self.open_step
        if step.in_backward and step.backward.graph_task not in (-1, graph_task()):
            self._drop_aborted()
        if self._is_for_inputs:
            self._begin_for_inputs()
            return
        self.begin_backward()
        self.open_step.enter_graph(graph_task())

    def announce_backward(self) -> None:
        """Begins the backward that engine.backward() is about to run."""
        self.clean_up_aborted()
        self.begin_backward()
        self.open_step.announce()

    def begin_unannounced(self) -> bool:
        """Begins a backward that bypassed the engine and was seen in a hook; watches for its end.

        Returns:
            Whether it is one of the engine's. One within the model's forward is not (DeepSpeed's
            TiledFusedLogitsLoss runs one): its uses of weights are the forward's, and its gradients
            are kept in ``parameter.grad`` for the backward that follows.

        Raises:
            LossScaleError: its loss was not scaled, although losses must be.
        """
        if self.forward_task not in (None, graph_task()):
            if self.scaling.is_used and not self._is_for_inputs:
                self.scaling.check_applied()
            return False
        if self.open_step.for_inputs:
            return True
        if self._is_for_inputs:
            self._begin_for_inputs()
        else:
            self.scaling.check_applied()
            self.begin_backward()
        call_at_end(self.backward_epilogue)
        return True

    @property
    def _is_for_inputs(self) -> bool:
        """Whether the backward that runs gives no trained parameter a gradient.

        ``torch.autograd.grad`` of an input does not, nor a backward through weights that are
        temporarily frozen. If it counted as a micro-batch's, layers would be reduced as zeros.
        """
        if self.open_step.in_backward or graph_task() == -1:
            return False
        return not self.collector.may_come

    def _begin_for_inputs(self) -> None:
        if self.open_step.for_inputs:
            return  # several outputs report it
        self.check_open()
        self.forward_task = None
        if self.collectives.world_size > 1:
            self.end_micro_batch()  # the other ranks have reduced what they left out
        # What an earlier backward has sent must not overwrite the weights that this one reads.
        self.reducer.withdraw_all()
        self.pipeline.wait_all()
        self.open_step.begin_inputs()
        self.weights.begin("inputs")

    def notice_recomputation(self) -> None:
        """Begins an unannounced backward, in which checkpointing is recomputing a forward.

        Reentrant checkpointing then runs a graph of its own, whose hooks would be the first to be
        called: the end of that inner graph would be taken for the end of the backward.

        Raises:
            LossScaleError: as in :meth:`begin_unannounced`.
        """
        if torch.is_grad_enabled() and not self.open_step.layer_major:
            self.begin_unannounced()

    def begin_backward(self, *, micro_batches: int = 1, follows: bool = False) -> None:
        """Begins a backward, unless one has begun already.

        ``micro_batches``: how many run backward as one, layer-major.
        ``follows``: this rank only takes part in the gathers of the other ranks' backward.
        """
        self.check_open()
        if self.open_step.in_backward:
            return  # announced twice: by engine.backward and by the output's hook
        self.forward_task = None
        with span("begin_backward"):
            self.end_micro_batch()
            self.reducer.withdraw_all()
            # Layers that no forward has waited for: without this wait a gradient could be replaced,
            # and its memory reused, before the worker has copied it. And other ranks gather them
            # now.
            self.pipeline.wait_all()
            is_boundary = self._engine.is_boundary()
            # In train_batch ranks may have different numbers of micro-batches: they reduce once a
            # step. If weights are gathered, all ranks take part in all micro-batches.
            every = (
                self.settings.reduce_every_backward
                and self.collectives.world_size > 1
                and (not self.open_step.sums_over_ranks or self.weights.is_sharded)
            )
            reduces = self._engine.is_reducing() and (is_boundary or every)
            if reduces and is_boundary:
                self.begin_update()
                self._placement.begin_backward()
            if reduces:
                self.meet_in_backward()
            self.open_step.begin_backward(reduces=reduces, micro_batches=micro_batches)
            self.collector.begin()
            if self.trace is not None:
                self.trace.begin_backward(self.open_step.backward.micro_batches)
            if not follows and not self.open_step.layer_major:
                self.weights.begin("backward")
                self.collector.take_kept()

    def meet_in_backward(self) -> None:
        """Tells the other ranks of a reduction to come, if every backward reduces; a collective."""
        # In train_batch ranks reduce once a step, however many micro-batches they have.
        if self.settings.reduce_every_backward and not self.open_step.sums_over_ranks:
            what = "the reduction of a backward pass's gradients"
            self.collectives.meet(what, self._hyper.words)

    def begin_update(self) -> None:
        """Reads the hyper-parameters that this step's updates begin with."""
        if self.pipeline.norm.settings.direct:
            self._hyper.check()  # in step() it would be too late
        # A first backward may send layers too early; what it sends must overwrite no weights.
        self.pipeline.begin_step(
            self.reducer.unscale,
            self._hyper.read(),
            hold=self.collector.may_be_early(layer_major=self.open_step.layer_major),
        )
        self.open_step.begin_update()

    def end_micro_batch(self) -> None:
        """Completes a backward that was not followed by a step.

        What it began to reduce must be reduced wholly: the other ranks do so.
        """
        self.collector.complete(
            consume=self.open_step.backward.reduces and self.collectives.world_size > 1
        )

    def end_backward(self) -> None:
        """Ends a backward: autograd has finished, later gradients belong to another backward."""
        with span("end_backward"):
            self.collector.take_left()
            self.weights.end()  # in which other ranks may reduce layers still
            self.collector.end_graph()
        self.scaling.end_backward()
        if self.trace is not None:
            self.trace.end_backward()

    def backward_epilogue(self) -> None:
        """Ends a backward at DeepSpeed's call; several ranks then reduce what they left out.

        The others wait in these reductions. Whatever this rank does next, before step(), may be a
        collective in which it would wait for them: the user's own, or a read of state.
        """
        if self.open_step.for_inputs:
            self.open_step.end_inputs()
            self.weights.end()
            return
        self.end_backward()
        # If nothing has fired, more gradients of this micro-batch may come.
        may_be_over = self.open_step.backward.is_announced or self.collector.has_fired
        # In train_batch nothing comes in between, and a rank without samples does it in step().
        is_own_affair = self.collectives.world_size == 1 or self.open_step.sums_over_ranks
        if self.open_step.backward.reduces and may_be_over and not is_own_affair:
            self.end_micro_batch()

    # -- forward -------------------------------------------------------------------------------

    def before_use(self, state: LayerState) -> None:
        """Makes a layer's weights current: they are about to be read."""
        self.clean_up_aborted()
        update, timer = state.update, self.timer
        if update.sent:
            timer.invalidate()
            if not self.open_step.in_backward:
                self.reducer.withdraw(state)
            else:
                self.collector.take_back(state.index)
        if not timer.in_forward:
            self.pipeline.wait(state)
            return
        timer.wait_begins(state.index, on_cpu=update.updated_by == "cpu")
        self.pipeline.wait(state)
        timer.wait_ends(state.index)

    @property
    def is_in_graph(self) -> bool:
        """Whether autograd is running here: a forward now is a recomputation."""
        phase = self.open_step.phase  # asked for at every use of weights: no property's call
        is_running = phase is StepPhase.BACKWARD or phase is StepPhase.INPUTS
        return is_running and graph_task() != -1

    def begin_forward(self, *, enters_model: bool = True) -> None:
        """Begins the model's forward, or prepares for it before the model's own hook is called."""
        self.check_open()
        if self.open_step.layer_major:
            return  # one of several, which count as one
        self.clean_up_aborted()
        if enters_model and torch.is_grad_enabled() and not self.is_in_graph:
            self.written.restore_views()
        self.timer.begin_forward()
        if self.trace is not None and not self.is_in_graph:
            self.trace.begin_forward()

    def enter_model(self) -> None:
        """Notes that the engine's own forward, no recomputation, is about to enter its modules."""
        if self.forward_task is not None and self.collector.has_left:
            # The last forward failed after a backward within it. If it is repeated, the gradients
            # of that backward come again.
            self._drop_aborted()
        self.forward_task = graph_task()

    def end_forward(self) -> None:
        """Ends the model's forward."""
        if not self.open_step.layer_major:
            if not self.is_in_graph:
                self.forward_task = None
            self.timer.end_forward()
            if self.trace is not None and not self.is_in_graph:
                self.trace.end_forward()

    # -- beside other ranks' passes, and after failed passes ------------------------------------

    def join_micro_batch(self) -> None:
        """Takes part in the gathers of a micro-batch that other ranks have and this one lacks."""
        schedule = self.weights.active
        if schedule is None:
            return
        self.join_forward("train")
        self.begin_backward(follows=True)
        schedule.follow("backward")
        self.end_backward()

    def join_forward(self, kind: Literal["train", "eval"] = "eval") -> None:
        """Takes part in the gathers of a forward that other ranks run."""
        if self.weights.active is not None:
            self.begin_forward()
            self.weights.active.follow(kind)
            for state in self.pipeline.layers:
                self.before_use(state)

    def clean_up_aborted(self) -> None:
        """Drops what is left of a backward that an exception in the user's model or hooks ended.

        It never reported its end; but it is over if autograd runs no graph.
        """
        step = self.open_step
        if step.layer_major:
            return  # between two of the graphs that make one backward
        if step.phase is StepPhase.INPUTS and graph_task() == -1:
            step.end_inputs()
            self.weights.give_up()
            self._marks.clear_backward_marks()
        is_open = step.phase is StepPhase.BACKWARD or self._marks.is_backward_marked
        if is_open and graph_task() == -1:
            self._drop_aborted()

    def _drop_aborted(self) -> None:
        if self.pipeline.is_partly_committed:
            raise AbortedBackwardError(
                "the last backward did not finish, but without clipping and overflow check updates "
                "are committed during backward: some layers have made this step and the others "
                "have not. Load a checkpoint with engine.load_checkpoint before training goes on; "
                'with "gradient_clipping" or "check_grad_overflow" set, such a step is taken back'
            )
        logger.warning(
            "the last backward did not finish: its gradients, and those of the step's earlier "
            "micro-batches, are discarded; the next micro-batch is the first of a step"
        )
        self.forget_step()
        self.open_step.abort()

    def refuse_aborted(self) -> None:
        """Drops what an aborted backward left; refuses a step before the next backward.

        Raises:
            AbortedBackwardError: the last backward ended with an exception.
        """
        self.clean_up_aborted()
        self.open_step.refuse_aborted()

    def abandon_step(self) -> None:
        """Gives up the step: nothing of its micro-batches so far stays."""
        # What is committed cannot be taken back; the next forward says so.
        if not (self.pipeline.is_partly_committed or self.pipeline.is_torn):
            self.timer.invalidate()
            self.forget_step()
            # Otherwise step() would make a step of zeros, in which decay and momentum act.
            self.open_step.abort()

    def forget_step(self) -> None:
        """Discards all gradients; the next micro-batch is the first of a step."""
        self.discard_gradients()
        # Else the step would be taken early, without what was discarded, and so would later ones.
        self._engine.begin_window()

    def discard_gradients(self) -> None:
        """Forgets all gradients since the last step; weights and state are those of that step."""
        for state in self.pipeline.layers:
            if state.update.sent:
                self.pipeline.discard(state)
        self.collector.discard()
        self.open_step.end()  # what is given up below belongs to no backward
        self.weights.forget()
        self._marks.clear_backward_marks()

    def drop_gradients(self) -> None:
        """Drops the gradients of this step so far: those of all micro-batches since the last step.

        A collective, if there are any. If step() follows without another backward, it is
        skipped: nothing is updated. (DeepSpeed's stages drop some of them or none.)

        Raises:
            ConfigError: a backward is running, or updates are committed directly and have begun.
        """
        # Called at the end of every step, when reads of weights are reported. No weight is read
        # here, and the report would cost microseconds a parameter.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for layer in self.collector.layers:
                for slot in layer.layout.slots:
                    slot.parameter.grad = None
        if self.open_step.has_gradients:  # not after every step
            self._drop_open()

    def _drop_open(self) -> None:
        self.withdraw_updates("zero_grad()")
        if not self.open_step.has_gradients:
            return  # they were an aborted backward's
        self.collectives.meet("zero_grad() with gradients of a step")
        # If updates are committed directly, the rest of a step's last backward would be, too.
        if not (self.open_step.begun and self.pipeline.norm.settings.direct):
            self.end_micro_batch()
        self.timer.invalidate()
        self.discard_gradients()
        self.open_step.drop()
        if not self._has_warned_of_drop and self.collectives.rank == 0:
            logger.warning(
                "zero_grad() between backward and step has dropped the gradients of this step's "
                "micro-batches so far (said once); DeepSpeed's ZeRO keeps them in most stages"
            )
        self._has_warned_of_drop = True

    def withdraw_updates(self, what: str) -> None:
        """Withdraws updates that have begun: weights and state are those of the last step.

        Not a collective, but all ranks have sent the same layers.

        Raises:
            ConfigError: a backward is running, or updates are committed directly.
        """
        self.check_open()
        self.clean_up_aborted()
        if self.open_step.in_backward or self.open_step.layer_major:
            raise ConfigError(f"{what} while a backward is running: call it before or after")
        if not any(state.update.sent for state in self.pipeline.layers):
            return
        # On every rank, also if no layer is updated by the CPU: the others raise this.
        if self.pipeline.norm.settings.direct:
            raise ConfigError(
                f"{what} between backward and step: without clipping and overflow check updates "
                "are committed during backward; call it after step(), or set "
                '"gradient_clipping" or "check_grad_overflow"'
            )
        self.timer.invalidate()
        self.reducer.withdraw_all()

    # -- states that are off the device ----------------------------------------------------------

    def refuse_away(self) -> None:
        """Raises a StatesOffloadedError unless everything is on the device."""
        if self.away:
            raise StatesOffloadedError(
                "the engine was used while its states are off the device (engine.offload_states: "
                f"{', '.join(sorted(self.away))}): call engine.reload_states() before"
            )

    def close(self) -> None:
        """Detaches from the model; every later pass is refused."""
        self.open_step.close()
        self.collector.remove_hooks()
        self.collector.discard()
        self.weights.forget()

    def check_open(self) -> None:
        """Refuses an engine that cannot be used.

        Raises:
            EngineClosedError: it was destroyed.
            StatesOffloadedError: its states are off the device.
            AbortedStepError: its last step failed midway.
            WorkerError: its update worker failed as well.
        """
        if self.open_step.is_closed:
            raise EngineClosedError(
                "the engine was used after destroy(): build a new one with hytrain.initialize; for "
                "another train() with Hugging Face's Trainer, build a new Trainer"
            )
        self.refuse_away()
        if self.pipeline.is_torn:
            self.pipeline.cpu.worker.check_error()  # then there is nothing to load into, either
            raise AbortedStepError(
                "the last step() did not finish: some layers have made it and others have not. "
                "Load a checkpoint with engine.load_checkpoint before anything else"
            )
