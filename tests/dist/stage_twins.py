"""A training in ZeRO-3 beside its twin in ZeRO-2, which has all weights on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_shadow import LEFT_OUT, Choosing, config_for
from stage_models import batch_of, build
from support.comparisons import assert_same_states
from support.engines import built, environment, make_config
from support.models import loss_of

State = dict[str, dict[str, torch.Tensor]]
UNEVEN = (0.7, 0.3)
LOOKS_FAR = (("stage3_prefetch_bucket_size", 7000), ("stage3_max_reuse_distance", 9000))
LITTLE_ROOM = (*LOOKS_FAR, ("stage3_max_live_parameters", 5000))
SMALL_STAY = (("stage3_param_persistence_threshold", 2000),)
"""Keys of ZeRO-3; biases of the MLP and layers of its adapters stay on every rank."""


@dataclass(frozen=True)
class Setup:
    """A run: a model and what differs between its twins."""

    model: str = "mlp"
    fractions: tuple[float, ...] = (0.5, 0.5)
    gpu_fractions: tuple[float, ...] = (0.0, 0.0, 0.0)
    clipping: float = 0.5
    accumulation: int = 1
    bf16: bool = True
    keys: tuple[tuple[str, int], ...] = ()
    delays: int = 0
    evaluates: bool = False
    on_host: bool = False
    steps: int = 4
    gathers: str = "each"
    """See :func:`support.engines.make_config`."""
    past: bool = False
    """Every other step's passes go past the engine."""
    left_out: str = ""
    """Blocks, as of :data:`LEFT_OUT`."""

    def __str__(self) -> str:
        parts = [self.model, *self.fractions, "k", *self.gpu_fractions[: len(self.fractions)]]
        parts += [f"c{self.clipping}", f"acc{self.accumulation}", "bf16" if self.bf16 else "fp32"]
        parts += ["host"] if self.on_host else []
        parts += ["kept"] if self.gathers == "kept" else []
        parts += ["past"] if self.past else []
        parts += [self.left_out] if self.left_out else []
        return "-".join(map(str, parts)) + "".join(f"-{k[7:12]}{v}" for k, v in self.keys)


def train(setup: Setup, stage: int) -> tuple[list[float], State, int]:
    """Losses, what rank 0 has in the end, and how many layers were whole at once."""
    rank = dist.get_rank()
    config = make_config(
        gpu_fraction=setup.gpu_fractions[rank],
        clipping=setup.clipping,
        accumulation=setup.accumulation,
        bf16=setup.bf16,
        stage=stage,
        gathers=setup.gathers,
        hytrain={"shard_fractions": list(setup.fractions)},
    )
    if stage == 3:
        config["zero_optimization"].update(dict(setup.keys))
        if setup.on_host:
            config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    delays = environment("HYTRAIN_DELAYS", f"{setup.delays + rank}:{300 * (setup.delays > 0)}")
    losses: list[float] = []
    model = build(setup.model)
    if setup.left_out:
        model = Choosing(model)
    with delays, built(model, config) as engine:
        number = 0
        for step in range(setup.steps):
            engine.module.step = step
            for _ in range(setup.accumulation):
                number += 1
                batch = batch_of(setup.model, number * len(setup.fractions) + rank, setup.bf16)
                if setup.left_out:
                    batch["leave_out"] = LEFT_OUT[setup.left_out](rank, step)
                is_past = setup.past and step % 2 == 1
                loss = loss_of((engine.module if is_past else engine)(**batch))
                losses.append(float(loss.detach()))
                loss.backward() if is_past else engine.backward(loss)
                engine.step()
            if setup.evaluates and step % 2:
                engine.eval()
                with torch.no_grad():
                    losses.append(float(loss_of(engine(**batch_of(setup.model, 7, setup.bf16)))))
                engine.train()
        gatherer = engine.optimizer.weights.gatherer
        assert (gatherer.most_live > 0) is (stage == 3)
        assert not gatherer.live, "layers are left gathered"
        return losses, engine.fp32_state_dict(), gatherer.most_live


def equals_stage_2(setup: Setup) -> int:
    """Bit for bit: the reductions and updates are the same. Returns the most layers at once."""
    losses, state, most_live = train(setup, 3)
    expected_losses, expected, _ = train(setup, 2)
    assert losses == expected_losses
    assert losses[0] != losses[-1], "nothing is trained"
    assert_same_states(state, expected)
    return most_live


def batches_as_stage_2(
    kind: str, sizes: tuple[int, ...], mode: str = "layer_major", *, on_host: bool = False
) -> None:
    """ZeRO-3 is ZeRO-2 one micro-batch after another, bit by bit.

    But one micro-batch after another ZeRO-3 reduces in every backward, which rounds otherwise where
    several ranks compute, and tied weights' two gradients one by one in the first step: with an eps
    like the gradients, by lr * 1e-7 * 2 / eps a step at most.

    Args:
        kind: the model.
        sizes: samples of each rank, one a micro-batch.
        mode: ZeRO-3's accumulation; "persistent": as ZeRO-2's, with all weights on every rank.
        on_host: whether ZeRO-3's shards are.
    """
    rank, rate, eps = dist.get_rank(), 1e-2, 1e-2
    is_persistent = mode == "persistent"
    is_tied = kind in ("gpt2", "borrowing")
    outcomes: list[Any] = []
    for stage in (3, 2):
        accumulation = mode if stage == 3 and not is_persistent else "micro_batch_major"
        section = {
            "accumulation": accumulation,
            "batch_sizes": list(sizes),
            "micro_batch_sizes": [1] * len(sizes),
            "shard_fractions": [0.3, 0.7] if len(sizes) == 2 else [1.0],
        }
        config = make_config(gpu_fraction=0.5, bf16=False, stage=stage, hytrain=section)
        if stage == 3:
            largest = 10**9 if is_persistent else 2000
            config["zero_optimization"]["stage3_param_persistence_threshold"] = largest
            if on_host:
                config["zero_optimization"]["offload_param"] = {"device": "cpu"}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": rate, "eps": eps}}
        delays = environment("HYTRAIN_DELAYS", f"{rank}:{300 * (stage == 3)}")
        with delays, built(build(kind), config) as engine:
            losses: list[float] = []
            for step in range(4):
                numbers = [10 * step + 5 * rank + n for n in range(sizes[rank])]
                batches = iter([batch_of(kind, number, False) for number in numbers])
                losses.append(float(engine.train_batch(batches, num_valid=lambda _: 1)))
            if accumulation == "layer_major":
                assert vars(engine.batch_training.accumulation)["refusal"] is None
                # One in use and one ahead: nothing had to be held behind the last block.
                assert is_tied or engine.optimizer.weights.gatherer.most_live == 2
            assert engine.optimizer.weights.is_sharded is (stage == 3 and not is_persistent)
            outcomes.append((losses, engine.fp32_state_dict()))
    (losses, ours), (expected_losses, theirs) = outcomes
    if not is_tied and (mode != "micro_batch_major" or min(sizes) == 0):
        assert losses == expected_losses
        assert_same_states(ours, theirs)
        return
    assert losses == pytest.approx(expected_losses, rel=1e-6, abs=0.0)
    allowed = 4 * rate * 1e-7 * 2 / eps
    before = dict(build(kind).named_parameters())
    moved = [float((s["fp32"] - before[name]).abs().max()) for name, s in theirs.items()]
    assert not moved or sorted(moved)[len(moved) // 2] > 20 * allowed, "hardly anything is compared"
    for name, states in theirs.items():
        torch.testing.assert_close(ours[name]["fp32"], states["fp32"], atol=allowed, rtol=1e-6)


def built_under_zero_init(kind: str, on_host: bool) -> None:
    """A model whose parameters arrive empty trains as one that was built whole."""
    import deepspeed

    keys = {"stage3_max_reuse_distance": 0} if on_host else {}
    config = config_for((0.7, 0.3), stage=3, bf16=False, gpu_fraction=0.5)
    config["zero_optimization"].update(keys)
    if on_host:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = build(kind)
    assert all(hasattr(p, "ds_id") for p in model.parameters())
    assert all(p.numel() == 0 for p in model.parameters())
    whole = build(kind)  # with those weights: transformers initializes an empty model otherwise
    with deepspeed.zero.GatheredParameters(list(model.parameters())), torch.no_grad():
        for ours, theirs in zip(whole.parameters(), model.parameters(), strict=True):
            ours.copy_(theirs)
    shapes = {name: p.shape for name, p in whole.named_parameters()}
    found: list[dict[str, Any]] = []
    for each, stage in ((model, 3), (whole, 2)):
        config = {**config, "zero_optimization": {**config["zero_optimization"], "stage": stage}}
        if stage == 2:
            config["zero_optimization"].pop("offload_param", None)
        with built(each, config) as engine:
            assert {n: p.shape for n, p in engine.module.named_parameters()} == shapes
            known = set().union(*(vars(p) for p in engine.module.parameters()))
            assert "convert_to_zero_parameters" not in known
            for number in range(3):
                engine.backward(loss_of(engine(**batch_of(kind, number, False))))
                engine.step()
            found.append(engine.fp32_state_dict())
    assert_same_states(*found)
