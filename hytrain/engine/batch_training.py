"""``engine.train_batch``: one step over a global batch that the ranks share, equally or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch

from hytrain.config import HyTrainConfig
from hytrain.engine.deepspeed_internals import DeepSpeedEngine
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import OutOfStepError, RankFailedError
from hytrain.layer_major.accumulation import LayerMajor, MicroBatchMajor
from hytrain.layer_major.activations import OffloadedActivations
from hytrain.optimizer.global_batch import MicroBatches, NumValid
from hytrain.optimizer.unequal_batches import DealtSizes


class BatchTraining:
    """Steps over a global batch: this rank's micro-batches, and how they are run."""

    def __init__(
        self, engine: DeepSpeedEngine, config: HyTrainConfig, optimizer: HyTrainZeroOptimizer
    ) -> None:
        self._engine = engine
        self._optimizer = optimizer
        shares = config.batch_shares()
        self._config = config
        rank = optimizer.collectives.rank
        self._dealt = None if shares is None else DealtSizes(shares, rank)
        self._activations: OffloadedActivations | None = None
        self.accumulation: MicroBatchMajor | LayerMajor | None = None
        """How micro-batches are computed; None before the first step."""

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that activations have taken."""
        return 0 if self._activations is None else self._activations.host_bytes

    def train(self, data_iter: Iterator[Any], num_valid: NumValid) -> torch.Tensor:
        """Makes one step; see :meth:`HyTrainEngine.train_batch`."""
        engine, optimizer = self._engine, self._optimizer
        passes = optimizer.passes
        if self.accumulation is None:
            self.accumulation = self._make_accumulation()
        steps = int(engine.gradient_accumulation_steps())
        count = most = steps
        if self._dealt is not None:
            count, data_iter = len(self._dealt.sizes), self._dealt.watch(data_iter)
            most = self._config.micro_batches(
                optimizer.collectives.rank,
                stage=int(self._engine.zero_optimization_stage()),
                accumulation=steps,
            )
        windows_before, steps_before = engine.micro_steps // steps, engine.global_steps
        try:
            with optimizer.collectives.reporting_failures(), passes.summing_over_ranks():
                batches = [next(data_iter) for _ in range(count)]
                return self._make_step(self.accumulation, batches, num_valid, most - count)
        finally:
            # Also if engine.backward() has counted some before, and if engine.step() raises the
            # error of an asynchronous save.
            if engine.global_steps != steps_before:
                engine.micro_steps = (windows_before + 1) * steps

    def _make_step(
        self,
        accumulate: MicroBatchMajor | LayerMajor,
        batches: Sequence[Any],
        num_valid: NumValid,
        absent: int,
    ) -> torch.Tensor:
        """Runs the step; returns the global mean loss, NaN if none of its tokens is valid."""
        engine: Any = self._engine
        passes = self._optimizer.passes
        device, sum_over_ranks = passes.pipeline.streams.device, passes.collectives.all_reduce
        counts = [torch.as_tensor(num_valid(batch), device=device).double() for batch in batches]
        total = torch.stack(counts).sum() if counts else torch.zeros((), device=device).double()
        sum_over_ranks(total)
        divisor = total.clamp(min=1.0)
        weights, steps_before = [valid / divisor for valid in counts], engine.global_steps
        try:
            mean = accumulate(MicroBatches(batches, weights, device, absent))
            engine.set_gradient_accumulation_boundary(True)
            engine.step()
        except (RankFailedError, OutOfStepError):
            raise  # no collective with the other ranks can be waited for any more
        except BaseException:
            # Otherwise this step's gradients would be added to the next one's. (An asynchronous
            # save's error is raised after a step that was made.)
            if engine.global_steps == steps_before:
                passes.abandon_step()
            raise
        finally:
            engine.set_gradient_accumulation_boundary(None)
        sum_over_ranks(mean)
        return torch.where(total > 0, mean, torch.full_like(mean, torch.nan)).float()

    def _make_accumulation(self) -> MicroBatchMajor | LayerMajor:
        engine, optimizer = cast(Any, self._engine), self._optimizer
        if self._config.accumulation == "micro_batch_major":
            return MicroBatchMajor(engine, optimizer.passes, engine.module)
        if self._config.activations == "offload":
            self._activations = OffloadedActivations(optimizer.pipeline.streams.device)
        return LayerMajor(
            engine, optimizer.passes, engine.module, self._activations, optimizer.free_gpu_memory
        )

    def close(self) -> None:
        """Frees the memory of activations."""
        if self._activations is not None:
            self._activations.close()
