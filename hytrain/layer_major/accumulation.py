"""How a step's micro-batches are computed: one after another, or layer by layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from hytrain.config import HyTrainConfig
from hytrain.errors import HyTrainError, UnsupportedError
from hytrain.layer_major.activation_offload import OffloadedActivations
from hytrain.layer_major.activations import ActivationStore, KeptActivations
from hytrain.layer_major.block_calls import BlockCalls
from hytrain.layer_major.graph_cut import NotLayerMajor
from hytrain.layer_major.layer_passes import LayerPasses
from hytrain.layer_major.step import LayerMajorStep, Work
from hytrain.layer_major.validation import Validation
from hytrain.model.model_switches import TrainingSwitches
from hytrain.optimizer.global_batch import BatchEngine, MicroBatches, micro_batch_major
from hytrain.optimizer.randomness import MicroBatchRandomness

logger = logging.getLogger(__name__)


class AccumulatingEngine(BatchEngine, Protocol):
    """An engine that computes forwards otherwise than by calling it."""

    def watching_reads(self) -> AbstractContextManager[None]:
        """Around the model's forward: where it is the first, its reads of weights are seen."""
        ...

    def autocasting(self) -> AbstractContextManager[None]:
        """Around a forward that does not come past the engine: autocast where it is asked for."""
        ...

    def give_up_forward(self) -> None:
        """A forward that has begun will not end."""
        ...


class MicroBatchMajor:
    """One micro-batch after another."""

    host_bytes = 0
    """Host memory that activations have taken."""

    def __init__(self, engine: BatchEngine, model: nn.Module) -> None:
        self._engine = engine
        self._switches = TrainingSwitches(model)

    def __call__(self, share: MicroBatches) -> torch.Tensor:
        """See :data:`~hytrain.optimizer.global_batch.Accumulate`."""
        with (
            self._switches.turned_off(),
            MicroBatchRandomness(len(share.batches), share.device) as randomness,
        ):
            return micro_batch_major(self._engine, share, randomness)

    def close(self) -> None:
        """Nothing to give back."""


class LayerMajor:
    """Layer by layer, where the model can be computed so; otherwise one after another.

    A model's first step is validated: it overwrites no weights before all its checks have passed.
    Whether a rank computes layer by layer is its own affair: layers are reduced in the same order.

    Attributes:
        refusal: why the model is computed one micro-batch after another; None while it is not.
    """

    def __init__(
        self,
        engine: AccumulatingEngine,
        model: nn.Module,
        passes: LayerPasses,
        store: ActivationStore,
    ) -> None:
        """
        Args:
            engine: computes one micro-batch after another, where it comes to that.
            model: the user's.
            passes: of the engine's optimizer.
            store: keeps the blocks' inputs.
        """
        self._engine = engine
        self._model = model
        self._passes = passes
        self._store = store
        self._calls = BlockCalls(self._passes.blocks, self._passes.names)
        self._switches = TrainingSwitches(model)
        self._switches_by_layer = TrainingSwitches(model, self._passes.blocks)
        self.refusal: str | None = None
        if not self._passes.blocks:
            self._refuse("no stack of blocks was found in it")

    @property
    def host_bytes(self) -> int:
        """Host memory that activations have taken."""
        return self._store.host_bytes

    def __call__(self, share: MicroBatches) -> torch.Tensor:
        """See :data:`~hytrain.optimizer.global_batch.Accumulate`.

        Raises:
            UnsupportedError: the model has become one that cannot be computed so, and was noticed
                to be when some of its layers had been sent, or other ranks compute it so (ZeRO-3).
        """
        # A rank without samples has no layers to go through, but others may need its shards.
        by_layer = self.refusal is None and (bool(share.batches) or self._passes.needs_all)
        with (
            (self._switches_by_layer if by_layer else self._switches).turned_off(),
            MicroBatchRandomness(len(share.batches), share.device) as randomness,
        ):
            # Gradients that the user has left for this step are its first ones.
            if not by_layer or not self._passes.can_begin:
                return micro_batch_major(self._engine, share, randomness)
            validation: Validation | None = None
            if self._passes.is_first:
                validation = self._begin_validation(share, randomness)
            mean = share.mean()
            run = self._passes.join
            if share.batches:
                run = self._step(share, mean, randomness, validation).run
            reason = self._try(run, validation)
            if reason is None:
                return mean
            randomness.restart()
            mean = micro_batch_major(self._engine, share, randomness)
            # It went well, so it was not the user's code that failed.
            self._refuse(reason)
            return mean

    def _begin_validation(
        self, share: MicroBatches, randomness: MicroBatchRandomness
    ) -> Validation:
        """One plain forward after another, for their losses; an error of the user's shows here."""
        validation = Validation(self._model, self._calls.blocks, self._calls.names)
        mean = share.mean()
        with torch.no_grad():
            for _ in range(share.absent):
                self._passes.join_plain_forward()
            for number in range(len(share.batches)):
                randomness.choose(number)
                with self._engine.watching_reads():
                    output = self._forward(share, number)
                validation.plain_losses.append(share.weigh(number, output, mean))
                del output
        validation.undo()
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
        def work(number: int) -> Work:
            return Work(
                lambda: self._forward(share, number),
                lambda output: share.weigh(number, output, mean),
            )

        return LayerMajorStep(
            self._calls,
            [work(number) for number in range(len(share.batches))],
            self._passes,
            self._store,
            randomness,
            share.device,
            validation,
        )

    def _try(self, run: Callable[[], None], validation: Validation | None) -> str | None:
        """Runs the step; returns why it cannot be run so, with everything as before it."""
        self._engine.set_gradient_accumulation_boundary(True)
        try:
            run()
            if validation is not None:
                self._passes.agree(validation.check)
            return None
        except NotLayerMajor as error:
            reason = str(error)
        except torch.OutOfMemoryError as error:
            self._give_up()
            done = self._passes.free_gpu_memory()
            raise torch.OutOfMemoryError(f"{error}\n{done}") from error
        except HyTrainError:
            self._give_up()
            raise
        except Exception as error:
            if validation is None:
                self._give_up()
                raise
            # Whether it is the user's own error shows where the step is computed as usual.
            reason = f"{type(error).__name__}: {error}"
        except BaseException:
            self._give_up()
            raise
        if validation is not None:
            self._passes.fail()
        self._give_up()
        if validation is None:
            self._refuse_late(reason)
        else:
            validation.undo()
        self._passes.drop()
        return reason

    def _refuse_late(self, reason: str) -> None:
        """A step that is not the first can be begun anew only while it is this rank's own affair.

        Raises:
            UnsupportedError: it is not.
        """
        if self._passes.has_sent:
            why = "Some layers of this step have been sent already"
        elif self._passes.needs_all:
            why = "With ZeRO-3 the other ranks are on their way through the layers"
        else:
            return
        raise UnsupportedError(
            f"this model could be computed layer by layer until now, but {reason}. {why}: set "
            '"hytrain.accumulation" to "micro_batch_major"'
        )

    def _give_up(self) -> None:
        self._passes.leave()
        self._engine.give_up_forward()

    def close(self) -> None:
        """Gives the memory of the activations back. May be called twice."""
        self._store.close()

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        logger.warning(
            'this model cannot be computed layer by layer ("hytrain.accumulation": "layer_major"), '
            "and is computed one micro-batch after another from now on: %s",
            reason,
        )


def make_accumulation(
    config: HyTrainConfig,
    engine: AccumulatingEngine,
    model: nn.Module,
    passes: LayerPasses,
    device: torch.device,
) -> MicroBatchMajor | LayerMajor:
    """What the configuration asks for."""
    if config.accumulation == "micro_batch_major":
        return MicroBatchMajor(engine, model)
    offloads = config.activations == "offload"
    store = OffloadedActivations(device) if offloads else KeptActivations()
    return LayerMajor(engine, model, passes, store)
