"""Models with the habits that computing layer by layer must cope with, or notice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from support.models import HIDDEN, Block, Mlp
from torch import nn
from torch.utils.checkpoint import checkpoint


class WithBlocks(Mlp):
    """With blocks of another kind."""

    block: type[Block] = Block

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.block() for _ in range(4))


class Dropped(Mlp):
    """Dropout before, in and behind the blocks."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.down = nn.Sequential(nn.Dropout(0.3), block.down)
        self.before = nn.Dropout(0.2)
        self.behind = nn.Dropout(0.2)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        return self.behind(super().through(self.before(x)))


class Numbering(Mlp):
    """Counts its forwards in a buffer, always in another tensor, and computes with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros(()))

    def numbered(self, x: torch.Tensor) -> torch.Tensor:
        """What goes into the blocks."""
        self.number = self.number + 1
        return x / self.number

    def through(self, x: torch.Tensor) -> torch.Tensor:
        return super().through(self.numbered(x))


@dataclass
class Message:
    """What the blocks of Talking pass on."""

    hidden: torch.Tensor
    extras: dict[str, Any]
    trace: tuple[torch.Tensor, ...] = ()


class TalkingBlock(Block):
    """Takes and returns nested structures, with a side input that has a gradient."""

    def forward(
        self, message: Message, *, scales: list[torch.Tensor], note: str
    ) -> tuple[Message, str]:
        x = super().forward(message.hidden * scales[0])
        x = x + message.extras["side"][0]
        return Message(x, message.extras, (x.mean(), *message.trace)), note + "."


class Talking(WithBlocks):
    """Blocks with dataclasses, mappings and lists; a loss from what all of them return."""

    block = TalkingBlock

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.side = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        message = Message(self.embed(inputs), {"side": (self.side(inputs).sin(),), "other": None})
        note = ""
        for block in self.blocks:
            message, note = block(message, scales=[self.scale], note=note)
        assert note == "...."
        penalty = torch.stack(message.trace).pow(2).sum()
        return self.head(message.hidden).pow(2).mean() + penalty


class Between(Mlp):
    """Computes between the blocks, in place too, and skips from the first block to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        first = None
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 0:
                first = x
            if index == 1:
                x = torch.tanh(self.mix(x))
            if index == 2:
                x += 0.25  # what the block has returned
                x = x + first
        return x + first


class InPlaceBlock(Block):
    """Writes to a tensor of its own that autograd knows, never to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y += x
        return y


class InPlace(WithBlocks):
    """Writes in place in the blocks, and to what they return."""

    block = InPlaceBlock

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            x *= 0.5
        return x


class Autocast(Mlp):
    """Half of the forward is under autocast."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = super().through(x)
        return x.float()


class Aside(Mlp):
    """Keeps its blocks' outputs for a penalty, by hooks on a part of each."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[torch.Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda _m, _i, out: self._kept.append(out))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self._kept = []
        loss = super().forward(inputs)
        return loss + 0.1 * torch.stack([kept.pow(2).mean() for kept in self._kept]).sum()


class Twice(Mlp):
    """Calls its second block twice."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = block(block(x)) if index == 1 else block(x)
        return x


class TwiceAtTheEnd(Mlp):
    """Calls its last block twice."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[-1](super().through(x))


class Backwards(Mlp):
    """Calls its blocks from the last to the first."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = block(x)
        return x


class LayerDrop(Mlp):
    """Leaves blocks out, by chance."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if torch.rand(()) < 0.7:
                x = block(x)
        return x


class Reentrant(Mlp):
    """Checkpoints its blocks from outside, the old way."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


class NonReentrant(Mlp):
    """Checkpoints its blocks from outside, with something of its own in the segment."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(lambda y, b=block: torch.tanh(b(y)) * 2.0, x, use_reentrant=False)
        return x


class WritingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.125
        return super().forward(x)


class Writing(WithBlocks):
    """Blocks that write to their inputs."""

    block = WritingBlock


class CountingBlock(Block):
    """What it returns depends on how often it was called."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1.0 + 0.1 * self.calls)


class Counting(WithBlocks):
    """Reset by each forward: micro-batch by micro-batch, every block is called once in one."""

    block = CountingBlock

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.calls = 0
        return super().forward(inputs)


class RunningBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(x))


class Running(WithBlocks):
    """Blocks whose forward changes their buffers, running statistics."""

    block = RunningBlock


class AppendingBlock(Block):
    def forward(self, x: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        y = super().forward(x)
        found.append(y.detach().abs().mean())
        return y


class Appending(WithBlocks):
    """Blocks that leave what they compute in a list that they are given."""

    block = AppendingBlock

    def through(self, x: torch.Tensor) -> torch.Tensor:
        found: list[torch.Tensor] = []
        for block in self.blocks:
            x = block(x, found)
        return x * torch.stack(found).mean()


class Shared(Mlp):
    """Uses what was computed before the blocks again behind them."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.tanh(x)
        return super().through(before) + before


class Plain(nn.Module):
    """Without a stack of blocks: nothing but one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(HIDDEN))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs @ self.weight).pow(2).mean()


class RecallingBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.left


class Remembering(WithBlocks):
    """Leaves a number of this forward with its blocks, which read it."""

    block = RecallingBlock

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            block.left = inputs.abs().mean()
        return super().forward(inputs)
