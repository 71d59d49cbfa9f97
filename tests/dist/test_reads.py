"""Weights read outside of their modules: in forwards under ZeRO-3, and right after a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from rank_shadow import assert_equal_on_all_ranks
from stage_models import READING, Reading, Unnoticed, build
from stage_twins import Setup, equals_stage_2
from support.comparisons import assert_same_bits, assert_same_states
from support.engines import built, environment, make_config
from support.models import HIDDEN, loss_of, make_batch, make_model
from torch import nn
from torch.optim.swa_utils import AveragedModel

from hytrain.errors import UnsupportedError

pytestmark = pytest.mark.timeout(240)


def _setup(kind: str, *, gathers: str = "each", ranks: int = 2, **more: Any) -> Setup:
    values: dict[str, Any] = {"bf16": False, "delays": 5, "evaluates": True, "steps": 5, **more}
    gpu_fractions = (0.3,) * ranks
    return Setup(kind, (1.0 / ranks,) * ranks, gpu_fractions, 1.0, gathers=gathers, **values)


KEPT = ("penalty", "product-later", "short", "pairs", "block-later")
# Ways to read that others have: a product is that of "linear", a penalty that of "penalized", ...
ALIKE = ("product", "transposed", "data", "read twice", "linear-later", "embed-later")
SETUPS = [
    *(_setup(kind) for kind in READING if kind not in (*KEPT, *ALIKE)),
    *(_setup(kind, gathers="kept", accumulation=2) for kind in KEPT),
    _setup("transposed", past=True, gathers="kept"),
    _setup("block", past=True),
    _setup("linear-later", ranks=1, on_host=True, gathers="kept"),
    _setup("penalized", ranks=1, on_host=True),
]
MORE_SETUPS = [
    _setup(kind, gathers=gathers, ranks=ranks, accumulation=accumulation, on_host=ranks == 1)
    for kind in READING
    for gathers in ("each", "kept")
    for ranks, accumulation in ((1, 1), (2, 1), (2, 2))
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@on_ranks(lambda setup: len(setup.fractions))
def test_as_stage_2(setup: Setup) -> None:
    equals_stage_2(setup)


@pytest.mark.parity_full
@pytest.mark.parametrize("setup", MORE_SETUPS, ids=str)
@on_ranks(lambda setup: len(setup.fractions))
def test_as_stage_2_in_all_combinations(setup: Setup) -> None:
    equals_stage_2(setup)


@pytest.mark.parametrize(("kind", "most"), [("pairs", 2), ("product", 3)])
@on_ranks(2)
def test_layers_that_are_whole_at_once(kind: str, most: int) -> None:
    """Those that are gathered ahead, and the one that is read outside of its module."""
    with built(build(kind), make_config(stage=3, bf16=False)) as engine:
        for step in range(3):
            engine.backward(loss_of(engine(**make_batch("mlp", step))))
            engine.step()
        assert engine.optimizer.weights.gatherer.most_live == most


@on_ranks(2)
def test_what_an_extension_reads_of_nothing() -> None:
    """An extension reads a weight that is not there, of which autograd tells when it saves it."""
    model = Reading("unnoticed")
    model.read = lambda model, x: Unnoticed.apply(x, model.embed.weight)
    with (
        built(model, make_config(stage=3, bf16=False)) as engine,
        pytest.raises(UnsupportedError, match=r"layer 'before blocks\.0' were read outside"),
    ):
        engine(**make_batch("mlp", 0))


@on_ranks(2)
def test_outside_of_passes() -> None:
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


@pytest.mark.parametrize("what", AFTER_STEP)
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_after_a_step(what: str, stage: int) -> None:
    """All ranks read after each step: the newest weights, and the steps are as without."""
    ends: list[Any] = []
    for reads in (True, False):
        config = make_config(
            stage=stage,
            gpu_fraction=0.3,
            clipping=1e-2,
            gathers="defaults",  # all weights are on every rank
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
    assert_same_states(*ends)


def _assert_newest(engine: Any, found: dict[str, torch.Tensor]) -> None:
    masters = engine.fp32_state_dict()
    assert found
    for name, tensors in masters.items():
        assert_same_bits(name, found[name], tensors["fp32"].to(found[name].dtype))


@on_ranks(2)
def test_one_rank_alone_reads_after_a_step() -> None:
    """A logger on rank 0: the others come to the same gathers in their next forward."""
    with built(make_model("mlp"), make_config(clipping=1e-2)) as engine:
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


@on_ranks(2)
def test_after_the_engine_has_gone() -> None:
    """The model's weights on every rank, after the engine has gone with no call before."""
    ends: list[dict[str, torch.Tensor]] = []
    for synchronizes in (True, False):
        model = make_model("mlp")
        config = make_config(gpu_fraction=0.3, clipping=1e-2)
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
