"""A planned pipeline of two stages, exported and trained by DeepSpeed's pipeline engine on gloo."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import RankPool, on_ranks
from support.engines import built, from_all_ranks
from support.models import loss_of, make_batch, make_model

from hytrain.tools.hybrid.plan_record import plan_record, write_export
from hytrain.tools.hybrid.problem import Constants, DeviceType, Node, Problem, Samples
from hytrain.tools.hybrid.search import plan

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


def _problem() -> Problem:
    """Two GPUs of unequal speed, neither of which has memory for all layers."""
    return Problem(
        nodes=(Node("host0", "a", 1), Node("host1", "b", 1)),
        devices=(DeviceType("a", 100.0, 50.0, 10.0), DeviceType("b", 60.0, 50.0, 10.0)),
        samples={
            (name, 1, size): Samples((pace * size,) * LAYERS, (20.0,) * LAYERS, 0.0)
            for name, pace in (("a", 1.0), ("b", 3.0))
            for size in (1, 2, 4, 8)
        },
        constants=Constants(0.0, 0.5, (100.0,) * LAYERS),
        gbs=SAMPLES,
        hidden_size=WIDTH,
        sequence_length=1,
        vocab_size=WIDTH,
        max_tp=1,
        max_batch=8,
        mem_coef=1.0,
    )


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


def test_two_stages_train_as_exported(tmp_path: Path) -> None:
    result = plan(_problem())
    record = plan_record(_problem(), result.plan, result.bound)
    # Unequal on purpose: a uniform cut of five layers would be another one.
    assert sorted(stage.stop_layer - stage.first_layer for stage in record.stages) == [1, 4]
    folder = tmp_path / "export"
    write_export(folder, record)
    names = [node.name for stage in record.stages for node in stage.nodes]
    assert (folder / "hostfile").read_text() == "".join(f"{name} slots=1\n" for name in names)
    with RankPool(2) as pool:  # of its own: DeepSpeed's pipeline leaves its grid to the process
        found = pool.run(train, str(folder), timeout=120)

    model = torch.nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    inputs, targets = batch()
    losses: list[float] = []
    for _ in range(2):
        size = SAMPLES // record.micro_batches
        parts = zip(inputs.split(size), targets.split(size), strict=True)
        loss = sum(torch.nn.functional.mse_loss(model(one), want) for one, want in parts)
        mean = torch.as_tensor(loss) / record.micro_batches
        mean.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(mean.detach()))
    for rank in found:
        assert rank["micro_batches"] == record.micro_batches
        torch.testing.assert_close(torch.tensor(rank["losses"]), torch.tensor(losses))
    weights = [one for rank in found for one in rank["weights"]]
    assert len(weights) == 2 * LAYERS
    assert len(found[0]["weights"]) == 2 * record.boundaries[1]
    for mine, theirs in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach())


@on_ranks(2)
def test_one_stage_trains_in_hytrain(tmp_path: Path) -> None:
    """A step on what the export of one stage says; the ranks end alike."""
    plenty = replace(_problem(), nodes=(Node("host0", "a", 2),), devices=_problem().devices[:1])
    result = plan(replace(plenty, devices=(replace(plenty.devices[0], memory_mb=1e4),)))
    record = plan_record(plenty, result.plan, result.bound)
    assert len(record.stages) == 1
    folder = tmp_path / os.environ["RANK"]
    write_export(folder, record)
    config = json.loads((folder / "ds_config.json").read_text())
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
    for one, other in zip(*from_all_ranks(after), strict=True):
        assert torch.equal(one, other)
