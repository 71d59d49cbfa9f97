"""The models of the cases: small, odd, and with everything that a model may do to its weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from support.engines import device
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fuzz.cases import Case, Event, ModelSpec, Step

VOCABULARY = 11
INPUTS = 6
"""Input width of a linear embedding; a tied one, and a model without any, take the model's."""
LENGTH = 2


class UserError(Exception):
    """Raised by code that stands for the user's."""


class RmsNorm(nn.Module):
    """A norm by the root mean square, without a mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-3).to(x.dtype) * self.gain
        )


class Block(nn.Module):
    """A residual block."""

    def __init__(self, spec: ModelSpec, number: int) -> None:
        super().__init__()
        self.tiled = spec.tiled
        width, inner = spec.width, spec.inner[number]
        self.norm: nn.Module | None = None
        if spec.norm != "none":
            self.norm = nn.LayerNorm(width) if spec.norm == "layer" else RmsNorm(width)
        self.up = nn.Linear(width, inner, bias=spec.bias)
        self.down = nn.Linear(inner, width, bias=spec.bias and number % 2 == 0)
        if spec.unused == "block" and number == len(spec.inner) - 1:
            self.never = nn.Parameter(torch.ones(3))
        if spec.scalar and number == 0:
            self.gate = nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor, pieces: int = 0) -> torch.Tensor:
        if self.tiled == "none" or not pieces:
            return x + self._mlp(x)
        is_reentrant = self.tiled == "reentrant"
        parts = x.reshape(-1, x.shape[-1]).chunk(pieces)
        found = [checkpoint(self._mlp, part, use_reentrant=is_reentrant) for part in parts]
        return x + torch.cat(found).view_as(x)

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        y = x if self.norm is None else self.norm(x)
        y = self.down(torch.tanh(self.up(y)))
        return y * self.gate if hasattr(self, "gate") else y


class FuzzModel(nn.Module):
    """Embedding, blocks, head; forward returns the mean loss over the samples."""

    def __init__(self, spec: ModelSpec, seed: int) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.spec = spec
        self.fault: str | None = None
        self.keeps_hidden = False
        self.hidden: torch.Tensor | None = None
        width = spec.width
        if spec.unused == "root":
            self.never = nn.Parameter(torch.ones(5))
        if spec.root:
            self.scale = nn.Parameter(torch.linspace(0.8, 1.2, width))
        if spec.embed == "table":
            self.embed: nn.Module = nn.Embedding(VOCABULARY, width)
        elif spec.embed == "sparse":
            self.embed = nn.Embedding(VOCABULARY, width, sparse=True)
        elif spec.embed == "linear":
            self.embed = nn.Linear(width if spec.head == "tied" else INPUTS, width, bias=spec.bias)
        self._add_blocks(spec)
        if spec.unused == "module":
            self.never = nn.Linear(width, 3)
        if spec.head != "none":
            outputs = VOCABULARY if spec.takes_tokens else width
            is_free = spec.head == "linear" and not spec.takes_tokens
            self.head = nn.Linear(width, 2 if is_free else outputs, bias=spec.bias)
        if spec.head == "tied":
            self.head.weight = self.embed.weight
        if spec.strided:
            self.slanted = nn.Parameter(torch.linspace(-0.1, 0.1, 2 * width).view(2, width).t())
        if spec.single:
            self.shift = nn.Parameter(torch.full((1,), 0.1))
        if spec.tower:
            self.tower = nn.Linear(width, width, bias=spec.bias)
        self._freeze(spec)
        named = self.named_parameters()
        self.frozen_at_build = {name for name, p in named if not p.requires_grad}

    def _add_blocks(self, spec: ModelSpec) -> None:
        blocks = [Block(spec, number) for number in range(len(spec.inner))]
        if spec.shared:
            blocks[-1] = blocks[0]
        if spec.stack == "list":
            self.blocks: Any = nn.ModuleList(blocks)
        elif spec.stack == "sequential":
            self.blocks = nn.Sequential(*blocks)
        elif spec.stack == "dict":
            self.blocks = nn.ModuleDict({f"b{number}": b for number, b in enumerate(blocks)})
        else:
            for number, block in enumerate(blocks):
                setattr(self, f"block{number}", block)

    def _freeze(self, spec: ModelSpec) -> None:
        rng = random.Random(spec.seed)
        if spec.frozen == "some":
            anchor = self.anchor()
            for parameter in self.parameters():
                if parameter is not anchor and rng.random() < 0.4:
                    parameter.requires_grad_(False)
        elif spec.frozen == "blocks":
            for block in self.stack()[1::2] or self.stack()[:1]:
                block.requires_grad_(False)
        elif spec.frozen in ("embed", "head"):
            getattr(self, spec.frozen).requires_grad_(False)

    def stack(self) -> list[nn.Module]:
        """The blocks, in order."""
        if self.spec.stack == "attributes":
            return [getattr(self, f"block{n}") for n in range(len(self.spec.inner))]
        return list(self.blocks.values() if self.spec.stack == "dict" else self.blocks)

    def anchor(self) -> nn.Parameter:
        """A trained parameter that every forward uses, whatever is left out."""
        if self.spec.head != "none" and self.spec.frozen != "head":
            return self.head.weight
        if self.spec.embed != "none" and self.spec.frozen != "embed":
            return self.embed.weight
        return self.stack()[0].up.weight

    def forward(
        self,
        inputs: torch.Tensor,
        skip: Sequence[int] = (),
        factor: float = 1.0,
        tower: bool = False,
        pieces: int = 0,
        cut: int | None = None,
    ) -> torch.Tensor:
        spec = self.spec
        if spec.embed == "none":
            x = inputs.to(self.stack()[0].up.weight.dtype)
        else:
            x = self.embed(inputs if spec.takes_tokens else inputs.to(self.embed.weight.dtype))
        if spec.root:
            x = x * self.scale
        if spec.strided:
            x = x + self.slanted[:, 0] * self.slanted[:, 1]
        if spec.dropout:
            x = functional.dropout(x, 0.3, self.training)
        if self.keeps_hidden:
            self.hidden = x = x if x.requires_grad else x.detach().requires_grad_()
        for number, block in enumerate(self.stack()):
            if self.fault == "forward" and number == len(spec.inner) // 2:
                raise UserError("forward")
            if self.fault == "backward" and number == len(spec.inner) // 2 and x.requires_grad:
                x.register_hook(_raise)
            x = x.detach() if number == cut else x
            if number not in skip:
                for _ in range(2 if number in spec.twice else 1):
                    x = self._call(block, x, pieces)
        if tower:
            x = x + torch.tanh(self.tower(x))
        return self._loss(x, inputs) * factor

    def _call(self, block: nn.Module, x: torch.Tensor, pieces: int) -> torch.Tensor:
        if self.spec.recompute == "none":
            return block(x) if self.spec.tiled == "none" else block(x, pieces)
        return checkpoint(block, x, use_reentrant=self.spec.recompute == "reentrant")

    def _loss(self, x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        if spec.head != "none":
            x = self.head(x)
        if spec.single:
            x = x + self.shift
        weight = self._outside_weight() if spec.outside != "none" else None
        if weight is not None and spec.outside == "linear":
            x = functional.linear(torch.tanh(_fitting(x, weight.shape[1])), weight)
        elif weight is not None and spec.outside == "transpose":
            x = torch.tanh(_fitting(x, weight.shape[1])) @ weight.T
        elif weight is not None and spec.outside == "product":
            x = torch.tanh(_fitting(x, weight.shape[0])) @ weight
        target = 0.3 + 0.1 * inputs.float().reshape(len(inputs), -1).mean(1)
        error = x.float().reshape(len(inputs), -1).mean(1) - target
        loss = error.pow(2).mean() + 0.5 * (x.float() - 0.2).pow(2).mean()
        if weight is not None and spec.outside == "penalty":
            loss = loss + 0.3 * weight.float().pow(2).mean()
        return loss

    def _outside_weight(self) -> torch.Tensor:
        if self.spec.outside_of == "block":
            return self.stack()[len(self.spec.inner) // 2].down.weight
        return getattr(self, self.spec.outside_of).weight


def _fitting(x: torch.Tensor, width: int) -> torch.Tensor:
    """Returns ``x`` repeated and cut to ``width``."""
    times = -(-width // x.shape[-1])
    return x.repeat(*[1] * (x.dim() - 1), times)[..., :width]


def _raise(_gradient: torch.Tensor) -> None:
    raise UserError("backward")


def make_inputs(spec: ModelSpec, number: int, samples: int) -> torch.Tensor:
    """Micro-batch ``number`` of a training: [samples, LENGTH] or [samples, LENGTH, width]."""
    generator = torch.Generator().manual_seed(7000 + number)
    if spec.takes_tokens:
        return torch.randint(0, VOCABULARY, (samples, LENGTH), generator=generator)
    wide = spec.width if spec.embed == "none" or spec.head == "tied" else INPUTS
    return torch.randn(samples, LENGTH, wide, generator=generator)


def dropout_seed(number: int, rank: int, micro: int, part: int) -> int:
    """The seed of a forward's random numbers."""
    return ((number * 8 + micro) * 8 + rank) * 2 + part


def set_gradient(shape: torch.Size) -> torch.Tensor:
    """What an event sets a gradient to: numbers that any dtype holds."""
    flat = torch.arange(max(1, shape.numel()))[: shape.numel()]
    return ((flat % 16 - 8) / 8).view(shape)


def set_values(shape: torch.Size, event: Event) -> torch.Tensor:
    """What an event sets a parameter to."""
    return torch.linspace(-event.value, 0.5, max(1, shape.numel()))[: shape.numel()].view(shape)


def batch_of(
    case: Case, number: int, rank: int, micro: int, step: Step | None, part: int = 0
) -> dict[str, Any]:
    """The arguments of a forward; without a step nothing is left out."""
    own = case.micro_samples[rank]
    samples = own[micro] if own else 1
    index = ((number * 8 + micro) * 8 + rank) * 2 + part
    inputs = make_inputs(case.model, index, samples).to(device())
    if step is None:
        return {"inputs": inputs}
    found = {"inputs": inputs, "skip": step.skip[rank][micro], "factor": step.factor}
    if case.model.tower:
        found["tower"] = rank in step.tower
    if case.model.tiled != "none":
        found["pieces"] = step.pieces
    if step.cut is not None:
        found["cut"] = step.cut
    return found
