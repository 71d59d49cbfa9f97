"""A training beside plain torch: each step's loss, and in the end every weight and moment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

CLIPPING = 0.5
Loss = Callable[[Any, int], torch.Tensor]
"""Of a model (an engine, or plain), on the data of a rank."""


class BesideTorch:
    """The same steps with an engine on this rank, and with torch on all ranks' data at once."""

    def __init__(self, model: nn.Module, ranks: int = 1, rank: int = 0) -> None:
        """Before the engine takes the model over; ``engine`` is set after it."""
        self.plain = copy.deepcopy(model)
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-2, weight_decay=0.1)
        self.ranks, self.rank = ranks, rank
        self.engine: Any = None
        for parameter in self.plain.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def step(self, loss: Loss) -> None:
        """One step; the loss must be torch's."""
        mine = loss(self.engine, self.rank)
        self.engine.backward(mine)
        self.engine.step()
        losses = [loss(self.plain, rank) for rank in range(self.ranks)]
        found, expected = mine.detach().cpu(), losses[self.rank].detach()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        self.optimizer.zero_grad(set_to_none=False)  # none counts as zero, as with DeepSpeed
        (sum(losses) / self.ranks).backward()  # pyright: ignore
        nn.utils.clip_grad_norm_(self.plain.parameters(), CLIPPING)
        self.optimizer.step()

    def check(self) -> None:
        """Every element of every weight and moment; a collective."""
        found = self.engine.fp32_state_dict()
        if self.rank:
            return
        for name, parameter in self.plain.named_parameters():
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
