"""Cases of accumulation layer by layer on several ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from rank_batches import STEPS, Shares, batches, dataset
from support.engines import built, make_config
from support.models import make_model
from torch import nn

from hytrain.config import BatchShares


def _train(case: Shares, model: nn.Module) -> tuple[list[float], list[dict[int, Any]], Any]:
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
    gradients: list[dict[int, Any]] = []
    losses: list[float] = []
    with built(model, config) as engine:
        engine.optimizer.on_reduced_gradient = lambda state, shard: gradients[-1].__setitem__(
            state.index, shard.detach().clone()
        )
        iterator = batches(shares, rank, dataset(STEPS * shares.global_batch))
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
