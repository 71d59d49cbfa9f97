"""Weights that are read where no module's hook tells of it: always the newest ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.engines import built, environment, make_config
from support.models import Block, Mlp, make_batch
from torch import nn

WIDTH, VOCABULARY, STEPS = 32, 500, 5

Read = Callable[[torch.Tensor, nn.Linear], torch.Tensor]


def _by_function(ids: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    return F.embedding(ids, head.weight)


def _by_index(ids: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    return head.weight[ids]


def _transposed(ids: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    return F.one_hot(ids, VOCABULARY).float() @ head.weight.T.T


def _unpacked(ids: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    return torch.stack([head.weight], dim=0)[0][ids]


class ReadEarly(nn.Module):
    """Reads its head's weight at the beginning, long before the head itself is called."""

    def __init__(self, read: Read) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.read = read
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.read(ids, self.head) * 10
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _losses(read: Read, *, overlap: bool, mode: str) -> list[float]:
    config = make_config(
        bf16=False,
        clipping=1e-3,  # acts in every step: every layer is updated after the backward
        offload={"overlap_forward": overlap, "cpu_threads": 1},
        hytrain={"accumulation": mode},
    )
    losses: list[float] = []
    with built(ReadEarly(read), config) as engine:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(VOCABULARY, (2, 6), generator=generator)
            if mode == "layer_major":
                losses.append(float(engine.train_batch(iter([{"ids": ids}]), len)))
                continue
            loss = engine(ids)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", ["micro_batch_major", "layer_major"])
@pytest.mark.parametrize("read", [_by_function, _by_index, _transposed, _unpacked])
def test_a_weight_that_is_read_before_its_module_is_called(read: Read, mode: str) -> None:
    expected = _losses(read, overlap=False, mode=mode)
    with environment("HYTRAIN_DELAYS", "3:3000"):
        assert _losses(read, overlap=True, mode=mode) == expected


@pytest.mark.timeout(120)
def test_what_is_compiled_is_compiled_once() -> None:
    """Watching the first forward leaves no trace in compiled functions."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        compiled.append(1)
        return graph

    torch._dynamo.reset()
    model = Mlp()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    with built(model, make_config(bf16=False)) as engine:
        for step in range(4):
            engine.backward(engine(**make_batch("mlp", step)))
            engine.step()
    assert sum(compiled) == 1
