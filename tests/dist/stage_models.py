"""Models that use their weights in unusual ways: again, recomputed, outside of their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.frozen import FROZEN
from support.models import HIDDEN, Block, Mlp, Recomputed, make_batch, make_model
from torch import nn
from torch.utils.checkpoint import checkpoint

Read = Callable[[Any, torch.Tensor], torch.Tensor]


class Nested(Mlp):
    """Blocks in checkpointed segments of two, or one by one; reentrant or not."""

    def __init__(self, *, reentrant: bool, together: int) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.together = together

    def _segment(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for block in self.blocks[first : first + self.together]:
            x = block(x)
        return x

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for first in range(0, len(self.blocks), self.together):
            x = checkpoint(self._segment, x, first, use_reentrant=self.reentrant)
        return self.head(x).float().pow(2).mean()


class RootOwned(Mlp):
    """The model itself owns a weight, which no module's hook can know of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.head(self.body(inputs * self.scale)) * self.scale).float().pow(2).mean()


class PartlyFrozen(Mlp):
    """One block and a bias are not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)
        self.blocks.get_parameter("2.up.bias").requires_grad_(False)


class OneBlockAgain(Mlp):
    """The second block is used once more behind the last one."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[1](self.body(inputs))).float().pow(2).mean()


class OneUnused(Mlp):
    """A parameter of the third block gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].register_parameter("unused", nn.Parameter(torch.ones(32)))


class Unnoticed(torch.autograd.Function):
    """Stands for an extension: torch is told of nothing that it reads of a parameter."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            ctx.save_for_backward(x, weight)
            return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            return gradients[0] @ weight.T, x.T @ gradients[0]


def _again_in_a_segment(model: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: y @ model.head.weight, x, use_reentrant=False)


def _elsewhere(model: Any, x: torch.Tensor) -> torch.Tensor:
    x = F.linear(x, model.embed.weight)
    return torch.stack([x, x + model.blocks[1].down.bias])


READS: dict[str, Read] = {
    "penalty": lambda model, x: x + model.head.weight.pow(2).sum(),
    "product": lambda model, x: x @ model.head.weight,
    "linear": lambda model, x: F.linear(x, model.head.weight),
    "transposed": lambda model, x: x @ model.head.weight.T,
    "data": lambda model, x: x @ model.head.weight.data,
    "embed": lambda model, x: F.linear(x, model.embed.weight, model.embed.bias),
    "block": lambda model, x: x + model.blocks[1].down.bias + model.blocks[2].up.weight.mean(),
    "elsewhere": _elsewhere,
    "segment": _again_in_a_segment,
    "unnoticed": lambda model, x: Unnoticed.apply(x, model.head.weight),
    "read twice": lambda model, x: (x @ model.head.weight) @ model.head.weight.T,
}

LATER = ("penalty", "product", "linear", "embed", "block")
"""Those that are tried from a later step on as well: no first pass sees them."""


class Reading(Mlp):
    """An MLP that reads a weight in its end, after the module that owns it, from a step on."""

    def __init__(self, read: str, since: int = 0) -> None:
        super().__init__()
        self.read, self.since, self.step = READS[read], since, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.head(self.body(inputs)))
        if self.step >= self.since:
            x = self.read(self, x)
        return x.float().pow(2).mean()


class Parted(Mlp):
    """Rank 1 comes to a block of its own where rank 0 reads a weight, from a step on."""

    def __init__(self, since: int = 0) -> None:
        super().__init__()
        self.since, self.step = since, 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(inputs.to(self.embed.weight.dtype)))
        if self.step >= self.since:
            x = self.blocks[1](x) if dist.get_rank() == 1 else x
            x = x + self.blocks[2].down.bias.mean()
        return self.head(self.blocks[2](x)).float().pow(2).mean()


class Short(nn.Module):
    """A stack of one block, whose list's own forward is never called, and no head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN, bias=False)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x @ self.embed.weight).float().pow(2).mean()


class Pairs(nn.Module):
    """Blocks that are lists: their children's forward is called, theirs never."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList([Block(HIDDEN), nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())])
            for _ in range(3)
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = inputs.to(self.blocks[0][1][0].weight.dtype)  # pyright: ignore
        for first, second in self.blocks:  # pyright: ignore
            x = first(x)
            for each in second:
                x = each(x)
        return x.float().pow(2).mean()


class Penalized(nn.Module):
    """Nothing but a penalty on all weights comes after the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model("mlp")

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss = self.inner(inputs)
        return loss + 1e-3 * torch.stack([p.float().norm() for p in self.parameters()]).sum()


def _twice() -> Recomputed:
    model = Recomputed()
    model.times = 2
    return model


READING: dict[str, Callable[[], nn.Module]] = {
    **{read: lambda read=read: Reading(read) for read in READS},
    **{f"{read}-later": lambda read=read: Reading(read, 2) for read in LATER},
    "parted": Parted,
    "parted-later": lambda: Parted(2),
    "short": Short,
    "pairs": Pairs,
    "penalized": Penalized,
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "reentrant-1": lambda: Nested(reentrant=True, together=1),
    "reentrant-2": lambda: Nested(reentrant=True, together=2),
    "recomputed-1": lambda: Nested(reentrant=False, together=1),
    "recomputed-2": lambda: Nested(reentrant=False, together=2),
    "twice": _twice,
    "root": RootOwned,
    "frozen": PartlyFrozen,
    "again": OneBlockAgain,
    "unused": OneUnused,
    **READING,
}


def build(kind: str) -> nn.Module:
    """A model by name; behind a "+" what of it is frozen."""
    kind, _, frozen = kind.partition("+")
    if frozen:
        model = build(kind)
        torch.manual_seed(1)
        FROZEN[frozen](model)
        return model
    if kind.endswith("-hf"):  # transformers' own checkpointing, not reentrant
        model: Any = make_model(kind[:-3])
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model
    torch.manual_seed(0)  # the same on all ranks
    return MODELS[kind]() if kind in MODELS else make_model(kind)


def batch_of(kind: str, number: int, bf16: bool) -> dict[str, Any]:
    kind = kind.partition("+")[0]
    plain = kind.removesuffix("-hf")
    batch = make_batch("mlp" if kind in MODELS else plain, number)
    if "pixel_values" in batch and bf16:
        batch["pixel_values"] = batch["pixel_values"].bfloat16()
    return batch
