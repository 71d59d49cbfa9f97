"""Master weights, moments and gradients by DeepSpeed's functions, and zero_grad(), on 2 ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from harness import on_ranks
from rank_shadow import (
    RankShadow,
    assert_equal_on_all_ranks,
    backward,
    config_for,
    take_steps,
)
from support.comparisons import assert_same_bits
from support.engines import built, environment, from_all_ranks
from support.models import make_model

from hytrain.errors import CheckpointError, ConfigError, OutOfStepError

pytestmark = pytest.mark.timeout(240)

KINDS = ("exp_avg", "exp_avg_sq")

SMALL_STAY = 2000
"""A persistence threshold under which some parameters of the model stay on every rank."""


def _config(fractions: Sequence[float], stage: int, **more: Any) -> dict[str, Any]:
    config = config_for(fractions, stage=stage, gpu_fraction=0.5, **more)
    if stage == 3:
        config["zero_optimization"]["stage3_param_persistence_threshold"] = SMALL_STAY
    return config


def _plain(config: dict[str, Any]) -> Any:
    """DeepSpeed's own engine, the same otherwise."""
    config = {key: value for key, value in config.items() if key not in ("hytrain", "optimizer")}
    config["zero_optimization"] = {**config["zero_optimization"], "offload_optimizer": None}
    model = make_model("mlp")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


EVEN, UNEVEN = (0.5, 0.5), (0.7, 0.3)


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_same_as_deepspeed(stage: int) -> None:
    """Gradients before step(), weights and moments after it."""
    config = _config(UNEVEN, stage, bf16=False, clipping=0.5, accumulation=2)
    plain = _plain(config)
    theirs = dict(plain.module.named_parameters())
    with built(make_model("mlp"), config) as engine:
        shadow = RankShadow(engine)
        for number in range(6):
            for each in (engine, plain):
                backward(each, number)
            if number % 2 and number != 3:
                for name, parameter in engine.module.named_parameters():
                    found = safe_get_full_grad(parameter)
                    _assert_close(name, found, safe_get_full_grad(theirs[name]))
            plain.step()
            if number % 2 == 0:
                engine.step()
                continue
            shadow.step()
            for name, parameter in engine.module.named_parameters():
                other = theirs[name]
                weights = safe_get_full_fp32_param(parameter), safe_get_full_fp32_param(other)
                _assert_close(name, *weights)
                for kind in KINDS:
                    _assert_close(
                        f"{kind} of {name}",
                        safe_get_full_optimizer_state(parameter, kind),
                        safe_get_full_optimizer_state(other, kind),
                    )
        shadow.check()
    plain.destroy()


def _assert_close(name: str, found: Any, expected: Any) -> None:
    expected = expected.view(found.shape)
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=1e-6, msg=lambda m: f"{name}: {m}")


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_written_state_is_trained_on(stage: int) -> None:
    """Every rank sets its part from one value, and the training copy follows at once."""
    with (
        environment("HYTRAIN_DELAYS", "3:800"),
        built(make_model("mlp"), _config(UNEVEN, stage)) as engine,
    ):
        named = dict(engine.module.named_parameters())
        take_steps(engine, range(2))
        for name in ("blocks.1.up.weight", "head.bias"):
            parameter = named[name]
            full = safe_get_full_fp32_param(parameter)
            values = torch.linspace(-1, 1, full.numel()).view(full.shape)
            safe_set_full_fp32_param(parameter, values)
            safe_set_full_optimizer_state(parameter, values / 8, "exp_avg")
            assert_same_bits(name, safe_get_full_fp32_param(parameter), values)
            assert_same_bits(name, safe_get_full_optimizer_state(parameter, "exp_avg"), values / 8)
            with engine.gathered_parameters():
                assert_same_bits(name, parameter.detach(), values.bfloat16())
        assert_equal_on_all_ranks(engine.optimizer.layer_states)
        shadow = RankShadow(engine)
        shadow.take_steps(range(2, 5))
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def _concatenated(mine: torch.Tensor) -> torch.Tensor:
    return torch.cat(from_all_ranks(mine))


@pytest.mark.parametrize("fractions", [UNEVEN, (0.95, 0.05)], ids=str)
@on_ranks(2)
def test_local_parts(fractions: Sequence[float]) -> None:
    """What the ranks own of a sharded parameter is all of it, and each may read it alone."""
    with built(make_model("mlp"), _config(fractions, 3, clipping=0.5, bf16=False)) as engine:
        named = dict(engine.module.named_parameters())
        weight, bias = named["blocks.1.up.weight"], named["blocks.1.up.bias"]
        assert hasattr(weight, "ds_id")
        shadow = RankShadow(engine)
        backward(engine, 0)
        shadow.step()
        if dist.get_rank() == 1:
            safe_get_local_fp32_param(weight)
            safe_get_local_optimizer_state(weight, "exp_avg")
        full = safe_get_full_fp32_param(weight).flatten()
        assert_same_bits("weight", _concatenated(safe_get_local_fp32_param(weight)), full)
        moment = safe_get_full_optimizer_state(weight, "exp_avg").flatten()
        local = safe_get_local_optimizer_state(weight, "exp_avg")
        assert_same_bits("moment", _concatenated(local), moment)
        if dist.get_rank() == 0:  # of its own part nobody else need know
            safe_set_local_fp32_param(weight, 2 * safe_get_local_fp32_param(weight))
        safe_set_local_optimizer_state(weight, 3 * local, "exp_avg")
        assert_same_bits(
            "moment", safe_get_full_optimizer_state(weight, "exp_avg").flatten(), 3 * moment
        )
        changed = safe_get_full_fp32_param(weight).flatten()
        if dist.get_rank() == 0:
            cut = len(safe_get_local_fp32_param(weight))
            assert_same_bits("weight", changed[:cut], 2 * full[:cut])
            assert_same_bits("weight", changed[cut:], full[cut:])
        with engine.gathered_parameters():
            assert_same_bits("weight", weight.detach().flatten(), changed)
        shadow = RankShadow(engine)
        backward(engine, 1)
        whole = safe_get_full_grad(weight).flatten()
        mine = safe_get_local_grad(weight)
        assert_same_bits("gradient", _concatenated(mine), whole)
        safe_set_local_grad(weight, mine / 2)
        safe_set_full_grad(bias, torch.full((bias.numel(),), 0.01))
        assert_same_bits("gradient", safe_get_full_grad(weight).flatten(), whole / 2)
        assert_same_bits("gradient", safe_get_full_grad(bias), torch.full((bias.numel(),), 0.01))
        shadow.step()
        backward(engine, 2)
        shadow.step()
        shadow.check()


@pytest.mark.parametrize("master", ["fp32", "split"])
@on_ranks(2)
def test_local_parts_of_what_every_rank_has(master: str) -> None:
    """Ranks compute with the same copy before the next step, and after it."""
    config = _config(UNEVEN, 3)
    config["hytrain"]["master"] = master
    with built(make_model("mlp"), config) as engine:
        weight = next(p for p in engine.module.parameters() if p.ds_persist)
        take_steps(engine, range(2))
        before = weight.detach().clone()
        part = safe_get_local_fp32_param(weight)
        if master == "split":
            with pytest.raises(ConfigError, match="safe_set_full_fp32_param"):
                safe_set_local_fp32_param(weight, 2 * part)
            assert_same_bits("part", safe_get_local_fp32_param(weight), part)
            return
        safe_set_local_fp32_param(weight, 2 * part)
        assert_same_bits("part", safe_get_local_fp32_param(weight), 2 * part)
        assert_same_bits("copy", weight.detach(), before)
        shadow = RankShadow(engine)
        shadow.take_steps(range(2, 4))
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)
        assert not torch.equal(weight.detach(), before)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_state_dict_round_trip(stage: int) -> None:
    """Each rank's own state, into an engine that has gone on; a wrong one is refused on all."""
    with built(make_model("mlp"), _config(UNEVEN, stage)) as engine:
        take_steps(engine, range(2))
        stored = copy.deepcopy(engine.optimizer.state_dict())
        shadow = RankShadow(engine)
        take_steps(engine, range(2, 4))
        backward(engine, 4)
        wrong = {} if dist.get_rank() == 1 else stored
        with pytest.raises(CheckpointError, match="on rank 1: the state cannot be loaded"):
            engine.optimizer.load_state_dict(wrong)
        engine.optimizer.load_state_dict(stored)
        shadow.gradients.clear()
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)
        shadow.take_steps(range(2, 4))
        shadow.check()


@pytest.mark.parametrize(("stage", "after"), [(1, 1), (2, 0), (3, 1), (3, 2)])
@on_ranks(2)
def test_zero_grad_in_a_window(stage: int, after: int) -> None:
    """Micro-batches before it do not count; where none follows, nothing is updated."""
    config = _config(UNEVEN, stage, bf16=False, clipping=0.5, accumulation=3)
    with built(make_model("mlp"), config) as engine, built(make_model("mlp"), config) as twin:
        shadow = RankShadow(engine)
        parameters = dict(twin.module.named_parameters())
        for step in range(4):
            expected: dict[str, torch.Tensor] = {}
            for micro in range(3):
                number = 3 * step + micro
                backward(engine, number)
                if micro == after and step != 2:
                    engine.zero_grad()
                if micro > after or step == 2:
                    backward(twin, number)
                if micro < 2:
                    engine.step()
            if after < 2 or step == 2:
                expected = {name: safe_get_full_grad(p) for name, p in parameters.items()}
                for name, p in engine.module.named_parameters():
                    _assert_close(name, safe_get_full_grad(p), expected[name])
                twin.optimizer.zero_grad()
                _copy_state(engine, twin)
                shadow.step()
            else:
                engine.step()
                assert engine.optimizer.overflow
            _copy_state(engine, twin)
            shadow.check()
        skipped = 3 if after == 2 else 0
        assert engine.skipped_steps == skipped
        assert set(engine.optimizer.steps) == {4 - skipped}


def _copy_state(engine: Any, twin: Any) -> None:
    for theirs, mine in zip(
        twin.module.named_parameters(), engine.module.named_parameters(), strict=True
    ):
        safe_set_full_fp32_param(theirs[1], safe_get_full_fp32_param(mine[1]))


@on_ranks(2)
def test_zero_grad_after_direct_commits() -> None:
    """On all ranks alike, also on one whose layers are all on the GPU."""
    config = config_for(
        EVEN, stage=2, gpu_fraction=float(dist.get_rank()), bf16=False, clipping=0.0
    )
    config["bf16"] = {"enabled": True, "check_grad_overflow": False}
    with built(make_model("mlp"), config) as engine:
        for number in range(4):
            backward(engine, number)
            if number != 1:
                with pytest.raises(ConfigError, match=r"zero_grad\(\) between backward and step"):
                    engine.zero_grad()
            engine.step()
        assert engine.optimizer.steps == [4]
        engine.synchronize()
        assert_equal_on_all_ranks(engine.optimizer.layer_states)


@pytest.mark.parametrize("reads", [True, pytest.param(False, marks=pytest.mark.parity_full)])
@on_ranks(2, alone=True)
def test_one_rank_alone(reads: bool) -> None:
    """A full tensor is a collective, and so is zero_grad(): the error comes on all ranks."""
    with built(make_model("mlp"), _config(EVEN, 2, accumulation=2)) as engine:
        parameter = engine.module.get_parameter("head.weight")
        backward(engine, 0)
        engine.step()
        alone = partial(safe_get_full_fp32_param, parameter) if reads else engine.zero_grad
        with pytest.raises(OutOfStepError):
            backward(engine, 1) if dist.get_rank() else alone()
