"""What the DeepSpeed systems share: the config's common part, and the training step."""

from __future__ import annotations

import copy

import deepspeed
import torch

from experiments.common.model import Batch, MakeModel
from experiments.common.records import Job, Json
from experiments.common.systems.base import OPTIMIZER, System, loss_of


def base_config(job: Job) -> Json:
    """The part of the DeepSpeed JSON that all systems which read one have in common."""
    return {
        "train_micro_batch_size_per_gpu": job.workload.batch,
        "gradient_accumulation_steps": job.entry.options.get("accumulation", 1),
        "gradient_clipping": job.entry.clip or 0.0,
        "bf16": {"enabled": True},
        "optimizer": copy.deepcopy(OPTIMIZER),
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


class DeepSpeed(System):
    """A DeepSpeedEngine, used as its documentation says."""

    def __init__(self, model: torch.nn.Module, config: Json, threads: tuple[int, ...]) -> None:
        self.thread_candidates = threads
        self._config = config
        # The engine writes into the dict that it is given; the record shows what was asked for.
        self._engine, _, _, _ = deepspeed.initialize(
            model=model,
            # DeepSpeed annotates an iterable of parameters as a module.
            model_parameters=model.parameters(),  # pyright: ignore[reportArgumentType]
            config=copy.deepcopy(config),
        )

    def step(self, batch: Batch) -> torch.Tensor:
        loss = loss_of(self._engine, batch)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def summary(self) -> Json:
        norm = self._engine.get_global_grad_norm()
        return {"config": self._config, "last_grad_norm": None if norm is None else float(norm)}

    def close(self) -> None:
        self._engine.destroy()


def build_deepspeed(make_model: MakeModel, job: Job, zero: Json) -> System:
    """A DeepSpeed engine with this "zero_optimization" section."""
    config = base_config(job)
    config["zero_optimization"] = zero
    threads = tuple(job.entry.options.get("threads", ()))
    return DeepSpeed(make_model(torch.bfloat16), config, threads)
