"""Cases of training by a plan: as with the keys that it stands for; refused alike on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import rank_batches
import torch
import torch.distributed as dist
from support.engines import built, make_config
from support.models import make_model
from support.plans import a_plan, write_a_plan

from hytrain.config import BatchShares
from hytrain.errors import ConfigError, PlanError
from hytrain.formats.plan_file import PlanFile

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


def _config(hytrain: dict[str, Any], **sections: Any) -> dict[str, Any]:
    config = make_config(bf16=False, hytrain=hytrain, **sections)
    for key in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"):
        del config[key]
    return config


def _data(case: Planned) -> Iterator[dict[str, torch.Tensor]]:
    shares = BatchShares(case.batches, tuple(max(1, size) for size in case.micro))
    data = rank_batches.dataset(REPORT_STEPS * shares.global_batch)
    return rank_batches.batches(shares, dist.get_rank(), data)


def _train(case: Planned, config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    with built(make_model("llama"), config) as engine:
        data = _data(case)
        losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
        state = engine.fp32_state_dict()
    return losses, {name: tensors["fp32"] for name, tensors in state.items()}


def as_with_the_keys(case: Planned, folder: Path) -> None:
    plan = _plan(case)
    path = folder / "plan.json"
    if dist.get_rank() == 0:
        write_a_plan(folder, plan)
    dist.barrier()
    losses, weights = _train(case, _config({"plan": str(path)}, stage=case.stage))
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


def as_one_process_with_the_whole_batch(
    case: Planned, policies: Sequence[str], offload: str | None, folder: Path
) -> None:
    """ZeRO-3, layer by layer: losses and weights of plain torch in one process."""
    plan = _plan(case, offload_param=offload)
    ranks = [
        rank.model_copy(update={"activations": policy})
        for rank, policy in zip(plan.ranks, policies, strict=True)
    ]
    if dist.get_rank() == 0:
        write_a_plan(folder, plan.model_copy(update={"ranks": tuple(ranks)}))
    dist.barrier()
    gathers: list[int] = []
    config = _config({"plan": str(folder / "plan.json")}, stage=case.stage)
    config["zero_optimization"]["offload_param"] = {"device": offload or "none"}
    with built(make_model("llama"), config) as engine:
        on_host = [state.storage.on_host for state in engine.optimizer.layer_states]
        assert on_host == [offload is not None] * len(on_host)
        gatherer = engine.optimizer.weights.gatherer
        gather = gatherer.gather

        def count(layer: Any, **keywords: Any) -> None:
            gathers[-1] += 1
            gather(layer, **keywords)

        gatherer.gather = count
        shares = BatchShares(case.batches, tuple(max(1, size) for size in case.micro))
        samples = rank_batches.dataset(rank_batches.STEPS * shares.global_batch)
        data = rank_batches.batches(shares, dist.get_rank(), samples)
        losses: list[float] = []
        for _ in range(rank_batches.STEPS):
            gathers.append(0)
            losses.append(float(engine.train_batch(data)))
        assert vars(engine.batch_training.accumulation)["refusal"] is None
        state = engine.fp32_state_dict()
    # Six layers, forward and backward, but for those that are still there at the turn; the first
    # step is a trial. However many micro-batches a rank has, or the others.
    assert gathers[1] == gathers[-1] <= 12
    if dist.get_rank() == 0:
        trained = rank_batches.Shares(case.batches, case.micro, case.fractions, 3, 1.0, ())
        rank_batches.assert_as_alone(trained, losses, {n: t["fp32"] for n, t in state.items()})


def each_rank_treats_activations_its_own_way(case: Planned, folder: Path) -> None:
    plan = _plan(case)
    policies = ("offload", "recompute", "store")
    ranks = [
        rank.model_copy(update={"activations": policy})
        for rank, policy in zip(plan.ranks, policies, strict=True)
    ]
    if dist.get_rank() == 0:
        write_a_plan(folder, plan, "stored.json")
        write_a_plan(folder, plan.model_copy(update={"ranks": tuple(ranks)}), "mixed.json")
    dist.barrier()
    losses, weights = _train(case, _config({"plan": str(folder / "mixed.json")}))
    expected_losses, expected = _train(case, _config({"plan": str(folder / "stored.json")}))
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)


def k_begins_as_planned(case: Planned, folder: Path) -> None:
    if dist.get_rank() == 0:
        write_a_plan(folder, _plan(case))
    dist.barrier()
    config = _config({"plan": str(folder / "plan.json"), "gpu_fraction": "solve"})
    with built(make_model("llama"), config) as engine:
        first = engine.placement_decisions()[0]
    assert first.gpu_layers_target == case.gpu_layers[dist.get_rank()]


def refused_alike(case: Planned, folder: Path) -> str:
    """A plan with another device for rank 1 only."""
    plan = _plan(case)
    ranks = list(plan.ranks)
    ranks[1] = ranks[1].model_copy(update={"device": "NVIDIA L4"})
    if dist.get_rank() == 0:
        write_a_plan(folder, plan.model_copy(update={"ranks": tuple(ranks)}))
    dist.barrier()
    config = _config({"plan": str(folder / "plan.json")})
    with pytest.raises(PlanError) as refused, built(make_model("llama"), config):
        pass
    return str(refused.value)


def trouble_of_one_is_everybodys(case: Planned, folder: Path) -> tuple[str, str, str]:
    """No file on rank 1; another file on rank 1; another model on rank 1."""
    rank = dist.get_rank()
    own = folder / f"rank{rank}"
    own.mkdir()
    if rank != 1:
        write_a_plan(own, _plan(case))
    dist.barrier()

    def refusal(model: str = "llama", kind: type[ValueError] = PlanError) -> str:
        config = _config({"plan": str(own / "plan.json")})
        with pytest.raises(kind) as refused, built(make_model(model), config):
            pass
        return str(refused.value)

    missing = refusal()
    if rank == 1:
        write_a_plan(own, _plan(case, stage=1))
    dist.barrier()
    different = refusal()
    dist.barrier()
    write_a_plan(own, _plan(case))
    dist.barrier()
    return missing, different, refusal("mlp" if rank == 1 else "llama", ConfigError)


def predicted_beside_measured(case: Planned, folder: Path) -> tuple[dict[str, Any], int]:
    """A report of all ranks, while each solves its k; how often rank 0 has met the others."""
    if dist.get_rank() == 0:
        write_a_plan(folder, _plan(case))
    dist.barrier()
    config = _config({"plan": str(folder / "plan.json"), "gpu_fraction": "solve"})
    with built(make_model("llama"), config) as engine:
        data = _data(case)
        for _ in range(REPORT_STEPS):
            engine.train_batch(data)
        by_itself = engine._plan_watch.latest
        return engine.plan_report().to_json(), by_itself.last_step
