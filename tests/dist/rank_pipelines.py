"""A rank that trains a small pipeline with DeepSpeed, cut and configured as a plan was exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

WIDTH = 8
LAYERS = 5
SAMPLES = 8


def layers() -> list[torch.nn.Module]:
    """The same on every rank."""
    torch.manual_seed(0)
    return [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(SAMPLES, WIDTH), torch.randn(SAMPLES, WIDTH)


def train(folder: str) -> dict[str, Any]:
    """Two steps on what the export says; the losses, and the weights of the rank's stage."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    from hytrain.tools.pipeline_stages import stage_layers

    deepspeed.init_distributed("gloo")
    values = json.loads((Path(folder) / "pipeline.json").read_text())
    config = json.loads((Path(folder) / "ds_config.json").read_text())
    # As exported, but in fp32 and with an optimizer that plain torch has, too.
    config["bf16"] = {"enabled": False}
    params = {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}
    config["optimizer"] = {"type": "AdamW", "params": params}
    model = PipelineModule(
        stage_layers(layers(), values["boundaries"]),
        num_stages=values["num_stages"],
        partition_method="uniform",
        loss_fn=torch.nn.functional.mse_loss,
    )
    engine, *_ = deepspeed.initialize(
        model=model, config=config, model_parameters=list(model.parameters())
    )
    inputs, targets = batch()
    size = config["train_micro_batch_size_per_gpu"]
    parts = list(zip(inputs.split(size), targets.split(size), strict=True))
    losses = [float(engine.train_batch(iter(parts))) for _ in range(2)]
    weights = [one.detach().clone() for one in model.parameters()]
    micro_batches = engine.gradient_accumulation_steps()
    engine.destroy()
    return {"losses": losses, "weights": weights, "micro_batches": micro_batches}


def train_data_parallel(folder: str) -> list[torch.Tensor]:
    """A step of hytrain's on what the export of one stage says; this rank's weights."""
    from support.engines import built
    from support.models import loss_of, make_batch, make_model

    config = json.loads((Path(folder) / "ds_config.json").read_text())
    config["bf16"] = {"enabled": False}
    model = make_model("mlp")
    before = [one.detach().clone() for one in model.parameters()]
    with built(model, config) as engine:
        for number in range(config["gradient_accumulation_steps"]):
            engine.backward(loss_of(engine(**make_batch("mlp", number))))
            engine.step()
        assert engine.global_steps == 1
        after = [one.detach().clone() for one in model.parameters()]
    assert any(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    return after
