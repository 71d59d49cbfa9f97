"""Cases of accumulation layer by layer on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_batches import STEPS, Shares, batches, dataset
from support.comparisons import assert_same_bits
from support.engines import built, environment, make_config
from support.models import Mlp, make_batch, make_model
from support.short_memory import short_of_memory
from torch import nn

from hytrain.config import BatchShares
from hytrain.errors import RankFailedError, UnsupportedError

Outcome = tuple[list[float], list[dict[int, Any]], Any]
"""Losses, each step's reduced gradients, and why it was not computed layer by layer."""


def _train(
    case: Shares, model: nn.Module, watch: Callable[[Any], None] | None = None, **zero: Any
) -> Outcome:
    rank = dist.get_rank()
    shares = BatchShares(case.sizes, case.micro_sizes)
    config = make_config(
        gpu_fraction=case.gpu_fractions[rank],
        clipping=case.clipping,
        bf16=False,
        stage=case.stage,
        hytrain=case.section(),
    )
    config["zero_optimization"].update(zero)
    gradients: list[dict[int, Any]] = []
    losses: list[float] = []
    with built(model, config) as engine:
        engine.optimizer.passes.reducer.on_reduced_gradient = lambda state, shard: gradients[
            -1
        ].__setitem__(state.index, shard.detach().clone())
        iterator = batches(shares, rank, dataset(STEPS * shares.global_batch))
        if watch is not None:
            watch(engine)
        for _ in range(STEPS):
            gradients.append({})
            losses.append(float(engine.train_batch(iterator)))
        refusal = vars(engine.batch_training.accumulation).get("refusal")
    return losses, gradients, refusal


def same_as_micro_batch_major(case: Shares) -> None:
    """On every rank, bit by bit."""
    ours = _train(case, make_model("llama"))
    assert ours[2] is None
    plain = replace(case, accumulation="micro_batch_major", activations="keep")
    _assert_same(ours, _train(plain, make_model("llama")))


def zero_3_is_zero_2(case: Shares) -> None:
    """Bit by bit, and layers are reduced as early."""
    ours = _train(case, make_model("llama"))
    assert ours[2] is None
    _assert_same(ours, _train(replace(case, stage=2), make_model("llama")))


def _assert_same(ours: Outcome, theirs: Outcome) -> None:
    assert ours[0] == theirs[0]
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert list(one) == list(other), "the layers were reduced in another order"
        assert all(torch.equal(one[index], other[index]) for index in other)


def one_rank_falls_back(case: Shares, stubborn: int, step: int) -> None:
    """A rank whose model cannot be computed layer by layer trains with the others all the same."""
    model = make_model("llama")
    seen = [0]

    def again(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[0] += 1
        if seen[0] > step * len(shares.micro_batches(dist.get_rank())):
            model.model.layers[1](*args, **kwargs)  # what it returns is not used

    shares = BatchShares(case.sizes, case.micro_sizes)
    if dist.get_rank() == stubborn:
        model.model.norm.register_forward_pre_hook(
            lambda _m, args: again(_m, args, {"position_embeddings": rotary(model, args[0])}),
        )
    ours = _train(case, model)
    assert (ours[2] is not None) == (dist.get_rank() == stubborn)
    plain = replace(case, accumulation="micro_batch_major")
    theirs = _train(plain, make_model("llama"))
    assert ours[0] == theirs[0]
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert all(torch.equal(one[index], other[index]) for index in other)


def rotary(model: nn.Module, hidden: torch.Tensor) -> Any:
    positions = torch.arange(hidden.shape[1]).unsqueeze(0)
    return model.model.rotary_emb(hidden, positions)


def one_gather_a_layer_and_pass(case: Shares) -> None:
    """However many micro-batches there are, and nothing is prefetched, kept or persistent."""
    counts: list[dict[int, int]] = []

    def watch(engine: Any) -> None:
        weights = engine.optimizer.weights
        gather = weights.gatherer.gather
        open_step = engine.optimizer.passes.open_step
        enter_layers = open_step.enter_layers

        def count(layer: Any, **keywords: Any) -> None:
            if counts:
                counts[-1][layer.index] = counts[-1].get(layer.index, 0) + 1
            gather(layer, **keywords)

        def begin_counting() -> None:
            counts.append({})
            enter_layers()

        weights.gatherer.gather = count
        open_step.enter_layers = begin_counting

    keys = {
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
    }
    _losses, _gradients, refusal = _train(case, make_model("llama"), watch, **keys)
    assert refusal is None
    assert len(counts) == STEPS
    for number, found in enumerate(counts[1:], 1):
        # Blocks 1 to 3 forward and backward; between the last one's the head is.
        assert all(found[index] == 2 for index in range(1, 5)), (number, found)
        assert found[0] == 1, found
        assert found[5] == 1, found


def other_models(kind: str, sizes: tuple[int, ...]) -> None:
    """ZeRO-3 is ZeRO-2, where what is before the blocks, or behind them, takes turns.

    Bit by bit, but for tied weights: the first step reduces their two gradients one by one. With an
    eps like the gradients a rounding of 1e-7 of them makes at most lr * 1e-7 * 2 / eps in a step.
    """
    outcomes: list[Any] = []
    rank, rate, eps = dist.get_rank(), 1e-2, 1e-2
    for stage in (3, 2):
        section = {
            "accumulation": "layer_major",
            "batch_sizes": list(sizes),
            "micro_batch_sizes": [1] * len(sizes),
            "shard_fractions": [0.3, 0.7],
        }
        config = make_config(gpu_fraction=0.5, bf16=False, stage=stage, hytrain=section)
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        config["optimizer"] = {"type": "AdamW", "params": {"lr": rate, "eps": eps}}
        delays = environment("HYTRAIN_DELAYS", f"{rank}:{300 * (stage == 3)}")
        with delays, built(make_model(kind), config) as engine:
            losses: list[float] = []
            torch.manual_seed(rank)  # dropout
            for step in range(STEPS):
                numbers = [10 * step + 5 * rank + n for n in range(sizes[rank])]
                batches_of = iter([make_batch(kind, number) for number in numbers])
                losses.append(float(engine.train_batch(batches_of, num_valid=lambda _: 1)))
            assert vars(engine.batch_training.accumulation)["refusal"] is None
            outcomes.append((losses, engine.fp32_state_dict()))
    (losses, ours), (expected_losses, theirs) = outcomes
    is_tied = kind in ("gpt2", "borrowing")
    rel = 1e-6 if is_tied else 0.0
    assert losses == pytest.approx(expected_losses, rel=rel, abs=0.0)
    assert set(ours) == set(theirs)
    allowed = STEPS * rate * 1e-7 * 2 / eps
    before = dict(make_model(kind).named_parameters())
    for name, states in theirs.items():
        if not is_tied:
            for which, expected in states.items():
                assert_same_bits(f"{which} of {name}", ours[name][which], expected)
            continue
        assert float((states["fp32"] - before[name]).abs().max()) > 20 * allowed
        torch.testing.assert_close(ours[name]["fp32"], states["fp32"], atol=allowed, rtol=1e-6)


def spoiled_at_the_end() -> nn.Module:
    """Its last block is called twice: seen while the layers are passed."""
    model = make_model("llama")
    model.model.norm.register_forward_pre_hook(lambda _m, args: (_again(model, args[0]),))
    return model


def spoiled_in_backward() -> nn.Module:
    """What a block returns depends on how often a forward has called it: seen when all is over."""
    model = make_model("llama")
    calls = [0]

    def count(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output * (1.0 + 0.1 * calls[0])

    model.register_forward_pre_hook(lambda _m, _args: calls.__setitem__(0, 0))
    model.model.layers[1].register_forward_hook(count)
    return model


SPOILED = {"at_the_end": spoiled_at_the_end, "in_backward": spoiled_in_backward}


def all_ranks_fall_back(case: Shares, kind: str, is_short: bool) -> None:
    """With ZeRO-3 they have to do so together, those without samples, too.

    Where memory ``is_short``, updates have begun by then and are taken back.
    """
    results = []
    for accumulation in ("layer_major", "micro_batch_major"):
        with short_of_memory() if is_short else nullcontext([]) as early:
            results.append(_train(replace(case, accumulation=accumulation), SPOILED[kind]()))
        if is_short and kind == "in_backward" and accumulation == "layer_major":
            assert early or not case.sizes[dist.get_rank()]
    assert results[0][2] is not None
    assert results[1][2] is None
    assert results[0][0] == results[1][0]


class Late(Mlp):
    """Its head is used from some step on."""

    uses_head = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        return (self.head(x) if self.uses_head else x).pow(2).mean()


def a_layer_comes_late(sizes: tuple[int, ...]) -> None:
    """A layer that the first step has not used: an error before ranks meet in other collectives."""
    keys = {"batch_sizes": list(sizes), "micro_batch_sizes": [1] * len(sizes)}
    section = {"accumulation": "layer_major", **keys}
    config = make_config(bf16=False, stage=3, gathers="each", hytrain=section)
    rank, done = dist.get_rank(), 0
    refused = pytest.raises((UnsupportedError, RankFailedError), match="which the first step")
    with refused, built(Late(), config) as engine:
        for step in range(3):
            engine.module.uses_head = step == 2
            numbers = [10 * step + 5 * rank + n for n in range(sizes[rank])]
            batches_of = iter([make_batch("mlp", number) for number in numbers])
            engine.train_batch(batches_of, num_valid=lambda _: 1)
            assert vars(engine.batch_training.accumulation)["refusal"] is None
            done += 1
    assert done == 2


def _again(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The last block once more."""
    return model.model.layers[-1](hidden, position_embeddings=rotary(model, hidden))
