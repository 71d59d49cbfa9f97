"""Cases of two ranks with models, and uses of them, that are not the usual ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.engines import built, make_config
from support.models import HIDDEN, Mlp, loss_of, make_batch, make_model
from torch import nn

from hytrain.errors import UnsupportedError

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


def unusual_models(kind: str, stage: int) -> None:
    """Ranks begin with rank 0's weights, and make the steps of one process with both batches."""

    def backward(model: Any, number: int) -> torch.Tensor:
        return loss_of(model(**make_batch("mlp", number)))

    def ours(engine: Any, step: int) -> None:
        engine.backward(backward(engine, 2 * step + dist.get_rank()))

    def alone(model: Any, step: int) -> None:
        ((backward(model, 2 * step) + backward(model, 2 * step + 1)) / 2).backward()

    _same_steps(lambda seed: _seeded(KINDS[kind], seed), stage, ours, alone)


def weights_that_backward_lacks() -> None:
    """An error names the layer; without it backward would compute with memory given up."""
    config = make_config(gpu_fraction=0.5, bf16=False, stage=3)
    with built(_seeded(WithWritingBlocks, 0), config) as engine:
        loss = engine(**make_batch("mlp", 0))
        with pytest.raises(UnsupportedError, match=r"layer 'blocks\.2' that are not there"):
            engine.backward(loss)


def two_forwards(stage: int) -> None:
    """One loss of two forwards on each rank is that of four in one process."""

    def total(model: Any, numbers: range) -> torch.Tensor:
        losses = [loss_of(model(**make_batch("mlp", number))) for number in numbers]
        return torch.stack(losses).sum()

    def ours(engine: Any, step: int) -> None:
        begin = 4 * step + 2 * dist.get_rank()
        engine.backward(total(engine, range(begin, begin + 2)))

    def alone(model: Any, step: int) -> None:
        (total(model, range(4 * step, 4 * step + 4)) / 2).backward()

    _same_steps(lambda seed: make_model("mlp", seed=seed), stage, ours, alone)


def a_changing_number_of_forwards(stage: int, gathers: str, failed: int) -> None:
    """One loss of as many forwards as there happen to be in a step, the same on all ranks.

    Args:
        stage: of ZeRO.
        gathers: see make_config.
        failed: forwards before the first step that the user's code ends.
    """
    counts = (1, 2, 1, 3, 2, 1)

    def total(model: Any, numbers: list[int]) -> torch.Tensor:
        return torch.stack([loss_of(model(**make_batch("mlp", n))) for n in numbers]).sum()

    def ours(engine: Any, step: int) -> None:
        rank = dist.get_rank()
        for _ in range(failed if step == 0 else 0):
            _fail_forward(engine)
        engine.backward(total(engine, [10 * step + 2 * i + rank for i in range(counts[step])]))

    def alone(model: Any, step: int) -> None:
        (total(model, [10 * step + i for i in range(2 * counts[step])]) / 2).backward()

    _same_steps(lambda seed: make_model("mlp", seed=seed), stage, ours, alone, len(counts), gathers)


class _UserError(Exception):
    """Raised in the middle of a forward."""


def _fail_forward(engine: Any) -> None:
    def fail(*_: object) -> None:
        raise _UserError

    hook = engine.module.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(_UserError):
        engine(**make_batch("mlp", 0))
    hook.remove()


def _seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def _same_steps(
    make: Callable[[int], nn.Module],
    stage: int,
    ours: Backward,
    alone: Backward,
    steps: int = STEPS,
    gathers: str = "each",
) -> None:
    config = make_config(gpu_fraction=0.5, bf16=False, stage=stage, clipping=0.0, gathers=gathers)
    config["hytrain"]["shard_fractions"] = [0.7, 0.3]
    # With an eps like the gradients, roundings of them make no steps of their own.
    config["optimizer"]["params"]["eps"] = 1e-2
    with built(make(dist.get_rank()), config) as engine:
        for step in range(steps):
            ours(engine, step)
            engine.step()
        state = engine.fp32_state_dict()
    model = make(0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        alone(model, step)
        optimizer.step()
    for name, parameter in model.named_parameters():
        if dist.get_rank() == 0:
            assert not torch.equal(parameter, before[name])
            torch.testing.assert_close(
                state[name]["fp32"].view_as(parameter), parameter.detach(), rtol=1e-5, atol=1e-6
            )
