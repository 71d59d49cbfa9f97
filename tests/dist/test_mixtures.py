"""Mixtures of experts on two ranks beside plain torch: each element of weights and moments.

Ranks visit different experts, some of them in later steps only; one expert has never a token.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from support.beside_torch import training_beside_torch
from support.covering import everyday
from support.engines import environment
from torch import nn
from torch.utils.checkpoint import checkpoint

from hytrain.optimizer import model_cut

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.parity_full

HIDDEN, INNER, EXPERTS, TOKENS = 16, 8, 5, 6
VISITS = (
    ([0, 1], [2]),  # none in common
    ([0], [0]),
    ([3], [1, 0]),  # the third was idle everywhere; the others come in another order
    ([2, 1], [0, 3]),
    ([], [1]),  # one rank has tokens for the shared expert only
)
"""Of each step: the experts of rank 0, and those of rank 1."""
EPS = 1e-3
"""Large beside what gradients of elements differ by between one process and two."""


class Expert(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER)
        self.down = nn.Linear(INNER, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(torch.tanh(gate) * up)


class Modules(nn.Module):
    """Experts that are modules of a list: those without a token get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor, visits: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for number in visits.unique(sorted=False).tolist():
            if number >= 0:
                tokens = (visits == number).nonzero().flatten()
                found = found.index_add(0, tokens, self.experts[number](x[tokens]))
        return found


class Packed(nn.Module):
    """Experts in tensors of all of them: ``[experts, 2 * inner, hidden]``."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(0.2 * torch.randn(EXPERTS, 2 * INNER, HIDDEN))
        self.down = nn.Parameter(0.2 * torch.randn(EXPERTS, HIDDEN, INNER))

    def forward(self, x: torch.Tensor, visits: torch.Tensor) -> torch.Tensor:
        found = torch.zeros_like(x)
        for number in visits.unique().tolist():
            if number >= 0:
                tokens = (visits == number).nonzero().flatten()
                gate, up = (x[tokens] @ self.gate_up[number].T).chunk(2, dim=-1)
                output = (torch.tanh(gate) * up) @ self.down[number].T
                found = found.index_add(0, tokens, output)
        return found


class Mixture(nn.Module):
    """A router, experts, and one that all tokens visit."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.routed = kind()
        self.shared = Expert()

    def forward(self, x: torch.Tensor, visits: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        weights = self.router(normed).softmax(-1).gather(1, visits.clamp(min=0)[:, None])
        return x + self.shared(normed) + weights * self.routed(normed, visits)


class Model(nn.Module):
    """Blocks with experts; or without ``blocks`` one mixture, where no stack is."""

    def __init__(self, kind: type[nn.Module], *, blocks: int = 2, recomputed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same on all ranks
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        if blocks:
            self.blocks = nn.ModuleList(Mixture(kind) for _ in range(blocks))
        else:
            self.mixture = Mixture(kind)
        self.head = nn.Linear(HIDDEN, 4)
        self.recomputed = recomputed

    def forward(self, x: torch.Tensor, visits: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks if hasattr(self, "blocks") else [self.mixture]:
            if self.recomputed:
                x = checkpoint(block, x, visits, use_reentrant=False)
            else:
                x = block(x, visits)
        return self.head(x).pow(2).mean()


def _batch(step: int, rank: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(2 * step + rank)
    experts = VISITS[step % len(VISITS)][rank]
    visits = torch.tensor([(experts or [-1])[n % max(1, len(experts))] for n in range(TOKENS)])
    return {"x": torch.randn(TOKENS, HIDDEN, generator=drawn), "visits": visits}


def _train(model: nn.Module, stage: int, **keywords: Any) -> None:
    with training_beside_torch(model, stage, eps=EPS, **keywords) as beside:
        for step in range(len(VISITS) + 2):
            beside.step(lambda model, rank, step=step: model(**_batch(step, rank)))


FROZEN = {
    "": (),
    "router": ("router",),
    "experts": ("routed",),
    "all but experts and head": ("norm", "router", "shared", "embed"),
}


@pytest.mark.parametrize("kind", [Modules, Packed])
@pytest.mark.parametrize(
    ("stage", "frozen", "recomputed"),
    [
        (2, "", False),
        *((3, frozen, False) for frozen in FROZEN),
        (3, "", True),
        (3, "router", True),
    ],
)
@on_ranks(2)
def test_experts(stage: int, frozen: str, recomputed: bool, kind: type[nn.Module]) -> None:
    model = Model(kind, recomputed=recomputed)
    for name, parameter in model.named_parameters():
        if any(part in name.split(".") for part in FROZEN[frozen]):
            parameter.requires_grad_(False)
    _train(model, stage)


@everyday({"kind": (Modules, Packed), "gathers": ("kept", "host")}, pairs=False)
@on_ranks(2)
def test_gathers(kind: type[nn.Module], gathers: str) -> None:
    """Layers that stay for the next pass, or are in host memory."""
    if gathers == "host":
        _train(Model(kind), 3, zero={"offload_param": {"device": "cpu"}})
    else:
        _train(Model(kind), 3, gathers=gathers)


@pytest.mark.parametrize("leaf", ["", "class", "config"])
@on_ranks(2)
def test_one_mixture(leaf: str) -> None:
    """Where there is no stack of blocks each expert is a layer, but in a leaf module."""
    model = Model(Modules, blocks=0)
    if leaf == "class":
        deepspeed.utils.set_z3_leaf_modules(model, [Mixture])
    zero = {"leaf_module": {"names": ["mixture"]}} if leaf == "config" else {}
    with training_beside_torch(model, 3, eps=EPS, zero=zero) as beside:
        names = [layer.name for layer in beside.engine.optimizer.weights.layers]
        assert ("mixture" if leaf else f"mixture.routed.experts.{EXPERTS - 1}") in names
        for step in range(len(VISITS) + 2):
            beside.step(lambda model, rank, step=step: model(**_batch(step, rank)))


@pytest.mark.parametrize("kind", [Modules, Packed])
@on_ranks(2)
def test_experts_apart(kind: type[nn.Module]) -> None:
    """A block in three layers: its experts, what is before them and what follows."""
    _train(Model(kind), 3, section={"layers": {"class": kind.__name__}})


WHOLE = model_cut.MOST_ELEMENTS
PIECE = 1000
"""Elements: one of the packed tensors has more, an expert fewer than half as many."""


@pytest.mark.parametrize("kind", [Modules, Packed])
@pytest.mark.parametrize(
    ("num_ranks", "stage", "way"),
    [
        (1, 2, ""),
        (1, 3, "host"),
        (2, 2, "on both sides"),
        (2, 3, ""),
        (2, 3, "host"),
        (2, 3, "recomputed"),
        (2, 3, "router frozen"),
        (2, 3, "on both sides"),
    ],
)
@on_ranks(lambda num_ranks: num_ranks)
def test_large_blocks(num_ranks: int, stage: int, way: str, kind: type[nn.Module]) -> None:
    """They are updated in pieces; with delays at every hand-off, different on each rank."""
    model = Model(kind, recomputed=way == "recomputed")
    if way == "router frozen":
        for block in model.blocks:
            block.router.requires_grad_(False)
    zero = {"offload_param": {"device": "cpu"}} if way == "host" else {}
    section = {"gpu_fraction": 0.5} if way == "on both sides" else {}
    with (
        patch.object(model_cut, "MOST_ELEMENTS", PIECE),
        environment("HYTRAIN_DELAYS", f"{7 + dist.get_rank()}:400"),
        training_beside_torch(model, stage, eps=EPS, zero=zero, section=section) as beside,
    ):
        layers = beside.engine.optimizer.weights.layers
        assert [len(layer.trained) > 1 for layer in layers] == [False, True, True, False]
        for step in range(len(VISITS) + 2):
            beside.step(lambda model, rank, step=step: model(**_batch(step, rank)))


@pytest.mark.parametrize(("num_ranks", "stage"), [(1, 2), (2, 3)])
@on_ranks(lambda num_ranks: num_ranks)
def test_gradients_of_large_experts_are_not_there_together(num_ranks: int, stage: int) -> None:
    """Each is reduced, and leaves for its update, when it has come."""
    together: set[frozenset[str]] = set()
    with (
        patch.object(model_cut, "MOST_ELEMENTS", PIECE),
        training_beside_torch(Model(Packed), stage, eps=EPS) as beside,
    ):
        collector = beside.engine.optimizer.collector

        def watch(*_arguments: Any) -> None:
            there = [layer for layer in collector.layers if layer.unreduced_grad is not None]
            large = [layer.layout for layer in there if layer.layout.numel > PIECE // 2]
            together.add(frozenset(slot.name for layout in large for slot in layout.slots))

        for step in range(3):
            if step == 1:  # the first backward learns the order
                for hooks in collector._hooks:
                    for node in hooks.accumulators:
                        node.register_hook(watch)  # after the collector's own
            beside.step(lambda model, rank, step=step: model(**_batch(step, rank)))
    assert max(map(len, together)) <= 1, together


@pytest.mark.parametrize(
    ("stage", "kind", "accumulation", "elements"),
    [
        (2, Modules, "layer_major", WHOLE),
        (3, Packed, "layer_major", WHOLE),
        (3, Modules, "micro_batch_major", WHOLE),
        (2, Packed, "layer_major", PIECE),
        (3, Modules, "layer_major", PIECE),
        (3, Packed, "micro_batch_major", PIECE),
        pytest.param(2, Packed, "layer_major", WHOLE, marks=full),
        pytest.param(3, Modules, "layer_major", WHOLE, marks=full),
        pytest.param(3, Packed, "micro_batch_major", WHOLE, marks=full),
    ],
)
@on_ranks(2)
def test_accumulation(stage: int, kind: type[nn.Module], accumulation: str, elements: int) -> None:
    """Micro-batches of a step visit different experts."""
    section = {"accumulation": accumulation, "batch_sizes": [3, 2], "micro_batch_sizes": [1, 1]}
    model = Model(kind)
    with (
        patch.object(model_cut, "MOST_ELEMENTS", elements),
        training_beside_torch(model, stage, eps=EPS, section=section) as beside,
    ):
        for step in range(4):
            beside.train_batch(
                lambda rank, step=step: [_batch(step + n, rank) for n in range(3 - rank)]
            )
        if accumulation == "layer_major":
            assert beside.engine.batch_training.accumulation.refusal is None
