"""Forward and backward passes as the optimizer sees them: which gradients count, and for what.

All micro-batches of a step layer by layer are in :mod:`hytrain.engine.layer_major_passes`; what a
step does with the gradients is in :mod:`hytrain.engine.zero_optimizer`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.engine.deepspeed_interface import DeepSpeedInterface
from hytrain.engine.engine_view import EngineView, StepSettings
from hytrain.errors import AbortedBackwardError, AbortedStepError, EngineClosedError
from hytrain.model.layer_state import LayerState
from hytrain.model.storage import ResidentStorage
from hytrain.offload.pipeline import UpdatePipeline
from hytrain.optimizer.autograd_task import call_at_end, graph_task
from hytrain.optimizer.firing_order import late_policy
from hytrain.optimizer.gradients import GradientCollector
from hytrain.optimizer.hyper import HyperReader
from hytrain.optimizer.layer_gradient import LayerGradient
from hytrain.placement.manager import PlacementManager
from hytrain.zero3.weight_passes import WeightPasses

logger = logging.getLogger(__name__)


class PassTracker(DeepSpeedInterface):
    """Follows the passes between two steps, and hands gradients on as they become final."""

    def __init__(
        self,
        basic_optimizer: torch.optim.Optimizer,
        pipeline: UpdatePipeline,
        collectives: ShardCollectives,
        hyper: HyperReader,
        settings: StepSettings,
        engine: EngineView,
        placement: PlacementManager,
        weights: WeightPasses,
    ) -> None:
        """
        Args:
            basic_optimizer: the user's Adam or AdamW; its ``param_groups`` are read every step.
            pipeline: the update pipeline over this rank's layers.
            collectives: the ranks that share the state.
            hyper: reader of hyper-parameters.
            settings: see :class:`StepSettings`.
            engine: see :class:`EngineView`.
            placement: measures steps and moves layers.
            weights: makes the training copy ready for forward and backward.
        """
        super().__init__(basic_optimizer, pipeline, collectives)
        self.settings = settings
        self.placement = placement
        self.weights = weights
        self.timer = placement.timer
        self._hyper = hyper
        self._engine = engine
        self.steps = [0] * len(basic_optimizer.param_groups)
        """Steps that each parameter group has made; skipped ones do not count."""
        self._step_begun = False
        self._is_reducing = False  # the current backward hands layers on as they become final
        self._was_reduced = False  # one of the backward passes since the last step did
        self.sums_over_ranks = False
        """Gradients of this step are not averaged over ranks; see :meth:`summing_over_ranks`."""
        self._was_aborted = False  # the last backward did not finish, and no other has begun since
        self.has_gradients = False
        """A backward has begun since the last step, and what it left was not discarded."""
        self._was_dropped = False  # zero_grad() has discarded it, and no other has begun since
        self._graph_task = -1  # the autograd graph task of the current backward; -1: not known
        self._is_announced = False  # engine.backward() runs it: it is a micro-batch's
        self._has_warned_of_moves = False
        self._by_layer = False  # a step's micro-batches go through the layers together
        self._closed = False
        self.on_reduced_gradient: Callable[[LayerState, torch.Tensor], None] | None = None
        """Observer of every final reduced gradient shard, for tests and tools."""
        layers = pipeline.layers
        self.collector = GradientCollector(
            [layer.layout for layer in layers],
            [layer.gradient_dtype for layer in layers],
            pipeline.streams.device,
            consume=self._consume,
            consume_part=self._consume_part,
            agree=lambda order, early, has_seen: collectives.agree_on_order(
                order, early, pipeline.streams.device, has_seen=has_seen
            ),
            on_begin=self.begin_unannounced,
            recall=self._recall if self._may_recall else None,
            late=late_policy(collectives.world_size, direct=pipeline.norm.settings.direct),
            sums_squares=collectives.world_size == 1 and not pipeline.norm.settings.direct,
            is_reduced=collectives.world_size > 1,
        )
        if collectives.world_size > 1:
            weights.pace(self.collector, self.collector.set_pace)

    # -- a step over a global batch --------------------------------------------------------------

    @contextmanager
    def summing_over_ranks(self) -> Generator[None]:
        """Around a step whose losses are weighted by their parts of the global batch.

        What the user has left for it by hand counts as it would in any other step.
        """
        self._clean_up_aborted()
        self._was_aborted = False  # a step is begun; a rank without samples makes no backward
        if not self.is_between_steps and self.settings.unscale != 1.0:
            self._end_micro_batch()
            for state in self.pipeline.layers:
                if state.sent:
                    self._withdraw(state)
            self.collector.scale(self.settings.unscale)
        self.sums_over_ranks = True
        try:
            yield
        finally:
            self.sums_over_ranks = False

    # -- backward ------------------------------------------------------------------------------

    def backward_prologue(self) -> None:
        """The engine's forward output receives its gradient: a backward has begun."""
        if self.collector.in_backward and self._graph_task not in (-1, graph_task()):
            self._drop_aborted()
        self._begin_backward()
        self._graph_task = graph_task()

    def enter_backward(self) -> None:
        """DeepSpeed's mark that a backward runs: one, however many forwards' outputs announce it.

        Of two forwards and one loss DeepSpeed would count two, and leave one; of two forwards and
        then two backwards it would queue one end.
        """
        if self._backward_active_depth == 0:
            self._backward_hook_state.post_backward_callback_queued = False
            super().enter_backward()

    def scale_if_loss(self, value: Any) -> Any:
        """engine.backward() is about to run; there is no loss scale."""
        self._clean_up_aborted()
        self._begin_backward()
        self._is_announced = True
        return value

    def begin_unannounced(self) -> None:
        """A backward that went past the engine, seen in a hook. Its end must be seen too."""
        self._begin_backward()
        call_at_end(self.backward_epilogue)

    def _begin_backward(self, *, by_layer: int | None = None, follows: bool = False) -> None:
        self._check_open()
        collector = self.collector
        if collector.in_backward:
            return  # announced twice: by engine.backward and by the output's hook
        self._end_micro_batch()
        for state in self.pipeline.layers:
            if state.sent:
                self._withdraw(state)
        # Layers that no forward has waited for: their last gradient must have left before the
        # next one takes its place, and other ranks gather them now.
        self.pipeline.wait_all()
        self._graph_task = -1
        self._is_announced = False
        self._was_aborted = False
        self._was_dropped = False
        is_shared = self.collectives.world_size > 1
        is_boundary = self._engine.is_boundary()
        self._is_reducing = self._engine.is_reducing() and (
            is_boundary or (self.settings.reduce_every_backward and is_shared)
        )
        if self._is_reducing and is_boundary:
            self._begin_step(by_layer=by_layer is not None)
            self.placement.begin_backward()
        self._was_reduced |= self._is_reducing
        self.has_gradients = True
        if self._is_reducing:
            self._meet_in_backward()
        collector.begin(early=self._is_reducing, by_layer=by_layer)
        if self.weights.active is not None and not follows and by_layer is None:
            self.weights.active.begin("backward")

    def _meet_in_backward(self) -> None:
        # In train_batch ranks reduce once a step, however many micro-batches they have.
        if self.settings.reduce_every_backward and not self.sums_over_ranks:
            self.collectives.meet("the reduction of a backward pass's gradients")

    def _begin_step(self, *, by_layer: bool = False) -> None:
        """Snapshots the hyper-parameters that this step's updates begin with."""
        if self.pipeline.norm.settings.direct:
            self._groups.check(self.param_groups)  # in step() it would be too late
        # A first backward may send layers too early; what it sends must overwrite no weights.
        self.pipeline.begin_step(
            1.0 if self.sums_over_ranks else self.settings.unscale,
            self._read_hyper(),
            hold=self._may_recall and not self.collector.knows(by_layer=by_layer),
        )
        self._step_begun = True

    def _read_hyper(self) -> tuple[Any, ...]:
        self._groups.check_number(self.param_groups)
        return self._hyper.read(self.param_groups, [step + 1 for step in self.steps])

    def _end_micro_batch(self) -> None:
        """A backward that was not followed by a step is over.

        What it began to reduce it must reduce whole: the other ranks do.
        """
        self.collector.complete(consume=self._is_reducing and self.collectives.world_size > 1)

    def end_backward(self) -> None:
        """The autograd engine has finished; more gradients belong to another backward."""
        self.collector.in_backward = False
        if self.weights.active is not None:
            self.weights.active.end()

    def backward_epilogue(self, **kwargs: Any) -> None:
        """DeepSpeed's end of backward: several ranks reduce now what they have left out.

        The others wait in these reductions. Whatever this rank does next, before step(), may be a
        collective in which it would wait for them: the user's own, or a read of state.
        """
        del kwargs
        self.end_backward()
        # torch.autograd.grad on an output looks the same from here, and nothing fires in it: more
        # gradients of this micro-batch may come.
        may_be_over = self._is_announced or self.collector.has_fired
        # In train_batch nothing comes between, and a rank without samples does it in step().
        is_own_affair = self.collectives.world_size == 1 or self.sums_over_ranks
        if self._is_reducing and may_be_over and not is_own_affair:
            self._end_micro_batch()

    def _consume_part(self, gradient: LayerGradient) -> None:
        """What there is of a layer's gradient is reduced into ``held``."""
        state = self.pipeline.layers[gradient.layout.index]
        local = gradient.release()
        assert local is not None
        with self.pipeline.reducing():
            shard = self.pipeline.reduce(state, local)
            if gradient.held is not None:
                self.pipeline.add(shard, gradient.held)
            gradient.held = shard

    def _consume(self, gradient: LayerGradient) -> None:
        """A layer's gradient of this backward is complete (called in one order on all ranks)."""
        state = self.pipeline.layers[gradient.layout.index]
        squares = gradient.squares if gradient.held is None else None
        with self.pipeline.reducing():
            if gradient.local is not None:
                self._consume_part(gradient)
            shard, gradient.held = gradient.held, None
            assert shard is not None
            if self._step_begun:
                self._send(state, shard, squares)
            else:
                gradient.held = shard
        if self._step_begun:
            self.placement.gradient(state.index)

    def _send(
        self, state: LayerState, shard: torch.Tensor, squares: torch.Tensor | None = None
    ) -> None:
        if self.on_reduced_gradient is not None:
            self.on_reduced_gradient(state, shard)
        self.pipeline.send(state, shard, squares)

    @property
    def _may_recall(self) -> bool:
        """Whether a first backward may send layers that it may have to take back."""
        # Other ranks would have to recall the same ones; a direct commit cannot be taken back.
        return self.collectives.world_size == 1 and not self.pipeline.norm.settings.direct

    def _recall(self, gradient: LayerGradient) -> None:
        state = self.pipeline.layers[gradient.layout.index]
        if state.sent:
            self.timer.invalidate()
            self._withdraw(state)

    def _withdraw(self, state: LayerState) -> None:
        self.collector.layers[state.index].held = self.pipeline.withdraw(state)

    # -- forward -------------------------------------------------------------------------------

    def before_use(self, state: LayerState) -> None:
        """The layer's weights are about to be read."""
        self._clean_up_aborted()
        if state.sent and not self.collector.in_backward:
            self.timer.invalidate()
            self._withdraw(state)
        self.timer.wait_begins(state.index, on_cpu=state.updated_by == "cpu")
        self.pipeline.wait(state)
        self.timer.wait_ends(state.index)

    @property
    def is_in_graph(self) -> bool:
        """Whether autograd is running here: a forward now is a recomputation."""
        return self.collector.in_backward and graph_task() != -1

    def begin_forward(self) -> None:
        """The model's forward begins: an aborted backward is cleaned up."""
        self._check_open()
        if self._by_layer:
            return  # one of several, which count as one
        self._clean_up_aborted()
        if torch.is_grad_enabled() and not self.is_in_graph:
            self._restore_views()
        self.timer.begin_forward()

    def _restore_views(self) -> None:
        """Parameters that were put elsewhere since the last step are the training copy again.

        Without gradients they may be: averaged weights are evaluated so.
        """
        moved: list[str] = []
        for state in self.pipeline.layers:
            if isinstance(state.storage, ResidentStorage):
                moved += state.storage.restore_views()
        if moved and not self._has_warned_of_moves:
            self._has_warned_of_moves = True
            logger.warning(
                "%d parameters (%s, ...) were given other memory (parameter.data = ..., "
                "module.to(...)): they are the engine's training copy again, whatever was written "
                "there. Write values with parameter.copy_(...) after engine.synchronize()",
                len(moved),
                moved[0],
            )

    def end_forward(self) -> None:
        """The model's forward is over."""
        if not self._by_layer:
            self.timer.end_forward()

    # -- between steps, and beside other ranks' passes ------------------------------------------

    @property
    def is_by_layer(self) -> bool:
        """Several forwards, or the backward passes of several micro-batches, count as one."""
        return self._by_layer

    @property
    def is_between_steps(self) -> bool:
        """Nothing is kept for the next step, and none is under way."""
        idle = not self.collector.open and not any(s.sent for s in self.pipeline.layers)
        return idle and self.collector.is_empty

    def join_micro_batch(self) -> None:
        """Takes part in the gathers of a micro-batch that other ranks have and this one has not."""
        schedule = self.weights.active
        if schedule is None:
            return
        self.join_forward("train")
        self._begin_backward(follows=True)
        schedule.follow("backward")
        self.end_backward()

    def join_forward(self, kind: Literal["train", "eval"] = "eval") -> None:
        """Takes part in the gathers of a forward that other ranks make."""
        if self.weights.active is not None:
            self.begin_forward()
            self.weights.active.follow(kind)
            for state in self.pipeline.layers:
                self.before_use(state)

    def _clean_up_aborted(self) -> None:
        """Drops what a backward left that an exception of the user's model or hooks has ended.

        It never said that it was over; but it is, where no autograd graph is being run.
        """
        if self._by_layer:
            return  # between two of the graphs that make one backward
        is_open = self.collector.in_backward or self._backward_active_depth > 0
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
        self.discard_gradients()
        self._was_aborted = True
        # Or the step would be taken early, without what was discarded, and so would all later ones.
        self._engine.begin_window()

    def refuse_aborted(self) -> None:
        """Drops what an aborted backward left; there is no step before another backward.

        Raises:
            AbortedBackwardError: the last backward ended with an exception.
        """
        self._clean_up_aborted()
        if self._was_aborted:
            raise AbortedBackwardError(
                "the last micro-batch did not finish, so there is no step to take: its gradients, "
                "and those of the step's earlier ones, were discarded; weights and optimizer "
                "state are those of the last step. Repeat the step from the forward of its first "
                "micro-batch"
            )

    def abandon_step(self) -> None:
        """Not all micro-batches of the step will come: nothing of those that came stays."""
        # What is committed cannot be taken back; the next forward says so.
        if not self.pipeline.is_partly_committed:
            self.timer.invalidate()
            self.discard_gradients()
            # step() by hand would make one of zeros: decay and momentum act.
            self._was_aborted = True

    def discard_gradients(self) -> None:
        """Forgets all gradients since the last step; weights and state are those of that step."""
        for state in self.pipeline.layers:
            if state.sent:
                self.pipeline.discard(state)
        self.collector.discard()
        self.weights.forget()
        # DeepSpeed would take an aborted backward's depth and callback for the next one's.
        self._backward_active_depth = 0
        self.clear_backward_seen_flag()
        self._was_aborted = False
        self.has_gradients = False
        self._step_begun = False
        self._was_reduced = False

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosedError(
                "the engine was used after destroy(): build a new one with hytrain.initialize"
            )
        if self.pipeline.is_torn:
            self.pipeline.cpu.worker.check_error()  # then there is nothing to load into, either
            raise AbortedStepError(
                "the last step() did not finish: some layers have made it and others have not. "
                "Load a checkpoint with engine.load_checkpoint before anything else"
            )
