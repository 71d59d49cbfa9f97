"""``engine.train_batch``: one step over a global batch that the ranks share, equally or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from hytrain.config import HyTrainConfig
from hytrain.engine.deepspeed_internals import DeepSpeedEngine
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.layer_major.accumulation import LayerMajor, MicroBatchMajor
from hytrain.layer_major.activations import OffloadedActivations
from hytrain.optimizer.global_batch import BatchEngine, NumValid, train_global_batch
from hytrain.optimizer.unequal_batches import DealtSizes


class BatchTraining:
    """Steps over a global batch: this rank's micro-batches, and how they are run."""

    def __init__(
        self,
        engine: DeepSpeedEngine,
        config: HyTrainConfig,
        optimizer: Callable[[], HyTrainZeroOptimizer],
    ) -> None:
        """The engine may still be under construction; ``optimizer`` gives its own, once built."""
        self._engine = engine
        self._optimizer = optimizer
        self._shares = config.batch_shares()
        self._config = config
        self._dealt: DealtSizes | None = None
        self._activations: OffloadedActivations | None = None
        self.accumulation: MicroBatchMajor | LayerMajor | None = None
        """How micro-batches are computed; None before the first step."""
        self.is_running = False
        """A step is under way."""

    @property
    def host_bytes(self) -> int:
        """Host memory that activations have taken."""
        return 0 if self._activations is None else self._activations.host_bytes

    @property
    def samples(self) -> int | None:
        """Samples of a step, all ranks together; None where every rank has as many."""
        return None if self._shares is None else self._shares.global_batch

    def train(self, data_iter: Iterator[Any], num_valid: NumValid) -> torch.Tensor:
        """One step; see :meth:`HyTrainEngine.train_batch`."""
        engine = self._engine
        optimizer = self._optimizer()
        if self.accumulation is None:
            self.accumulation = self._make_accumulation()
        steps = int(engine.gradient_accumulation_steps())
        count = most = steps
        if self._shares is not None:
            if self._dealt is None:
                self._dealt = DealtSizes(self._shares, optimizer.collectives.rank)
            count, data_iter = len(self._dealt.sizes), self._dealt.watch(data_iter)
            most = self._most_micro_batches(count)
        steps_before = engine.micro_steps // steps
        self.is_running = True
        try:
            passes = optimizer.passes
            with optimizer.collectives.reporting_failures(), passes.summing_over_ranks():
                loss = train_global_batch(
                    cast(BatchEngine, engine),
                    passes,
                    data_iter,
                    count,
                    num_valid,
                    self.accumulation,
                    most - count,
                )
        finally:
            self.is_running = False
        # Also where engine.backward() made some before.
        engine.micro_steps = (steps_before + 1) * steps
        return loss

    def _make_accumulation(self) -> MicroBatchMajor | LayerMajor:
        engine, optimizer = cast(Any, self._engine), self._optimizer()
        if self._config.accumulation == "micro_batch_major":
            return MicroBatchMajor(engine, optimizer.passes, engine.module)
        if self._config.activations == "offload":
            self._activations = OffloadedActivations(optimizer.pipeline.streams.device)
        return LayerMajor(
            engine, optimizer.passes, engine.module, self._activations, optimizer.free_gpu_memory
        )

    def _most_micro_batches(self, own: int) -> int:
        """Of any rank under ZeRO-3, where all take part in all of them; else this rank's own."""
        if self._shares is None or int(self._engine.zero_optimization_stage()) != 3:
            return own
        return max(len(self._shares.micro_batches(rank)) for rank in range(len(self._shares.sizes)))

    def close(self) -> None:
        """Gives the memory of activations back."""
        if self._activations is not None:
            self._activations.close()
