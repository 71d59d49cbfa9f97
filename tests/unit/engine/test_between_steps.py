"""What a script changes between two steps on one rank: weights, accumulation, hooks."""

from __future__ import annotations

import gc
import logging
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_bits
from support.engines import built, make_config
from support.models import Mlp
from torch import nn
from training import FRACTIONS, inputs, make_steps

import hytrain
from hytrain.errors import ConfigError


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def _loss(model: Any, number: int) -> torch.Tensor:
    data = torch.randn(2, 8, generator=torch.Generator().manual_seed(number))
    return model(data).pow(2).mean()


def _masters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: state["fp32"] for name, state in engine.fp32_state_dict().items()}


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_writes_become_the_master_weights(gpu_fraction: float) -> None:
    """Where an element was written; the bits of others that bf16 does not have stay."""
    torch.manual_seed(0)
    with built(Mlp(), make_config(gpu_fraction=gpu_fraction)) as engine:
        make_steps(engine, range(2))
        before = _masters(engine)
        weight = engine.module.blocks[1].up.weight
        other = engine.module.blocks[2].down.weight
        with torch.no_grad():
            weight[0].mul_(0.5)
            other.copy_(other.clone())
        found = _masters(engine)
        written = found["blocks.1.up.weight"]
        assert_same_bits("what was written", written[0], weight[0].detach().float())
        assert_same_bits("what was not", written[1:], before["blocks.1.up.weight"][1:])
        assert_same_bits(
            "a copy of itself", found["blocks.2.down.weight"], before["blocks.2.down.weight"]
        )
        engine.module.load_state_dict({k: v * 2 for k, v in engine.module.state_dict().items()})
        loaded = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        engine(**inputs(5))  # a forward sees it, too
        for name, master in _masters(engine).items():
            assert_same_bits(name, master, loaded[name].float())


def test_a_write_between_backward_and_step_is_stepped_from() -> None:
    model, plain = _net(), _net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.1)
    with built(model, make_config(bf16=False, clipping=1e9)) as engine:
        for number in range(3):
            engine.backward(_loss(engine, number))
            optimizer.zero_grad()
            _loss(plain, number).backward()
            with torch.no_grad():
                for one in (model, plain):
                    one[2].weight.clamp_(-0.1, 0.1)
            engine.step()
            optimizer.step()
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(_masters(engine)[name], parameter.detach())


def test_an_accumulation_that_cannot_be() -> None:
    with built(_net(), make_config(bf16=False, accumulation=2)) as engine:
        planned = engine.optimizer.placement._peak_inputs(0)
        # A k that is set before the first step has to leave them room, too.
        limits = engine.optimizer.placement._limits.at(0)
        assert limits.kept_gradients == planned.kept_gradients
        engine.set_train_batch_size(1)  # nothing is kept for a second micro-batch
        assert engine.optimizer.placement._peak_inputs(0) == replace(planned, kept_gradients=0)
        engine.set_train_batch_size(3)
        assert engine.optimizer.placement._peak_inputs(0) == planned
        assert planned.kept_gradients == sum(planned.gradients)
        for micro in range(3):
            assert engine.global_steps == 0
            engine.backward(_loss(engine, micro))
            engine.step()
        assert engine.global_steps == 1
        engine.backward(_loss(engine, 3))
        engine.step()
        with pytest.raises(ConfigError, match="within a step"):
            engine.set_train_batch_size(4)
        with pytest.raises(ConfigError, match="multiple of 1"):
            engine.set_train_batch_size(0)


def test_checkpointing_in_eval_mode_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As of a model from from_pretrained: transformers computes nothing again there."""
    for mode, checkpointing, told in ((True, True, 0), (False, False, 0), (False, True, 1)):
        caplog.clear()
        model = _net().train(mode)
        model[0].gradient_checkpointing = checkpointing
        with built(model, make_config(bf16=False)) as engine:
            for number in range(3):
                engine.backward(_loss(engine, number))
                engine.step()
        assert caplog.text.count("engine.train()") == told


def test_a_thawed_parameter_is_named(caplog: pytest.LogCaptureFixture) -> None:
    model = _net()
    model[0].weight.requires_grad_(False)
    with built(model, make_config(bf16=False)) as engine, caplog.at_level(logging.WARNING):
        before = model[0].weight.detach().clone()
        for number in range(3):
            model[0].weight.requires_grad_(number > 0)
            engine.backward(_loss(engine, number))
            engine.step()
        assert caplog.text.count("0.weight") == 1
        assert_same_bits("it", model[0].weight.detach(), before)


def test_hooks_of_a_clients_optimizer() -> None:
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    config = make_config(bf16=False, optimizer=None, zero_allow_untested_optimizer=True)
    with built(model, config, optimizer=optimizer) as engine:
        engine.backward(_loss(engine, 0))
        engine.step()
        engine.backward(_loss(engine, 1) * float("inf"))
        engine.step()
    assert called == ["pre", "post", "pre"]  # the second step was skipped


@pytest.mark.parametrize("stage", [2, 3])
def test_an_engine_that_is_dropped_is_freed(stage: int) -> None:
    def build() -> list[weakref.ref[Any]]:
        model = _net()
        engine, *_ = hytrain.initialize(
            model=model,
            model_parameters=list(model.parameters()),
            config=make_config(bf16=False, stage=stage),
        )
        for number in range(4):
            engine.backward(_loss(engine, number))
            engine.step()
        return [weakref.ref(x) for x in (engine, engine.optimizer.passes, model)]

    found = build()
    gc.collect()
    assert [one() for one in found] == [None] * len(found)
