"""A training compared with plain torch: each step's loss, at the end every weight and moment."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.engines import built, make_config

CLIPPING = 0.5
Loss = Callable[[Any, int], torch.Tensor]
"""Computes the loss of a model (an engine or plain) on a rank's data."""


class BesideTorch:
    """The same steps with an engine on this rank, and with torch on all ranks' data at once."""

    def __init__(self, model: nn.Module, eps: float = 1e-8) -> None:
        """Must come before the engine takes the model over; ``engine`` is set afterwards."""
        self.plain = copy.deepcopy(model)
        self.trained = {name: p for name, p in self.plain.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.trained.values(), lr=1e-2, weight_decay=0.1, eps=eps
        )
        self.ranks, self.rank = dist.get_world_size(), dist.get_rank()
        self.engine: Any = None
        self.norm = 0.0
        """The norm of torch's last gradients, before they were clipped."""
        for parameter in self.trained.values():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, loss: Loss) -> None:
        """Makes one step; the loss must be torch's."""
        mine = loss(self.engine, self.rank)
        self.engine.backward(mine)
        self.engine.step()
        losses = [loss(self.plain, rank) for rank in range(self.ranks)]
        self.follow(mine, losses[self.rank], sum(losses) / self.ranks)

    def train_batch(self, batches: Callable[[int], list[dict[str, torch.Tensor]]]) -> None:
        """Makes a step by ``engine.train_batch``; ``batches`` gives a rank's, which count alike."""
        mine = self.engine.train_batch(iter(batches(self.rank)), num_valid=lambda _: 1)
        every = [batch for rank in range(self.ranks) for batch in batches(rank)]
        loss = sum(self.plain(**batch) for batch in every) / len(every)
        self.follow(mine, loss, loss)

    def follow(self, mine: torch.Tensor, expected: torch.Tensor, loss: Any) -> None:
        """Makes torch's step, with all ranks' ``loss``; this rank's loss must be as expected."""
        torch.testing.assert_close(mine.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
        self.optimizer.zero_grad(set_to_none=False)  # no gradient counts as zero, as with DeepSpeed
        loss.backward()
        self.norm = float(nn.utils.clip_grad_norm_(self.trained.values(), CLIPPING))
        self.optimizer.step()

    def check(self) -> None:
        """Compares every element of every weight and moment; a collective."""
        found = self.engine.fp32_state_dict()
        if self.rank:
            return
        for name, parameter in self.trained.items():
            state = self.optimizer.state[parameter]
            moments = {key: state[key] for key in ("exp_avg", "exp_avg_sq")}
            for key, expected in {"fp32": parameter.detach(), **moments}.items():
                torch.testing.assert_close(
                    found[name][key],
                    expected,
                    rtol=1e-4,
                    atol=2e-6,
                    msg=lambda text, what=f"{key} of {name}": f"{what}: {text}",
                )


@contextmanager
def training_beside_torch(
    model: nn.Module,
    stage: int,
    *,
    taken: nn.Module | None = None,
    gathers: str = "each",
    eps: float = 1e-8,
    zero: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    top: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] | None = None,
    **keywords: Any,
) -> Iterator[BesideTorch]:
    """An engine beside torch, compared at the end.

    Args:
        model: both start from it.
        stage: ZeRO's.
        taken: what the engine takes over instead, with other weights on ranks other than 0.
        gathers: see make_config.
        eps: Adam's; if it is of the gradients' size, roundings of tiny ones make no steps.
        zero: keys of "zero_optimization".
        section: keys of "hytrain".
        top: further arguments of make_config.
        prepare: called with ``model``, after torch has its own.
        keywords: of hytrain.initialize.
    """
    config = make_config(
        stage=stage, bf16=False, clipping=CLIPPING, gathers=gathers, hytrain=section, **(top or {})
    )
    config["zero_optimization"].update(zero or {})
    config["optimizer"]["params"]["eps"] = eps
    beside = BesideTorch(model, eps)
    if prepare is not None:
        prepare(model)
    with built(model if taken is None else taken, config, **keywords) as beside.engine:
        yield beside
        beside.check()
