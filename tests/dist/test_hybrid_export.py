"""A planned pipeline of two stages, exported and trained by DeepSpeed's pipeline engine on gloo."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import rank_pipelines
import torch
from harness import RankPool, RankPools

from hytrain.tools.hybrid.export import write_export
from hytrain.tools.hybrid.plan_record import plan_record
from hytrain.tools.hybrid.problem import Constants, DeviceType, Node, Problem, Samples
from hytrain.tools.hybrid.search import plan


def _problem() -> Problem:
    """Two GPUs of unequal speed, neither of which has memory for all layers."""
    layers = rank_pipelines.LAYERS
    return Problem(
        nodes=(Node("host0", "a", 1), Node("host1", "b", 1)),
        devices=(DeviceType("a", 100.0, 50.0, 10.0), DeviceType("b", 60.0, 50.0, 10.0)),
        samples={
            (name, 1, size): Samples((pace * size,) * layers, (20.0,) * layers, 0.0)
            for name, pace in (("a", 1.0), ("b", 3.0))
            for size in (1, 2, 4, 8)
        },
        constants=Constants(0.0, 0.5, (100.0,) * layers),
        gbs=rank_pipelines.SAMPLES,
        hidden_size=rank_pipelines.WIDTH,
        sequence_length=1,
        vocab_size=rank_pipelines.WIDTH,
        max_tp=1,
        max_batch=8,
        mem_coef=1.0,
    )


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
        found = pool.run(rank_pipelines.train, str(folder), timeout=120)

    model = torch.nn.Sequential(*rank_pipelines.layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    inputs, targets = rank_pipelines.batch()
    losses: list[float] = []
    for _ in range(2):
        size = rank_pipelines.SAMPLES // record.micro_batches
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
    assert len(weights) == 2 * rank_pipelines.LAYERS
    assert len(found[0]["weights"]) == 2 * record.boundaries[1]
    for mine, theirs in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs.detach())


def test_one_stage_trains_in_hytrain(ranks: RankPools, tmp_path: Path) -> None:
    plenty = replace(_problem(), nodes=(Node("host0", "a", 2),), devices=_problem().devices[:1])
    result = plan(replace(plenty, devices=(replace(plenty.devices[0], memory_mb=1e4),)))
    record = plan_record(plenty, result.plan, result.bound)
    assert len(record.stages) == 1
    folder = tmp_path / "export"
    write_export(folder, record)
    first, second = ranks(2).run(rank_pipelines.train_data_parallel, str(folder), timeout=120)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)
