"""hytrain at a fixed gpu_fraction.

Options: `gpu_fraction`; `direct` (true: no overflow check, so that without clipping the update is
committed at once, with nothing to preview); `section`: further keys of the "hytrain" section;
`stage` (2); `streamed` (true: ZeRO-3, weights in host memory).
"""

from __future__ import annotations

import copy
import dataclasses

import torch

import hytrain
from experiments.common.model import Batch, MakeModel
from experiments.common.records import Job, Json
from experiments.common.systems.base import System, loss_of
from experiments.common.systems.deepspeed_common import base_config


def config_of(job: Job) -> Json:
    """The DeepSpeed JSON, with hytrain's section."""
    options = job.entry.options
    config = base_config(job)
    if options.get("direct", False):
        config["bf16"]["check_grad_overflow"] = False
    config["zero_optimization"] = {
        "stage": options.get("stage", 2),
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    if options.get("streamed", False):
        config["zero_optimization"] |= {
            "stage": 3,
            "offload_param": {"device": "cpu", "pin_memory": True},
        }
    config["hytrain"] = {"gpu_fraction": options["gpu_fraction"], **options.get("section", {})}
    return config


class HyTrain(System):
    """A HyTrainEngine, used as its documentation says."""

    def __init__(self, model: torch.nn.Module, config: Json) -> None:
        self._config = config
        self._engine, _, _, _ = hytrain.initialize(
            model=model, model_parameters=model.parameters(), config=copy.deepcopy(config)
        )

    def step(self, batch: Batch) -> torch.Tensor:
        loss = loss_of(self._engine, batch)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def observe(self) -> Json | None:
        statistics = self._engine.step_statistics()
        return None if statistics is None else dataclasses.asdict(statistics)

    def set_gpu_fraction(self, fraction: float) -> None:
        """From the next step on."""
        self._engine.set_gpu_fraction(fraction)

    def drain(self) -> None:
        self._engine.synchronize()

    def summary(self) -> Json:
        return {"config": self._config}

    def close(self) -> None:
        self._engine.destroy()


def build(make_model: MakeModel, job: Job) -> System:
    """See the module's text for the options."""
    return HyTrain(make_model(torch.bfloat16), config_of(job))
