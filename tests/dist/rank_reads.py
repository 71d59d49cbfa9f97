"""Cases of weights that are read where no module's hook tells of it, on several ranks or streamed.

ZeRO-2 has all weights on every rank: ZeRO-3 must train to the same bits, whatever is read where.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_training import assert_equal_on_all_ranks
from support.comparisons import assert_same_bits
from support.engines import built, environment, make_config
from support.models import HIDDEN, Block, Mlp, loss_of, make_batch, make_model
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from hytrain.errors import UnsupportedError

Read = Callable[[Any, torch.Tensor], torch.Tensor]


class _Unnoticed(torch.autograd.Function):
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


READS: dict[str, Read] = {
    "penalty": lambda model, x: x + model.head.weight.pow(2).sum(),
    "product": lambda model, x: x @ model.head.weight,
    "linear": lambda model, x: F.linear(x, model.head.weight),
    "transposed": lambda model, x: x @ model.head.weight.T,
    "data": lambda model, x: x @ model.head.weight.data,
    "embed": lambda model, x: F.linear(x, model.embed.weight, model.embed.bias),
    "block": lambda model, x: x + model.blocks[1].down.bias + model.blocks[2].up.weight.mean(),
    "segment": _again_in_a_segment,
    "unnoticed": lambda model, x: _Unnoticed.apply(x, model.head.weight),
    "twice": lambda model, x: (x @ model.head.weight) @ model.head.weight.T,
}


LATER = ("penalty", "product", "linear", "embed", "block")
"""Those that are tried from a later step on as well: no first pass sees them."""


class Reading(Mlp):
    """An MLP that reads a weight in its end, after the module that owns it, from a step on."""

    def __init__(self, read: str, since: int = 0) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.read, self.since, self.step = READS[read], since, 0
        self.left_out: int | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for index, block in enumerate(self.blocks):
            if index != self.left_out:
                x = block(x)
        x = torch.tanh(self.head(x))
        if self.step >= self.since:
            x = self.read(self, x)
        return x.float().pow(2).mean()


class Parted(Mlp):
    """Rank 1 comes to a block of its own where rank 0 reads a weight, from a step on."""

    def __init__(self, since: int = 0) -> None:
        torch.manual_seed(0)
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
        torch.manual_seed(0)
        super().__init__()
        self.embed = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN, bias=False)])
        self.step = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x @ self.embed.weight).float().pow(2).mean()


class Pairs(nn.Module):
    """Blocks that are lists: their children's forward is called, theirs never."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.step = 0
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
        self.inner, self.step = make_model("mlp"), 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        loss = self.inner(inputs)
        return loss + 1e-3 * torch.stack([p.float().norm() for p in self.parameters()]).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    **{read: lambda read=read: Reading(read) for read in READS},
    **{f"{read}-later": lambda read=read: Reading(read, 2) for read in LATER},
    "parted": Parted,
    "parted-later": lambda: Parted(2),
    "short": Short,
    "pairs": Pairs,
    "penalized": Penalized,
}

Ends = tuple[list[float], dict[str, dict[str, torch.Tensor]]]


def _train(
    kind: str, stage: int, gathers: str, accumulation: int, *, past: bool = False, **zero: Any
) -> Ends:
    config = make_config(
        stage=stage, gathers=gathers, bf16=False, accumulation=accumulation, gpu_fraction=0.3
    )
    config["zero_optimization"].update(zero)
    rank, size = dist.get_rank(), dist.get_world_size()
    losses: list[float] = []
    with environment("HYTRAIN_DELAYS", "5:1000"), built(MODELS[kind](), config) as engine:
        for step in range(5):
            engine.module.step = step
            for micro in range(accumulation):
                batch = make_batch("mlp", size * (step * accumulation + micro) + rank)
                if past and step % 2:
                    loss = loss_of(engine.module(**batch))
                    loss.backward()
                else:
                    loss = loss_of(engine(**batch))
                    engine.backward(loss)
                losses.append(loss.item())
                engine.step()
            if step == 2:
                with torch.no_grad():
                    losses.append(loss_of(engine(**make_batch("mlp", rank))).item())
        return losses, engine.fp32_state_dict()


def as_stage_2(
    kind: str, gathers: str, accumulation: int, *, past: bool = False, **zero: Any
) -> None:
    """Losses and master weights of ZeRO-3 are those of ZeRO-2 to the last bit.

    Args:
        kind: of the model.
        gathers: see make_config.
        accumulation: micro-batches of a step.
        past: every other step's passes go past the engine.
        zero: more keys of ZeRO-3.
    """
    expected_losses, expected = _train(kind, 2, gathers, accumulation, past=past)
    losses, state = _train(kind, 3, gathers, accumulation, past=past, **zero)
    assert losses == expected_losses
    assert len(set(losses)) == len(losses), "nothing is trained"
    assert state.keys() == expected.keys()
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            assert_same_bits(f"{key} of {name}", tensor, expected[name][key])


def most_live(kind: str) -> int:
    """Most layers that were whole at one time."""
    with built(MODELS[kind](), make_config(stage=3, bf16=False)) as engine:
        for step in range(3):
            engine.backward(loss_of(engine(**make_batch("mlp", step))))
            engine.step()
        return engine.optimizer.weights.gatherer.most_live


def unnoticed_when_away() -> None:
    """An extension reads a weight that is not there, of which autograd tells when it saves it."""
    model = Reading("unnoticed")
    model.read = lambda model, x: _Unnoticed.apply(x, model.embed.weight)
    with (
        built(model, make_config(stage=3, bf16=False)) as engine,
        pytest.raises(UnsupportedError, match=r"layer 'before blocks\.0' were read outside"),
    ):
        engine(**make_batch("mlp", 0))


def outside_of_passes() -> None:
    """Where a rank has only shards and nobody gathers, a read says so and touches nothing."""
    with built(make_model("mlp"), make_config(stage=3, bf16=False, gathers="kept")) as engine:
        weight = engine.module.head.weight
        for step in range(3):
            for _ in range(2):
                with pytest.raises(UnsupportedError, match="gathered_parameters"):
                    weight.pow(2)
            assert weight.shape == (HIDDEN, HIDDEN)
            assert weight.grad is None
            assert "Parameter" in repr(weight)
            with engine.gathered_parameters():
                inside = weight.detach().clone()
                engine.module.head(torch.zeros(1, HIDDEN))
                assert_same_bits("after a call", weight.data, inside)
                copied = copy.deepcopy(engine.module.head).weight
            assert type(copied) is nn.Parameter
            assert_same_bits("a copy", copied.detach(), inside)
            loss = loss_of(engine(**make_batch("mlp", step)))
            with pytest.raises(UnsupportedError, match="outside of the model's forward"):
                weight.norm()
            engine.backward(loss)
            engine.step()
    assert type(weight) is nn.Parameter


# -- right after step() --------------------------------------------------------------------------


def _broadcast(engine: Any, found: dict[str, torch.Tensor]) -> None:
    """Weights are sent to whoever generates with them."""
    for name, parameter in engine.module.named_parameters():
        found[name] = parameter.data.clone()
        dist.broadcast(parameter.data, 0)
        assert_same_bits(name, parameter.data, found[name])


def _averaged(engine: Any, found: dict[str, torch.Tensor]) -> None:
    average = AveragedModel(engine.module, avg_fn=lambda mean, new, _count: new)
    average.update_parameters(engine.module)
    found.update({n.removeprefix("module."): p.data for n, p in average.named_parameters()})


AFTER_STEP: dict[str, Callable[[Any, dict[str, torch.Tensor]], None]] = {
    "broadcast": _broadcast,
    "average": _averaged,
}


def read_after_step(what: str, stage: int, persistent: bool) -> None:
    """All ranks read after each step: the newest weights, and the steps are as without."""
    ends: list[Any] = []
    for reads in (True, False):
        config = make_config(
            stage=stage,
            gpu_fraction=0.3,
            clipping=1e-2,
            gathers="defaults" if persistent else "each",
        )
        with environment("HYTRAIN_DELAYS", "7:3000"), built(make_model("mlp"), config) as engine:
            for step in range(4):
                batch = make_batch("mlp", 2 * step + dist.get_rank())
                engine.backward(loss_of(engine(**batch)))
                engine.step()
                if reads:
                    found: dict[str, torch.Tensor] = {}
                    AFTER_STEP[what](engine, found)
                    _assert_newest(engine, found)
            engine.synchronize()
            assert_equal_on_all_ranks(engine.optimizer.layer_states)
            ends.append(engine.fp32_state_dict())
    for name, tensors in ends[0].items():
        for key, tensor in tensors.items():
            assert_same_bits(f"{key} of {name}", tensor, ends[1][name][key])


def _assert_newest(engine: Any, found: dict[str, torch.Tensor]) -> None:
    masters = engine.fp32_state_dict()
    assert found
    for name, tensors in masters.items():
        assert_same_bits(name, found[name], tensors["fp32"].to(found[name].dtype))


def one_rank_reads(stage: int) -> None:
    """A logger on rank 0: the others come to the same gathers in their next forward."""
    with built(make_model("mlp"), make_config(stage=stage, clipping=1e-2)) as engine:
        for step in range(4):
            batch = make_batch("mlp", 2 * step + dist.get_rank())
            engine.backward(loss_of(engine(**batch)))
            engine.step()
            if dist.get_rank() == 0:
                read = engine.module.head.weight.data.clone()
                master = engine.optimizer.layer_states[-1]
                assert torch.isfinite(read).all()
                assert master.update.waited
        engine.synchronize()
        assert_equal_on_all_ranks(engine.optimizer.layer_states)


def kept_after_destroy(stage: int) -> None:
    """The model's weights on every rank, after the engine has gone with no call before."""
    ends: list[dict[str, torch.Tensor]] = []
    for synchronizes in (True, False):
        model = make_model("mlp")
        config = make_config(stage=stage, gpu_fraction=0.3, clipping=1e-2)
        with environment("HYTRAIN_DELAYS", "7:3000"), built(model, config) as engine:
            for step in range(3):
                batch = make_batch("mlp", 2 * step + dist.get_rank())
                engine.backward(loss_of(engine(**batch)))
                engine.step()
            if synchronizes:
                engine.synchronize()
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, weights in ends[0].items():
        assert_same_bits(name, ends[1][name], weights)
