"""Two ranks with models, and uses of them, that are not the usual ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from support.beside_torch import training_beside_torch
from support.engines import built, make_config
from support.models import HIDDEN, Mlp, make_batch
from torch import nn

from hytrain.errors import UnsupportedError

pytestmark = pytest.mark.timeout(240)

STEPS = 3

Backward = Callable[[Any, int], None]


class WithScalar(Mlp):
    """Has a parameter without dimensions, as CLIP's logit scale."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.tensor(1.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs * self.odd)


class WithTransposed(Mlp):
    """Has a parameter whose memory is not in the order of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Parameter(torch.randn(HIDDEN, HIDDEN).t() / HIDDEN)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs @ self.odd)


class TiedIntoHead(nn.Module):
    """No stack of blocks: a body, and a head whose last module has the body's first weight, and a
    bias that the head owns, as ALBERT's."""

    class Head(nn.Module):
        """Its output is its last module's."""

        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(HIDDEN))
            self.dense = nn.Linear(HIDDEN, HIDDEN)
            self.decoder = nn.Linear(HIDDEN, HIDDEN)
            self.decoder.weight, self.decoder.bias = weight, self.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decoder(torch.tanh(self.dense(x)))

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.head = self.Head(self.body[0].weight)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs)).pow(2).mean()


class TiedBlocks(Mlp):
    """Two blocks have modules with the weights of another's, in the middle and at their end."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].up.weight = self.blocks[0].up.weight
        self.blocks[3].down.weight = self.blocks[1].down.weight
        self.blocks[3].down.bias = self.blocks[0].down.bias


class WithOuterParameters(Mlp):
    """A module with parameters of its own returns what its last block has returned, as Hubert's.

    Where it reads one before its blocks only, as Zaya's, a multiplication needs that once more when
    all blocks' backward is over.
    """

    class Encoder(nn.Module):
        """It reads one before and perhaps one between its blocks."""

        def __init__(self, blocks: nn.ModuleList, between: bool) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(HIDDEN))
            self.middle = nn.Parameter(torch.randn(HIDDEN)) if between else None
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.first
            for index, block in enumerate(self.blocks):
                x = block(x if index != 1 or self.middle is None else x * self.middle)
            return x

    def __init__(self, between: bool = True) -> None:
        super().__init__()
        self.encoder = self.Encoder(self.blocks, between)
        del self.blocks, self.head

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.encoder(self.embed(inputs)).pow(2).mean()


class WithWrittenViews(Mlp):
    """Writes to what modules return, which is a view, as masks of wav2vec2 are written."""

    class Linear(nn.Linear):
        """Of an input of three dimensions a linear layer's output is a view, as a rule."""

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)[None]

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Linear(HIDDEN, HIDDEN)
        self.embed = self.Linear(HIDDEN, HIDDEN)
        self.head = self.Linear(HIDDEN, HIDDEN)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(torch.tanh(self.front(inputs)))
        x[..., 0] = 0.5
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        x[..., 1] = 2.0
        return x.pow(2).mean()


class WithWritingBlocks(Mlp):
    """Blocks write their results to what they are given, by weights that are not trained."""

    class Block(nn.Module):
        """Its output is its input: no hook tells that backward comes to it."""

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(1 + 0.1 * torch.randn(HIDDEN), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(self.scale)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))


KINDS: dict[str, Callable[[], nn.Module]] = {
    "scalar": WithScalar,
    "transposed": WithTransposed,
    "tied into a head": TiedIntoHead,
    "tied blocks": TiedBlocks,
    "outer parameters": WithOuterParameters,
    "outer scale": lambda: WithOuterParameters(between=False),
    "written views": WithWrittenViews,
}


def _make(kind: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return KINDS[kind]()


# Stages 1 and 2 do the same with a model.
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", sorted(KINDS))
@on_ranks(2)
def test_unusual_models(kind: str, stage: int) -> None:
    """Ranks begin with rank 0's weights, and make the steps of one process with both batches."""
    taken = _make(kind, dist.get_rank())
    with training_beside_torch(_make(kind, 0), stage, taken=taken, eps=1e-2) as beside:
        for step in range(3):
            batches = [make_batch("mlp", 2 * step + rank) for rank in range(2)]
            beside.step(lambda model, rank, batches=batches: model(**batches[rank]))


@on_ranks(2)
def test_weights_that_backward_lacks() -> None:
    """An error names the layer; without it backward would compute with memory given up."""
    config = make_config(gpu_fraction=0.5, bf16=False, stage=3)
    with built(WithWritingBlocks(), config) as engine:
        loss = engine(**make_batch("mlp", 0))
        with pytest.raises(UnsupportedError, match=r"layer 'blocks\.2' that are not there"):
            engine.backward(loss)
