"""How a step's micro-batches are computed: one after another, or layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from hytrain.errors import HyTrainError, UnsupportedError
from hytrain.layer_major.activations import OffloadedActivations
from hytrain.layer_major.block_calls import BlockCalls
from hytrain.layer_major.graph_cut import NotLayerMajor
from hytrain.layer_major.layer_passes import LayerPasses
from hytrain.layer_major.step import LayerMajorStep
from hytrain.layer_major.validation import Place, SavedBuffers, Validation, buffers_of
from hytrain.optimizer.global_batch import BatchEngine, MicroBatches
from hytrain.optimizer.pass_tracker import PassTracker
from hytrain.optimizer.randomness import MicroBatchRandomness

logger = logging.getLogger(__name__)


class MicroBatchMajor:
    """Forward and backward of one micro-batch after another."""

    def __init__(self, engine: BatchEngine, passes: PassTracker, model: nn.Module) -> None:
        self._engine = engine
        self._passes = passes
        self._switches = TrainingSwitches(model)

    def __call__(self, share: MicroBatches) -> torch.Tensor:
        """Returns this rank's part of the mean loss, float64."""
        with (
            self._switches.turned_off(),
            MicroBatchRandomness(len(share.batches), share.device) as randomness,
        ):
            return self.run(share, randomness)

    def run(self, share: MicroBatches, randomness: MicroBatchRandomness) -> torch.Tensor:
        """Does the same as a call, with random numbers and switches that the caller has set."""
        engine, mean = self._engine, share.mean()
        for left in reversed(range(share.absent)):
            engine.set_gradient_accumulation_boundary(not share.batches and left == 0)
            self._passes.join_micro_batch()
        for number in range(len(share.batches)):
            engine.set_gradient_accumulation_boundary(number + 1 == len(share.batches))
            randomness.choose(number)
            # No name for the output: its logits would stay through backward and the next forward.
            loss = share.weigh(number, share.forward(number, engine), mean)
            engine.backward(loss, scale_wrt_gas=False)
            del loss
        return mean


class LayerMajor:
    """Computes micro-batches layer by layer if the model allows it; else one after another.

    A model's first step is validated: it overwrites no weights before all its checks have passed.
    Whether a rank computes layer by layer is its own affair: layers are reduced in the same order.

    Without a ``store`` the blocks' inputs stay on the device. ``free_gpu_memory`` is called if the
    device's memory is used up, and says what was done.

    Attributes:
        refusal: why the model is computed one micro-batch after another; None while it is not.
    """

    def __init__(
        self,
        engine: BatchEngine,
        passes: PassTracker,
        model: nn.Module,
        store: OffloadedActivations | None,
        free_gpu_memory: Callable[[], str],
    ) -> None:
        self._engine = engine
        self._passes = passes
        self._layers = LayerPasses(passes)
        self._model = model
        self._store = store
        self._free_gpu_memory = free_gpu_memory
        self._calls = BlockCalls(self._layers.blocks, self._layers.names)
        self._micro_batch_major = MicroBatchMajor(engine, passes, model)
        self._switches = TrainingSwitches(model, self._layers.blocks)
        self._changing: list[Place] = []
        """Buffers that a forward changes."""
        self.refusal: str | None = None
        if not self._layers.blocks:
            self._refuse("no stack of blocks was found in it")

    def __call__(self, share: MicroBatches) -> torch.Tensor:
        """Returns this rank's part of the mean loss, float64.

        Raises:
            UnsupportedError: see :meth:`_refuse_late`.
        """
        # A rank without samples has no layers to go through, but others may need its shards.
        if self.refusal is not None or not (share.batches or self._layers.needs_all):
            return self._micro_batch_major(share)
        with (
            self._switches.turned_off(),
            MicroBatchRandomness(len(share.batches), share.device) as randomness,
        ):
            # Gradients that the user has left for this step are its first ones.
            if self._passes.open_step.has_gradients:
                return self._micro_batch_major.run(share, randomness)
            validation: Validation | None = None
            if self._layers.is_first:
                validation = self._begin_validation(share, randomness)
            mean = share.mean()
            run = self._layers.join
            if share.batches:
                run = self._step(share, mean, randomness, validation).run
            is_first = validation is not None
            buffers = SavedBuffers(buffers_of(self._model) if is_first else self._changing)
            reason = self._try(run, validation)
            if reason is None:
                if is_first:
                    self._changing = buffers.changed()
                return mean
            buffers.restore()
            randomness.restart()
            mean = self._micro_batch_major.run(share, randomness)
            # It went well, so it was not the user's code that failed.
            self._refuse(reason)
            return mean

    def _begin_validation(
        self, share: MicroBatches, randomness: MicroBatchRandomness
    ) -> Validation:
        """Runs one plain forward after another for the losses; the user's own errors show here."""
        validation = Validation(self._calls.blocks, self._calls.names)
        buffers = SavedBuffers(buffers_of(self._model))
        mean = share.mean()
        with torch.no_grad():
            for _ in range(share.absent):
                self._passes.join_forward()
            for number in range(len(share.batches)):
                randomness.choose(number)
                with self._engine.watching_reads():
                    output = self._forward(share, number)
                validation.plain_losses.append(share.weigh(number, output, mean))
                del output
        buffers.restore()
        randomness.restart()
        return validation

    def _forward(self, share: MicroBatches, number: int) -> Any:
        with self._engine.autocasting():
            return share.forward(number, self._model)

    def _step(
        self,
        share: MicroBatches,
        mean: torch.Tensor,
        randomness: MicroBatchRandomness,
        validation: Validation | None,
    ) -> LayerMajorStep:
        return LayerMajorStep(
            self._calls,
            [partial(self._forward, share, number) for number in range(len(share.batches))],
            lambda number, output: share.weigh(number, output, mean),
            self._layers,
            self._store,
            randomness,
            share.device,
            validation,
        )

    def _try(self, run: Callable[[], None], validation: Validation | None) -> str | None:
        """Runs the step; if it cannot be run layer by layer, drops all of it, returns the reason.

        The caller then restores buffers and random numbers.
        """
        self._engine.set_gradient_accumulation_boundary(True)
        try:
            self._passes.begin_forward()
            with self._passes.open_step.layer_by_layer():
                run()
            if validation is not None:
                self._layers.agree(validation.check)
            return None
        except BaseException as error:
            is_refusal = isinstance(error, NotLayerMajor)
            if not is_refusal and (validation is None or _is_final(error)):
                self._engine.give_up_forward()
                if isinstance(error, torch.OutOfMemoryError):
                    done = self._free_gpu_memory()
                    raise torch.OutOfMemoryError(f"{error}\n{done}") from error
                raise
            # Whether it is the user's own error shows when the step is computed as usual.
            reason = str(error) if is_refusal else f"{type(error).__name__}: {error}"
        if validation is not None:
            self._layers.fail()
        self._engine.give_up_forward()
        if validation is None:
            self._refuse_late(reason)
        # Nothing of what was begun counts: the step's micro-batches are computed anew.
        self._passes.timer.invalidate()
        self._passes.discard_gradients()
        return reason

    def _refuse_late(self, reason: str) -> None:
        """Checks that a step that is not the first can be begun anew.

        Raises:
            UnsupportedError: layers have been sent, or other ranks are on their way through them.
        """
        if any(state.update.sent for state in self._passes.pipeline.layers):
            why = "Some layers of this step have been sent already"
        elif self._layers.needs_all:
            why = "With ZeRO-3 the other ranks are on their way through the layers"
        else:
            return
        raise UnsupportedError(
            f"this model could be computed layer by layer until now, but {reason}. {why}: set "
            '"hytrain.accumulation" to "micro_batch_major"'
        )

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        logger.warning(
            'this model cannot be computed layer by layer ("hytrain.accumulation": "layer_major"), '
            "and is computed one micro-batch after another from now on: %s",
            reason,
        )


def _is_final(error: BaseException) -> bool:
    """Whether computing the step as usual would not avoid the error."""
    final = HyTrainError, torch.OutOfMemoryError
    return isinstance(error, final) or not isinstance(error, Exception)


class TrainingSwitches:
    """Switches of key-value caches and of blocks' own checkpointing, turned off during a step.

    Every step asks, while the GPU waits for it. So the modules that have a switch at all are found
    once, which takes milliseconds, and only its state is read each time.
    """

    def __init__(self, model: nn.Module, recomputed: Iterable[nn.Module] = ()) -> None:
        """
        Args:
            model: with ``config.use_cache`` on it or its parts: a cache is of no use to a loss, and
                the attention of a block that is computed again would find its own keys in it.
            recomputed: blocks that are recomputed as a whole: their own checkpointing would compute
                them a third time.
        """
        self._with_config = [module for module in model.modules() if hasattr(module, "config")]
        self._checkpointing = [
            module
            for block in recomputed
            for module in block.modules()
            if hasattr(module, "gradient_checkpointing")
        ]

    @contextmanager
    def turned_off(self) -> Generator[None]:
        """Turns them off for the block; those that were on are turned on again afterwards."""
        configs: list[Any] = [vars(module).get("config") for module in self._with_config]
        # Most modules of a model share one configuration.
        owners = {id(config): config for config in configs}.values()
        undo = [(owner, "use_cache") for owner in owners if _is_on(owner, "use_cache")]
        undo += [
            (module, "gradient_checkpointing")
            for module in self._checkpointing
            if _is_on(module, "gradient_checkpointing")
        ]
        for owner, name in undo:
            setattr(owner, name, False)
        try:
            yield
        finally:
            for owner, name in undo:
                setattr(owner, name, True)


def _is_on(owner: Any, name: str) -> bool:
    """Whether it is true and the owner's own: a class's default must not be changed."""
    return getattr(owner, "__dict__", {}).get(name) is True
