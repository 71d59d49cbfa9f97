"""What a script does between two steps, or in one that differs from the first, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp as sequence_ranks
from deepspeed.utils import groups
from support.beside_torch import CLIPPING, BesideTorch
from support.engines import built, make_config
from torch import nn
from torch.utils.checkpoint import checkpoint

from hytrain.errors import UnsupportedError

WIDTH = 8


def _data(model: nn.Module, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(4, WIDTH, generator=generator).to(next(model.parameters()).device)


def _net(*, is_normed: bool = False) -> nn.Module:
    torch.manual_seed(2)
    norm = [nn.LayerNorm(WIDTH)] if is_normed else []
    blocks = [nn.Sequential(*norm, nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*blocks)


def _training(model: nn.Module, stage: int, **zero: Any) -> tuple[BesideTorch, Any]:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    config = make_config(stage=stage, bf16=False, clipping=CLIPPING)
    config["zero_optimization"].update(zero)
    return BesideTorch(model, ranks, rank), built(model, config)


def _one(model: Any, number: int, rank: int) -> torch.Tensor:
    return model(_data(model, number, rank)).pow(2).mean()


def _sum_of(forwards: int, number: int) -> Callable[[Any, int], torch.Tensor]:
    return lambda model, rank: sum(  # pyright: ignore
        _one(model, number + 100 * each, rank) for each in range(forwards)
    )


def _input_gradient(engine: Any, plain: Any, number: int, rank: int, way: str) -> None:
    """Through one forward; it must be torch's, and leave nothing behind."""
    found: list[torch.Tensor] = []
    for model in (engine, plain):
        x = _data(model, number, rank).requires_grad_(True)
        if way == "frozen":
            for parameter in model.parameters():
                parameter.requires_grad_(False)
        if way == "eval":
            model.eval()
        loss = model(x).pow(2).mean()
        if way == "frozen":
            loss.backward()
            assert x.grad is not None
            found.append(x.grad.cpu())
        else:
            found.append(torch.autograd.grad(loss, x)[0].cpu())
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model.train()
    torch.testing.assert_close(*found)


def input_gradients(way: str, forwards: int, stage: int, **zero: Any) -> None:
    """Before the first step, between steps, and after all of them."""
    beside, engine = _training(_net(), stage, **zero)
    with engine as beside.engine:
        for number in range(4):
            _input_gradient(beside.engine, beside.plain, 50 + number, beside.rank, way)
            beside.step(_sum_of(forwards, number))
        beside.check()


def numbers_of_forwards(stage: int) -> None:
    """A forward that is dropped, one, two or three in a loss, losses run back one by one."""
    beside, engine = _training(_net(), stage)
    with engine as beside.engine:
        for number, forwards in enumerate((2, 1, 3, 1, 2)):
            beside.engine(_data(beside.engine, 70, beside.rank))
            beside.step(_sum_of(forwards, number))
            one, other = (_one(beside.engine, 80 + n, beside.rank) for n in (0, 1))
            beside.engine.backward(one)
            beside.engine.backward(other)
            beside.engine.zero_grad()
            beside.engine.step()  # skipped
        beside.check()


def second_order(stage: int, *, is_normed: bool, **zero: Any) -> None:
    """A gradient penalty, with plain steps between."""
    beside, engine = _training(_net(is_normed=is_normed), stage, **zero)

    def penalty(model: Any, rank: int) -> torch.Tensor:
        x = _data(model, number, rank).requires_grad_(True)
        output = model(x)
        (gradient,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
        return output.pow(2).mean() + 0.1 * gradient.pow(2).mean()

    with engine as beside.engine:
        for number in range(5):
            beside.step(_sum_of(1, number) if number in (0, 3) else penalty)
        beside.check()
        if stage == 3:
            transformed = torch.func.grad(lambda x: beside.engine(x).sum())
            with pytest.raises(UnsupportedError, match=r"in a transform of torch\.func"):
                transformed(_data(beside.engine, 0, 0))


def late_hooks(stage: int) -> None:
    """They mask rows of a gradient, whenever they were registered, and can be taken off."""
    beside, engine = _training(_net(), stage)
    with engine as beside.engine:
        handles: list[Any] = []
        for number in range(6):
            if number == 2:
                for model in (beside.engine.module, beside.plain):
                    weight = model[1][0].weight
                    handles.append(weight.register_post_accumulate_grad_hook(_only_last_row))
            if number == 5:
                for handle in handles:
                    handle.remove()
            beside.step(_sum_of(1, number))
        beside.check()


def _only_last_row(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad[:-1] = 0


class _Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.tower = nn.Linear(WIDTH, WIDTH)
        self.sees = self.skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
            if self.sees and block is self.blocks[0]:
                x = x + self.tower(x)
            if self.skips:
                break
        return x


def towers(stage: int) -> None:
    """A layer that no rank, one rank or both use, from the first step on or later."""
    torch.manual_seed(2)
    model = _Towers()
    beside, engine = _training(model, stage)
    seen = ((), (0,), (0, 1), (1,), (), (0, 1), (1,))  # by which ranks, step for step

    def choose(model: Any, rank: int) -> None:
        plain = getattr(model, "module", model)
        plain.sees, plain.skips = rank in seen[number], (rank + number) % 3 == 0

    def loss(model: Any, rank: int) -> torch.Tensor:
        choose(model, rank)
        return _one(model, number, rank)

    with engine as beside.engine:
        for number in (*range(len(seen)), 1, 3, 0):
            beside.step(loss)
            if number % 2:
                choose(beside.plain, beside.rank)
                _input_gradient(beside.engine, beside.plain, number, beside.rank, "grad")
        beside.check()


class _Tiled(nn.Module):
    """A block that checkpoints its MLP in pieces."""

    pieces = 2

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = [checkpoint(self.mlp, y, use_reentrant=True) for y in x.chunk(self.pieces)]
        return x + torch.cat(pieces)


def tiles(stage: int, numbers: tuple[int, ...], **zero: Any) -> None:
    """Parts of a block that are recomputed several times, in changing number."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), _Tiled(), _Tiled())
    beside, engine = _training(model, stage, **zero)
    with engine as beside.engine:
        for number, pieces in enumerate(numbers):
            for plain in (model, beside.plain):
                for tiled in (m for m in plain.modules() if isinstance(m, _Tiled)):
                    tiled.pieces = pieces
            beside.step(_sum_of(1, number))
        beside.check()


def sequence_group(stage: int) -> None:
    """Ranks that share sequences: gradients are those of one process with the whole of each."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    sequence_ranks.initialize_sequence_parallel(sequence_parallel_size=2)
    try:
        beside = BesideTorch(model, dist.get_world_size(), dist.get_rank())
        config = make_config(stage=stage, bf16=False, clipping=CLIPPING)
        with built(model, config, mpu=sequence_ranks) as beside.engine:
            assert beside.engine.train_batch_size() == 1  # both ranks have parts of one sample
            for number in range(3):
                beside.step(_sum_of(1, number))
            beside.check()
    finally:
        sequence_ranks._release_sequence_parallel_groups()
        groups.mpu = None
