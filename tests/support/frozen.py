"""Models of which only some parameters are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

RANK = 4


class Lora(nn.Module):
    """A frozen projection, and a trained low-rank one beside it."""

    def __init__(self, base: nn.Module, width_in: int, width_out: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(width_in, RANK, bias=False)
        self.up = nn.Linear(RANK, width_out, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        """The frozen weight, which T5 reads."""
        return self.base.get_parameter("weight")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """The model's stack of blocks."""
    return next(module for module in model.modules() if isinstance(module, nn.ModuleList))


def _projections(block: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for module in list(block.modules()):
        for name, child in list(module.named_children()):
            if type(child).__name__ in ("Linear", "Conv1D"):
                yield module, name, child


def _add_adapters(block: nn.Module) -> None:
    for owner, name, base in _projections(block):
        weight = base.get_parameter("weight")
        shape = vars(weight).get("ds_shape", weight.shape)  # partitioned by zero.Init
        widths = shape if type(base).__name__ == "Conv1D" else shape[::-1]
        setattr(owner, name, Lora(base, *widths))


def lora(model: nn.Module) -> None:
    """Adds adapters to all blocks; nothing else is trained."""
    model.requires_grad_(False)
    for block in blocks_of(model):
        _add_adapters(block)


def some_lora(model: nn.Module) -> None:
    """Adds adapters to every other block; nothing else is trained."""
    model.requires_grad_(False)
    for block in list(blocks_of(model))[1::2]:
        _add_adapters(block)


def last(model: nn.Module) -> None:
    """Trains only the last block and the parameters after it."""
    blocks = blocks_of(model)
    before = {id(p) for block in list(blocks)[:-1] for p in block.parameters()}
    inside = {id(p) for p in blocks.parameters()}
    behind = False
    for parameter in model.parameters():
        behind |= id(parameter) in inside
        parameter.requires_grad_(behind and id(parameter) not in before)


def embeddings(model: nn.Module) -> None:
    """Freezes the parameters before the blocks."""
    inside = {id(p) for p in blocks_of(model).parameters()}
    for parameter in model.parameters():
        if id(parameter) in inside:
            return
        parameter.requires_grad_(False)


def alternating(model: nn.Module) -> None:
    """Freezes every other block, and in the others every parameter that is not a matrix."""
    for number, block in enumerate(blocks_of(model)):
        for parameter in block.parameters():
            parameter.requires_grad_(number % 2 == 1 and parameter.dim() > 1)


def only_embeddings(model: nn.Module) -> None:
    """Trains only the parameters before the blocks: backward goes through frozen blocks."""
    inside = {id(p) for p in blocks_of(model).parameters()}
    model.requires_grad_(False)
    for parameter in model.parameters():
        if id(parameter) in inside:
            return
        parameter.requires_grad_(True)


FROZEN: dict[str, Callable[[nn.Module], None]] = {
    "lora": lora,
    "some_lora": some_lora,
    "last": last,
    "embeddings": embeddings,
    "alternating": alternating,
    "only_embeddings": only_embeddings,
}
"""Functions that freeze parts of a model, by name."""
