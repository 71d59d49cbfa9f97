"""The engine: overrides of DeepSpeed's, no algorithm of its own."""

from __future__ import annotations

import atexit
import itertools
import logging
import sys
import weakref
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, cast

import torch

from hytrain.config import HyTrainConfig
from hytrain.engine.build import EngineBuild
from hytrain.engine.hook_snapshot import AddedHooks
from hytrain.engine.parameter_access import StateAccess
from hytrain.engine.plan_watch import PlanReport, PlanWatch
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import ConfigError, HyTrainError
from hytrain.formats.plan_file import read_plan
from hytrain.layer_major.accumulation import (
    AccumulatingEngine,
    LayerMajor,
    MicroBatchMajor,
    make_accumulation,
)
from hytrain.optimizer.batches import DealtSizes
from hytrain.optimizer.global_batch import BatchEngine, NumValid, train_global_batch, valid_labels
from hytrain.optimizer.pass_guide import PassGuide
from hytrain.optimizer.statistics import StepStatistics
from hytrain.placement.records import Decision
from hytrain.zero3.forward_hooks import LayerGuards

logger = logging.getLogger(__name__)


class HyTrainEngine(EngineBuild):
    """DeepSpeed's engine with updates that overlap backward and the next forward.

    Everything that DeepSpeed's engine offers works as there; in addition :meth:`synchronize`,
    :meth:`fp32_state_dict` and :meth:`step_statistics`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes DeepSpeed's arguments; ``config`` must have a "hytrain" section."""
        section = HyTrainConfig.from_deepspeed(kwargs["config"])
        if section is None:
            raise ConfigError('the configuration has no "hytrain" section')
        # nn.Module's __init__ has not run: plain attributes are safe, modules are not.
        object.__setattr__(self, "hytrain_config", section)
        object.__setattr__(self, "_guards", None)
        hooks = AddedHooks(kwargs["model"])
        object.__setattr__(self, "_added_hooks", hooks)
        try:
            self._build(*args, **kwargs)
        except BaseException:
            if self._collectives is not None:
                self._collectives.close()
            # The model can be given to another engine: nothing of this one is left on it.
            optimizer = vars(self).get("optimizer")
            if isinstance(optimizer, HyTrainZeroOptimizer):
                optimizer.destroy()
            hooks.note()
            hooks.remove()
            raise
        hooks.note()

    def _build(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.optimizer, HyTrainZeroOptimizer):
            raise ConfigError(
                'no optimizer was given: add an "optimizer" section to the configuration or pass '
                "optimizer=torch.optim.AdamW(...)"
            )
        self._guards = LayerGuards(self._model, PassGuide(self.optimizer))
        self.optimizer.weights.when_closed(self._guards.close)
        access = StateAccess(self.optimizer, self._model.parameters())
        self.optimizer.weights.when_closed(access.detach)
        self._watch_plan(self.optimizer)
        self._unblock_throughput_timer(kwargs["config"])
        _close_at_exit(self.optimizer)

    _added_hooks: AddedHooks
    _in_forward = False
    _accumulation: MicroBatchMajor | LayerMajor | None = None
    _plan_watch: PlanWatch | None = None

    def _watch_plan(self, optimizer: HyTrainZeroOptimizer) -> None:
        name = self.hytrain_config.plan
        if name is not None:  # initialize() has made it this file's path, and checked the plan
            device = optimizer.pipeline.streams.device
            self._plan_watch = PlanWatch(read_plan(Path(name)), optimizer.collectives, device)

    def _unblock_throughput_timer(self, config: Mapping[str, Any]) -> None:
        """DeepSpeed's throughput timer waits for the whole device twice a step, by default.

        Updates on the GPU could not run beside the next forward then, and the host would have
        nothing queued. A configuration that asks for it by name gets it.
        """
        asked = config.get("timers", {}).get("throughput", {})
        if "synchronized" not in asked:
            self.tput_timer.config.synchronized = False

    # -- training ------------------------------------------------------------------------------

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's forward; each layer's waits for that layer's newest weights only.

        Raises:
            torch.OutOfMemoryError: the device's memory is used up. Where k is solved, state has
                been moved off the device by then: the forward can be repeated, and a call of
                :meth:`train_batch` as a whole.
        """
        optimizer = self.open_optimizer()
        optimizer.begin_forward()
        try:
            with self.watching_reads():
                return super().forward(*inputs, **kwargs)
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(f"{error}\n{optimizer.make_gpu_room()}") from error

    def backward(self, loss: Any, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Any:
        """As DeepSpeed's; several ranks are told of an exception, as they wait for this one.

        Raises:
            RankFailedError: another rank has failed; the message has its error.
            OutOfStepError: the ranks have made different numbers of backward passes.
        """
        with self.open_optimizer().collectives.telling():
            return super().backward(loss, retain_graph, scale_wrt_gas)

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """The end of a micro-batch; at the last one of a step the optimizer's.

        Raises:
            AbortedBackwardError: the last backward ended with an exception; the next micro-batch is
                the first of the step.
            RankFailedError: another rank has failed; the message has its error.
            OutOfStepError: the ranks have made different numbers of backward passes.
        """
        optimizer = self.open_optimizer()
        optimizer.refuse_aborted()
        steps = self.global_steps
        with optimizer.collectives.telling():
            super().step(lr_kwargs)
            if self._plan_watch is not None and self.global_steps != steps:
                activations = 0 if self._accumulation is None else self._accumulation.host_bytes
                self._plan_watch.after_step(optimizer.rank_state(activations))

    def zero_grad(self) -> None:
        """Drops the gradients of the step's micro-batches so far, in whichever stage.

        A collective, where there are any. A step() right after it is skipped: nothing is updated.

        Raises:
            ConfigError: a backward is running, or updates are committed directly and have begun.
        """
        # It looks at every parameter's gradient, and reads no weight.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            super().zero_grad()
        optimizer = self.open_optimizer()
        with optimizer.collectives.telling():
            optimizer.zero_grad()

    def train_batch(
        self, data_iter: Iterator[Any], num_valid: NumValid | None = None
    ) -> torch.Tensor:
        """One step over a global batch, however unequally the ranks share it; a collective.

        The gradient is that of the mean over the valid tokens of the *global* batch, as on one GPU
        that computes all of it. Gradients are reduced once, in the last micro-batch's backward, so
        that ranks may have different numbers of micro-batches; until then a rank keeps the whole
        unreduced gradient (2 bytes a parameter in bf16). Under ZeRO-3 they are reduced in every
        backward: a rank with fewer micro-batches than another takes part in the others' gathers
        and reductions with nothing of its own. With ``"hytrain.accumulation": "layer_major"`` all
        micro-batches pass through one layer before the next, and each layer is reduced after *its*
        last one: no unreduced gradient is kept, but in the first step.

        Each micro-batch draws its random numbers from a stream of its own.

        Args:
            data_iter: gives this rank's next micro-batches, on the device: as many as
                ``"hytrain.batch_sizes"`` and ``"micro_batch_sizes"`` make, or
                ``gradient_accumulation_steps`` without them. A mapping is passed to the model by
                name, anything else by position.
            num_valid: terms of a micro-batch's mean loss; default: its labels that are not -100,
                without the first of each sample, as causal language models count.

        Returns:
            The global batch's mean loss before the update, fp32, on the device.

        Raises:
            UnsupportedError: the loss, or over what it is a mean, cannot be told.
            StopIteration: the iterator has no further step.
            Exception: the model's. Its step has left nothing behind: weights and state are those of
                the last one, and the next call begins a step of its own.
        """
        optimizer = self.open_optimizer()
        if self._accumulation is None:
            self._accumulation = make_accumulation(
                self.hytrain_config, cast(AccumulatingEngine, self), self._model, optimizer
            )
        shares = self.hytrain_config.batch_shares()
        steps = int(self.gradient_accumulation_steps())
        count = steps
        if shares is not None:
            if self._dealt is None:
                self._dealt = DealtSizes(shares, optimizer.collectives.rank)
            count, data_iter = len(self._dealt.sizes), self._dealt.watch(data_iter)
        most = count
        if shares is not None and int(self.zero_optimization_stage()) == 3:
            most = max(len(shares.micro_batches(each)) for each in range(len(shares.sizes)))
        steps_before = self.micro_steps // steps
        self._in_train_batch = True
        try:
            with optimizer.collectives.telling(), optimizer.summing_over_ranks():
                loss = train_global_batch(
                    cast(BatchEngine, self),
                    data_iter,
                    count,
                    num_valid or valid_labels,
                    optimizer.collectives.all_reduce,
                    optimizer.pipeline.streams.device,
                    self._accumulation,
                    most - count,
                )
        finally:
            self._in_train_batch = False
        self.micro_steps = (steps_before + 1) * steps  # also where some were made by hand before
        return loss

    def _forward_prologue(self, inputs: Any, kwargs: Any) -> Any:
        """DeepSpeed's, whose timers know one forward at a time: of several, the first counts."""
        if self._in_forward and self.open_optimizer().is_by_layer:
            return None
        self._in_forward = True
        return super()._forward_prologue(inputs, kwargs)

    def _forward_epilogue(self) -> None:
        if self._in_forward:
            self._in_forward = False
            super()._forward_epilogue()

    @contextmanager
    def watching_reads(self) -> Generator[None]:
        """Around a forward: where it is the first, what autograd saves of weights is seen."""
        assert self._guards is not None
        with self._guards.watching():
            yield

    def join_micro_batch(self) -> None:
        """Takes part in a micro-batch that other ranks have and this one has not; a collective."""
        self.open_optimizer().join_micro_batch()

    def give_up_forward(self) -> None:
        """A forward that has begun will not end."""
        self._forward_epilogue()

    def abandon_step(self) -> None:
        """Not all micro-batches of the step will come: nothing of those that came stays."""
        self.open_optimizer().abandon_step()

    def train_batch_size(self) -> int:
        """Samples of a step, all ranks together."""
        shares = self.hytrain_config.batch_shares()
        return int(super().train_batch_size()) if shares is None else shares.global_batch

    def step_statistics(self) -> StepStatistics:
        """What the last step took on this rank.

        Raises:
            HyTrainError: no step has been made.
        """
        return self.open_optimizer().step_statistics()

    def plan_report(self) -> PlanReport:
        """What ``"hytrain.plan"`` predicted beside what the last steps took; a collective.

        After the first steps that no layer moved in, rank 0 logs its table by itself.

        Raises:
            HyTrainError: there is no plan, or too few steps have been made.
        """
        if self._plan_watch is None:
            raise HyTrainError('there is no plan to compare with: set "hytrain.plan"')
        return self._plan_watch.report()

    def set_gpu_fraction(self, value: float | Literal["solve"]) -> None:
        """Changes k between two steps: state moves while training goes on.

        Args:
            value: share of the layers, counted from the first, whose state shall be on the GPU;
                "solve" lets the solver decide from the next step on.

        Raises:
            ConfigError: called between backward and step, or the share is out of range or does
                not fit in memory.
            MemoryBudgetError: no placement fits the memory that there is now.
        """
        self.open_optimizer().set_gpu_fraction(value)

    def placement_decisions(self, since: int = 0) -> list[Decision]:
        """This rank's decisions about k, oldest first, each with its reason.

        Args:
            since: how many to leave out at the beginning.
        """
        return self.open_optimizer().placement.decisions[since:]

    def synchronize(self) -> None:
        """Waits for every update: all weights are the newest, readable from any stream.

        A collective: ranks gather each other's updates here, or where weights are used. Weights
        whose step was not taken yet are those of the last step again. Called by the engine itself
        before ``state_dict``, checkpoints and ``eval``.
        """
        self.open_optimizer().synchronize()

    # nn.Module's return the module, DeepSpeed's return nothing.
    def train(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, mode: bool = True
    ) -> HyTrainEngine:
        """As nn.Module.train; switching to evaluation synchronizes first."""
        if not mode and self.__dict__.get("_guards") is not None:
            self.synchronize()
        super().train(mode)
        return self

    def eval(self) -> HyTrainEngine:  # pyright: ignore[reportIncompatibleMethodOverride]
        """As nn.Module.eval; synchronizes first. (DeepSpeed's does not go through train().)"""
        return self.train(False)

    # -- end -------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Stops the update worker and frees pinned memory; the engine cannot be used any more.

        Below ZeRO-3 the model keeps its weights: those of the last step, on every rank. A
        collective, where that step's updates have not been gathered yet; on the way out of an
        exception, when other ranks may not come, they are left as they are.
        """
        optimizer = vars(self).get("optimizer")
        if isinstance(optimizer, HyTrainZeroOptimizer) and sys.exc_info()[1] is None:
            optimizer.finish_weights()
        self._added_hooks.remove()
        if self._accumulation is not None:
            self._accumulation.close()
        super().destroy()


_built: weakref.WeakValueDictionary[int, HyTrainZeroOptimizer] = weakref.WeakValueDictionary()
"""In the order of their engines."""
_number = itertools.count()


def _close_at_exit(optimizer: HyTrainZeroOptimizer) -> None:
    """Stops the worker when the interpreter ends without destroy(): it would abort otherwise.

    One function for all engines: a process keeps what it calls at its end, and builds many.
    """
    number = next(_number)
    if number == 0:
        atexit.register(_close_all)
    _built[number] = optimizer


def _close_all() -> None:
    # The last one first; one that cannot be closed does not keep the others from it.
    with ExitStack() as stack:
        for optimizer in list(_built.values()):
            stack.callback(optimizer.destroy)
            stack.callback(optimizer.collectives.leave)
