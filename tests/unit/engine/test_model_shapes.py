"""Weights used twice, shared, tied, frozen, unused or recomputed: gradients and steps are right."""

from __future__ import annotations

import pytest
import torch
from support.models import HIDDEN, Block, Mlp
from support.shadow import Twin
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import FRACTIONS, train_and_compare

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]


class Shaped(Mlp):
    """An MLP whose use of its blocks is a list of calls; ``recompute`` checkpoints each call."""

    def __init__(self, calls: list[int], recompute: str = "none") -> None:
        torch.manual_seed(0)
        super().__init__()
        self.calls = calls
        self.recompute = recompute

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for index in self.calls:
            x = self._call(self.blocks[index], x)
        return self.head(x).pow(2).mean()

    def _call(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.recompute == "none":
            return block(x)
        if self.recompute == "nested":
            inner = lambda y: checkpoint(block, y, use_reentrant=False)  # noqa: E731
            return checkpoint(inner, x, use_reentrant=False)
        return checkpoint(block, x, use_reentrant=self.recompute == "reentrant")


RECOMPUTE = ["none", "reentrant", "not_reentrant", "nested"]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_each_block_once(gpu_fraction: float, recompute: str) -> None:
    early = train_and_compare(Shaped([0, 1, 2, 3], recompute), gpu_fraction=gpu_fraction)
    # In every backward, the first one too, all layers leave before its end.
    assert early == [6, 6, 6, 6, 6]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_blocks_used_more_than_once(gpu_fraction: float, recompute: str) -> None:
    model = Shaped([0, 1, 1, 2, 0, 3, 1], recompute)
    early = train_and_compare(model, gpu_fraction=gpu_fraction)
    # The first backward may send a block too early; then it takes it back until the end.
    assert (early[0] < 6) == (recompute == "reentrant")
    assert early[1:] == [6] * 4


@pytest.mark.parametrize("recompute", ["none", "reentrant"])
def test_a_block_that_no_step_uses(gpu_fraction: float, recompute: str) -> None:
    early = train_and_compare(Shaped([0, 1, 3], recompute), gpu_fraction=gpu_fraction)
    assert early[1:] == [5] * 4


@pytest.mark.parametrize(
    ("recompute", "first_use"),
    [("none", True), ("none", False), ("reentrant", True), ("nested", False)],
)
def test_a_block_used_in_some_steps(gpu_fraction: float, recompute: str, first_use: bool) -> None:
    model = Shaped([0, 1, 2, 3], recompute)

    def choose(number: int) -> None:
        model.calls[2:3] = [2] if (number % 2 == 0) is first_use else []
        model.calls[:] = [c for c in model.calls if c != 3] + [3]

    twin_model = Shaped(model.calls, recompute)  # shares the list of calls
    twin_model.load_state_dict(model.state_dict())
    twin = Twin(twin_model, copied=False)
    train_and_compare(model, gpu_fraction=gpu_fraction, steps=7, before=choose, twin=twin)


class Lookup(nn.Module):
    """A weight that is used as an input table and again as the output matrix."""

    def __init__(self, tied: bool) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.table = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(HIDDEN, HIDDEN, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.table(inputs)
        for block in self.blocks:
            x = block(x)
        return self.head(x).pow(2).mean() + self.table.weight.pow(2).mean()


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights(gpu_fraction: float, tied: bool) -> None:
    early = train_and_compare(Lookup(tied), gpu_fraction=gpu_fraction)
    assert early[1:] == [4 if tied else 5] * 4


def test_weights_used_from_outside_their_module(gpu_fraction: float) -> None:
    """A module whose own forward never runs: its weights are waited for at forward's start."""

    class Borrowed(Mlp):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            block = self.blocks[2]
            x = inputs @ block.up.weight.t() @ block.down.weight.t()
            for other in (self.blocks[0], self.blocks[1], self.blocks[3]):
                x = other(x)
            return self.head(self.embed(x)).pow(2).mean()

    torch.manual_seed(0)
    train_and_compare(Borrowed(), gpu_fraction=gpu_fraction)


def test_frozen_parameters_stay(gpu_fraction: float) -> None:
    torch.manual_seed(0)
    model = Mlp()
    frozen = [*model.blocks[1].parameters(), model.head.bias]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = [p.detach().clone() for p in frozen]
    early = train_and_compare(model, gpu_fraction=gpu_fraction)
    assert early[1:] == [5] * 4
    assert all(torch.equal(a, b) for a, b in zip(before, frozen, strict=True))


def test_a_part_of_the_parameters_given(gpu_fraction: float) -> None:
    torch.manual_seed(0)
    model = Mlp()
    trained = [*model.embed.parameters(), *model.blocks[2].parameters()]
    early = train_and_compare(model, gpu_fraction=gpu_fraction, trained=trained)
    assert early[1:] == [2] * 4


def test_a_parameter_frozen_later_and_thawed(gpu_fraction: float) -> None:
    """While it is frozen its gradient is zero; decay and momentum act on it, as in ZeRO."""
    torch.manual_seed(0)
    model = Mlp()
    twin = Twin(model)

    def freeze(number: int) -> None:
        for each in (model, twin.plain):
            each.blocks[0].up.weight.requires_grad_(number not in (2, 3))

    early = train_and_compare(model, gpu_fraction=gpu_fraction, steps=6, before=freeze, twin=twin)
    # Block 0 comes before "before" in backward: what is behind it waits for it.
    assert early == [6, 6, 4, 4, 6, 6]


def test_a_model_without_a_stack(gpu_fraction: float) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(HIDDEN, 48)
            self.scale = nn.Parameter(torch.ones(48))
            self.second = nn.Linear(48, 7)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(inputs)) * self.scale).pow(2).mean()

    torch.manual_seed(0)
    train_and_compare(Plain(), gpu_fraction=gpu_fraction)
