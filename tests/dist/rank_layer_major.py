"""Cases of accumulation layer by layer on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rank_batches import STEPS, Shares, batches, dataset
from support.engines import built, make_config
from support.models import make_model
from torch import nn

from hytrain.config import BatchShares


def _train(
    case: Shares, model: nn.Module, watch: Callable[[Any], None] | None = None, **zero: Any
) -> tuple[list[float], list[dict[int, Any]], Any]:
    """Losses, each step's reduced gradients, and why it was not computed layer by layer."""
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
        engine.optimizer.on_reduced_gradient = lambda state, shard: gradients[-1].__setitem__(
            state.index, shard.detach().clone()
        )
        iterator = batches(shares, rank, dataset(STEPS * shares.global_batch))
        if watch is not None:
            watch(engine)
        for _ in range(STEPS):
            gradients.append({})
            losses.append(float(engine.train_batch(iterator)))
        refusal = vars(engine._accumulation).get("refusal")
    return losses, gradients, refusal


def same_as_micro_batch_major(case: Shares) -> None:
    """On every rank, bit by bit."""
    ours = _train(case, make_model("llama"))
    assert ours[2] is None
    plain = replace(case, accumulation="micro_batch_major", activations="keep")
    theirs = _train(plain, make_model("llama"))
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
        gather, begin = weights.gatherer.gather, engine.optimizer.begin_layers

        def count(layer: Any, **keywords: Any) -> None:
            if counts:
                counts[-1][layer.index] = counts[-1].get(layer.index, 0) + 1
            gather(layer, **keywords)

        def begin_counting() -> None:
            counts.append({})
            begin()

        weights.gatherer.gather = count
        engine.optimizer.begin_layers = begin_counting

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


def all_ranks_fall_back(case: Shares) -> None:
    """With ZeRO-3 they have to do so together."""
    results = []
    for accumulation in ("layer_major", "micro_batch_major"):
        model = make_model("llama")
        model.model.norm.register_forward_pre_hook(
            lambda _m, args, m=model: (_again(m, args[0]),),
        )
        results.append(_train(replace(case, accumulation=accumulation), model))
    assert results[0][2] is not None
    assert results[1][2] is None
    assert results[0][0] == results[1][0]


def _again(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The last block once more."""
    return model.model.layers[-1](hidden, position_embeddings=rotary(model, hidden))
