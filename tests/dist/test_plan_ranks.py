"""Training by a plan on two and three ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rank_batches
import torch
import torch.distributed as dist
from harness import on_ranks
from support.engines import built, from_all_ranks, make_config
from support.models import make_model
from support.plans import a_plan, write_a_plan

from hytrain.config import BatchShares
from hytrain.errors import ConfigError, PlanError
from hytrain.formats.plan_file import PlanFile

pytestmark = pytest.mark.timeout(240)

STEPS = 4

REPORT_STEPS = 14


@dataclass(frozen=True)
class Planned:
    """What a plan decides."""

    batches: tuple[int, ...]
    micro: tuple[int, ...]
    fractions: tuple[float, ...]
    gpu_layers: tuple[int, ...]
    stage: int = 2

    def __str__(self) -> str:
        return f"{self.batches}-{self.micro}-{self.fractions}-z{self.stage}"


def _plan(case: Planned, **changes: Any) -> PlanFile:
    return a_plan(
        make_model("llama"),
        case.batches,
        case.micro,
        fractions=case.fractions,
        gpu_layers=case.gpu_layers,
        **{"stage": case.stage, **changes},
    )


def _written(folder: Path, plan: PlanFile, name: str = "plan.json") -> dict[str, str]:
    """A key of the configuration, for a plan that rank 0 has written."""
    if dist.get_rank() == 0:
        write_a_plan(folder, plan, name)
    dist.barrier()
    return {"plan": str(folder / name)}


def _config(hytrain: dict[str, Any], **sections: Any) -> dict[str, Any]:
    config = make_config(bf16=False, hytrain=hytrain, **sections)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        del config[key]
    return config


def _data(case: Planned) -> Iterator[dict[str, torch.Tensor]]:
    shares = BatchShares(case.batches, tuple(max(1, size) for size in case.micro))
    return rank_batches.samples(shares, dist.get_rank(), REPORT_STEPS)


def _train(case: Planned, config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    with built(make_model("llama"), config) as engine:
        data = _data(case)
        losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
        state = engine.fp32_state_dict()
    return losses, {name: tensors["fp32"] for name, tensors in state.items()}


TWO = Planned((3, 1), (2, 1), (0.7, 0.3), (1, 3))

IDLE = Planned((4, 0), (2, 0), (0.25, 0.75), (4, 0))

THREE = Planned((1, 4, 2), (1, 3, 1), (0.2, 0.5, 0.3), (0, 2, 4))

SHARDED = Planned((4, 2), (2, 1), (0.7, 0.3), (1, 3), stage=3)


@pytest.mark.parametrize("case", [TWO, IDLE, SHARDED, THREE], ids=str)
@on_ranks(lambda case: len(case.batches))
def test_it_is_the_same_as_the_keys_that_it_stands_for(case: Planned, tmp_path: Path) -> None:
    planned = _written(tmp_path, _plan(case))
    losses, weights = _train(case, _config(planned, stage=case.stage))
    keys = {
        "batch_sizes": list(case.batches),
        "micro_batch_sizes": [max(1, size) for size in case.micro],
        "shard_fractions": list(case.fractions),
    }
    explicit = make_config(bf16=False, hytrain=keys, stage=case.stage)
    expected_losses, expected = _train(case, explicit)
    assert losses == expected_losses
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize(
    ("batches", "policies", "offload"),
    [
        ((4, 1), ("keep", "offload"), None),
        ((3, 0), ("keep", "keep"), None),
        ((1, 3), ("keep", "keep"), "cpu"),
    ],
    ids=str,
)
@on_ranks(2)
def test_layer_by_layer_ranks_make_as_many_micro_batches_as_each_likes(
    tmp_path: Path, batches: tuple[int, int], policies: tuple[str, str], offload: str | None
) -> None:
    """ZeRO-3: losses and weights of plain torch in one process."""
    micro = tuple(min(1, batch) for batch in batches)
    case = Planned(batches, micro, (0.3, 0.7), (1, 0), stage=3)
    plan = _plan(case, offload_param=offload)
    ranks = [
        rank.model_copy(update={"activations": policy})
        for rank, policy in zip(plan.ranks, policies, strict=True)
    ]
    planned = _written(tmp_path, plan.model_copy(update={"ranks": tuple(ranks)}))
    config = _config(planned, stage=case.stage, optimizer=rank_batches.ADAMW)
    config["zero_optimization"]["offload_param"] = {"device": offload or "none"}
    with built(make_model("llama"), config) as engine:
        on_host = [state.storage.on_host for state in engine.optimizer.layer_states]
        assert on_host == [offload is not None] * len(on_host)
        shares = BatchShares(case.batches, tuple(max(1, size) for size in case.micro))
        data = rank_batches.samples(shares, dist.get_rank())
        losses = [float(engine.train_batch(data)) for _ in range(rank_batches.STEPS)]
        assert vars(engine.batch_training.accumulation)["refusal"] is None
        state = engine.fp32_state_dict()
    if dist.get_rank() == 0:
        trained = rank_batches.Shares(case.batches, case.micro, case.fractions, 3, 1.0, ())
        rank_batches.assert_as_alone(trained, losses, {n: t["fp32"] for n, t in state.items()})


@on_ranks(3)
def test_each_rank_treats_activations_its_own_way(tmp_path: Path) -> None:
    plan = _plan(THREE)
    policies = ("offload", "recompute", "store")
    ranks = [
        rank.model_copy(update={"activations": policy})
        for rank, policy in zip(plan.ranks, policies, strict=True)
    ]
    stored = _written(tmp_path, plan, "stored.json")
    mixed = _written(tmp_path, plan.model_copy(update={"ranks": tuple(ranks)}), "mixed.json")
    losses, weights = _train(THREE, _config(mixed))
    expected_losses, expected = _train(THREE, _config(stored))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


@on_ranks(3)
def test_each_rank_begins_with_its_own_k(tmp_path: Path) -> None:
    config = _config({**_written(tmp_path, _plan(THREE)), "gpu_fraction": "solve"})
    with built(make_model("llama"), config) as engine:
        first = engine.placement_decisions()[0]
    assert first.gpu_layers_target == THREE.gpu_layers[dist.get_rank()]


def _refusal(config: dict[str, Any], model: str = "llama") -> str:
    with pytest.raises((PlanError, ConfigError)) as refused, built(make_model(model), config):
        pass
    return str(refused.value)


@on_ranks(2)
def test_a_plan_for_another_job_is_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    """Rank 1 has another device."""
    plan = _plan(TWO)
    ranks = (plan.ranks[0], plan.ranks[1].model_copy(update={"device": "NVIDIA L4"}))
    text = _refusal(_config(_written(tmp_path, plan.model_copy(update={"ranks": ranks}))))
    assert "rank 1: planned for NVIDIA L4, found CPU" in text
    assert from_all_ranks(text) == [text, text]


@on_ranks(2)
def test_what_one_rank_lacks_all_ranks_refuse(tmp_path: Path) -> None:
    """No file on rank 1; another file on rank 1; another model on rank 1."""
    rank = dist.get_rank()
    own = tmp_path / f"rank{rank}"
    own.mkdir()
    config = _config({"plan": str(own / "plan.json")})
    if rank != 1:
        write_a_plan(own, _plan(TWO))
    missing = _refusal(config)
    assert missing.startswith("rank 1: ")
    assert "there is no file" in missing
    if rank == 1:
        write_a_plan(own, _plan(TWO, stage=1))
    assert "ranks read different files" in _refusal(config)
    write_a_plan(own, _plan(TWO))
    assert "trained on rank 0 (host " in _refusal(config, "mlp" if rank == 1 else "llama")


@on_ranks(2)
def test_predicted_stands_beside_measured_on_every_rank(tmp_path: Path) -> None:
    """While each solves its k."""
    config = _config({**_written(tmp_path, _plan(TWO)), "gpu_fraction": "solve"})
    with built(make_model("llama"), config) as engine:
        data = _data(TWO)
        for _ in range(REPORT_STEPS):
            engine.train_batch(data)
        assert engine._plan_watch._reports == 1  # after step 13
        report = engine.plan_report().to_json()
    assert from_all_ranks(report) == [report, report]
    assert [rank["batch_size"] for rank in report["ranks"]] == [3, 1]
    assert all(rank["step_seconds"] > 0.0 for rank in report["ranks"])
    assert all(rank["host_bytes"] > 0 for rank in report["ranks"])
