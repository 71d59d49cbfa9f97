"""The ways to compute a step of several micro-batches, in one process, with one engine.

All of hytrain's ways share an engine, so that they share weights, host memory and threads, and can
take turns: what differs between two of them is the way alone.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import torch

import hytrain
from experiments.common.model import Batch, build_batches, build_model
from experiments.common.records import Entry, Job, Json, Measurement, Workload
from experiments.common.systems.base import loss_of
from experiments.common.systems.hytrain import config_of
from hytrain.layer_major.accumulation import make_accumulation
from hytrain.layer_major.layer_passes import LayerPasses
from hytrain.model.layer_state import LayerState

CHECKPOINTING = {"use_reentrant": False}


class Mode(abc.ABC):
    """One way."""

    label: str
    recomputes: bool
    """Whether what lies inside the layers is computed again in backward."""

    @abc.abstractmethod
    def step(self) -> torch.Tensor:
        """A step; returns its loss without waiting for it."""

    def check(self) -> None:
        """Raises where the steps were not computed in this way after all."""
        return


class Bare(Mode):
    """Forward and backward only: gradients add up in ``.grad`` and are dropped."""

    def __init__(self, workload: Workload, micro_batches: int) -> None:
        self._batches = build_batches(workload)[:micro_batches]
        self._model: Any = build_model(workload, torch.bfloat16)

    def variant(self, *, recomputes: bool) -> Mode:
        """With every block checkpointed, or none."""
        return _BareVariant(self, recomputes)

    label = "forward and backward only"
    recomputes = False

    def step(self) -> torch.Tensor:
        _checkpoint(self._model, self.recomputes)
        total = torch.zeros((), device=self._batches[0]["input_ids"].device)
        for batch in self._batches:
            loss = loss_of(self._model, batch) / len(self._batches)
            loss.backward()
            total += loss.detach()
        for parameter in self._model.parameters():
            parameter.grad = None
        return total


class _BareVariant(Mode):
    def __init__(self, bare: Bare, recomputes: bool) -> None:
        self._bare = bare
        self.recomputes = recomputes
        self.label = Bare.label + (", checkpointed blocks" if recomputes else "")

    def step(self) -> torch.Tensor:
        self._bare.recomputes = self.recomputes
        return self._bare.step()


class Engine:
    """One engine with all optimizer state on the host (or as ``gpu_fraction`` says)."""

    def __init__(
        self, workload: Workload, micro_batches: int, *, gpu_fraction: float, clip: float
    ) -> None:
        self._batches = build_batches(workload)[:micro_batches]
        entry = Entry(
            label="hytrain",
            system="hytrain",
            clip=clip,
            options={"gpu_fraction": gpu_fraction, "accumulation": micro_batches},
        )
        measurement = Measurement(windows=1, steps=1, warmup=1)
        config = config_of(Job(entry=entry, workload=workload, measurement=measurement))
        self.model: Any = build_model(workload, torch.bfloat16)
        self.engine: Any = hytrain.initialize(
            model=self.model, model_parameters=self.model.parameters(), config=config
        )[0]

    def accumulation(self, **keys: str) -> Any:
        """What the engine would use with these keys in its "hytrain" section."""
        config = self.engine.hytrain_config.model_copy(update=keys)
        optimizer = self.engine.optimizer
        passes = LayerPasses(optimizer.passes, optimizer.free_gpu_memory)
        device = optimizer.pipeline.streams.device
        return make_accumulation(config, self.engine, self.model, passes, device)

    def step(self, accumulation: Any) -> torch.Tensor:
        """``engine.train_batch`` in one of the ways."""
        self.engine.batch_training.accumulation = accumulation
        batches: Iterator[Batch] = iter(self._batches)
        return self.engine.train_batch(batches)

    def statistics(self) -> Json:
        """Of the last step."""
        row = self.engine.step_statistics()
        names = ("update_seconds", "exposed_seconds", "clip_coefficient")
        return {name: getattr(row, name) for name in names}

    def gradients(self, mode: Mode) -> list[torch.Tensor]:
        """A step's reduced gradients by layer, at a learning rate of 0: no weight moves."""
        found: dict[int, torch.Tensor] = {}

        def keep(state: LayerState, shard: torch.Tensor) -> None:
            found[state.index] = shard.detach().clone()

        optimizer = self.engine.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        optimizer.passes.on_reduced_gradient = keep
        try:
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            mode.step()
        finally:
            optimizer.passes.on_reduced_gradient = None
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        # Layers leave in another order layer by layer.
        return [found[index] for index in sorted(found)]


class MicroBatchMajor(Mode):
    """One micro-batch after another."""

    def __init__(self, engine: Engine, *, recomputes: bool) -> None:
        self._engine = engine
        self._accumulation = engine.accumulation(accumulation="micro_batch_major")
        self.recomputes = recomputes
        self.label = "micro-batch-major" + (", checkpointed blocks" if recomputes else "")

    def step(self) -> torch.Tensor:
        _checkpoint(self._engine.model, self.recomputes)
        return self._engine.step(self._accumulation)


class LayerMajor(Mode):
    """All micro-batches through one layer before the next."""

    recomputes = True

    def __init__(self, engine: Engine, activations: str) -> None:
        self._engine = engine
        self._accumulation = engine.accumulation(
            accumulation="layer_major", activations=activations
        )
        self.label = f"layer-major, activations: {activations}"

    def step(self) -> torch.Tensor:
        _checkpoint(self._engine.model, False)
        return self._engine.step(self._accumulation)

    def check(self) -> None:
        if self._accumulation.refusal is not None:
            raise RuntimeError(f"{self.label} fell back: {self._accumulation.refusal}")


def _checkpoint(model: Any, wanted: bool) -> None:
    if wanted:
        model.gradient_checkpointing_enable(CHECKPOINTING)
    else:
        model.gradient_checkpointing_disable()
