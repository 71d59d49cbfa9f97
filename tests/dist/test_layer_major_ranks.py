"""Accumulation layer by layer on two to three ranks, with unequal batches and shards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from rank_batches import STEPS, Shares, samples
from stage_twins import batches_as_stage_2
from support.engines import built, make_config
from support.models import Mlp, make_batch, make_model
from support.short_memory import short_of_memory
from torch import nn

from hytrain.errors import RankFailedError, UnsupportedError

pytestmark = pytest.mark.timeout(240)

Outcome = tuple[list[float], list[dict[int, Any]], Any]
"""Losses, each step's reduced gradients, and why it was not computed layer by layer."""


def _train(
    case: Shares, model: nn.Module, watch: Callable[[Any], None] | None = None, **zero: Any
) -> Outcome:
    rank = dist.get_rank()
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
        iterator = samples(case.batches, rank)
        if watch is not None:
            watch(engine)
        for _ in range(STEPS):
            gradients.append({})
            losses.append(float(engine.train_batch(iterator)))
        refusal = vars(engine.batch_training.accumulation).get("refusal")
    return losses, gradients, refusal


CASES = [
    Shares((2, 5), (1, 2), (0.7, 0.3), 2, 0.5, (1.0, 0.0), "layer_major", "offload"),
    Shares((5, 0), (2, 1), (0.3, 0.7), 1, 0.5, (0.5, 0.5), "layer_major"),
    Shares((0, 4, 0), (1, 2, 1), (0.2, 0.2, 0.6), 3, 0.05, (0.5, 0.0, 1.0), "layer_major"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@on_ranks(lambda case: len(case.sizes))
def test_the_same_as_one_micro_batch_after_another(case: Shares) -> None:
    """On every rank, bit by bit; layers are reduced in the same order."""
    ours = _train(case, make_model("llama"))
    assert ours[2] is None
    plain = replace(case, accumulation="micro_batch_major", activations="keep")
    _assert_same(ours, _train(plain, make_model("llama")))


@on_ranks(2)
def test_zero_3_is_zero_2() -> None:
    """Bit by bit, and layers are reduced as early."""
    case = Shares((4, 2), (1, 1), (0.3, 0.7), 3, 0.05, (0.5, 0.0), "layer_major", "offload")
    ours = _train(case, make_model("llama"))
    assert ours[2] is None
    _assert_same(ours, _train(replace(case, stage=2), make_model("llama")))


def _assert_same(ours: Outcome, theirs: Outcome, *, in_order: bool = True) -> None:
    assert ours[0] == theirs[0]
    for one, other in zip(ours[1], theirs[1], strict=True):
        assert not in_order or list(one) == list(other), "the layers were reduced in another order"
        assert all(torch.equal(one[index], other[index]) for index in other)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [("gpt2", (3, 1)), ("vit", (3, 1)), ("mlp", (0, 2)), ("borrowing", (0, 2)), ("gpt2", (0, 2))],
    ids=str,
)
@on_ranks(2)
def test_zero_3_of_other_models(kind: str, sizes: tuple[int, ...]) -> None:
    """Where what is before the blocks, or behind them, takes turns."""
    batches_as_stage_2(kind, sizes)


@pytest.mark.parametrize(("stubborn", "step"), [(0, 0), (1, 2)])
@on_ranks(2)
def test_a_rank_that_falls_back(stubborn: int, step: int) -> None:
    """A rank whose model cannot be computed layer by layer trains with the others all the same."""
    case = Shares((3, 1), (1, 1), (0.5, 0.5), 2, 0.5, (0.0, 0.5), "layer_major")
    model = make_model("llama")
    seen = [0]

    def again(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen[0] += 1
        if seen[0] > step * len(case.batches.micro_batches(dist.get_rank())):
            model.model.layers[1](*args, **kwargs)  # what it returns is not used

    if dist.get_rank() == stubborn:
        model.model.norm.register_forward_pre_hook(
            lambda _m, args: again(_m, args, {"position_embeddings": _rotary(model, args[0])}),
        )
    ours = _train(case, model)
    assert (ours[2] is not None) == (dist.get_rank() == stubborn)
    plain = replace(case, accumulation="micro_batch_major")
    _assert_same(ours, _train(plain, make_model("llama")), in_order=False)


def _rotary(model: nn.Module, hidden: torch.Tensor) -> Any:
    positions = torch.arange(hidden.shape[1]).unsqueeze(0)
    return model.model.rotary_emb(hidden, positions)


@pytest.mark.parametrize("sizes", [(4, 2), (3, 0)], ids=str)
@on_ranks(2)
def test_zero_3_gathers_a_layer_once_a_pass(sizes: tuple[int, int]) -> None:
    """However many micro-batches there are, and nothing is prefetched, kept or persistent."""
    case = Shares(sizes, (1, 1), (0.7, 0.3), 3, 0.5, (0.0, 0.5), "layer_major")
    counts: list[dict[int, int]] = []

    def watch(engine: Any) -> None:
        weights = engine.optimizer.weights
        gather = weights.gatherer.gather
        open_step = engine.optimizer.passes.open_step
        layer_by_layer = open_step.layer_by_layer

        def count(layer: Any, **keywords: Any) -> None:
            if counts:
                counts[-1][layer.index] = counts[-1].get(layer.index, 0) + 1
            gather(layer, **keywords)

        def begin_counting() -> AbstractContextManager[None]:
            counts.append({})
            return layer_by_layer()

        weights.gatherer.gather = count
        open_step.layer_by_layer = begin_counting

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


def _again(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The last block once more."""
    return model.model.layers[-1](hidden, position_embeddings=_rotary(model, hidden))


def _spoiled_at_the_end() -> nn.Module:
    """Its last block is called twice: seen while the layers are passed."""
    model = make_model("llama")
    model.model.norm.register_forward_pre_hook(lambda _m, args: (_again(model, args[0]),))
    return model


def _spoiled_in_backward() -> nn.Module:
    """What a block returns depends on how often a forward has called it: seen when all is over."""
    model = make_model("llama")
    calls = [0]

    def count(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return output * (1.0 + 0.1 * calls[0])

    model.register_forward_pre_hook(lambda _m, _args: calls.__setitem__(0, 0))
    model.model.layers[1].register_forward_hook(count)
    return model


SPOILED = {"at_the_end": _spoiled_at_the_end, "in_backward": _spoiled_in_backward}


@pytest.mark.parametrize(
    ("sizes", "kind", "is_short"),
    [
        ((4, 2), "at_the_end", False),
        ((3, 0), "in_backward", False),
        ((0, 2), "at_the_end", True),
        ((4, 2), "in_backward", True),
    ],
    ids=str,
)
@on_ranks(2)
def test_zero_3_falls_back_on_all_ranks(sizes: tuple[int, int], kind: str, is_short: bool) -> None:
    """With ZeRO-3 they have to do so together, those without samples, too.

    Where memory ``is_short``, updates have begun by then and are taken back.
    """
    case = Shares(sizes, (1, 1), (0.7, 0.3), 3, 0.5, (0.0, 0.5), "layer_major")
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
        x = self.body(inputs)
        return (self.head(x) if self.uses_head else x).pow(2).mean()


@pytest.mark.parametrize("sizes", [(2, 2), (3, 0)], ids=str)
@on_ranks(2)
def test_zero_3_with_a_layer_that_comes_late(sizes: tuple[int, int]) -> None:
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
