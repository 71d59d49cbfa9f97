""" "hytrain.moments" through an engine's surface: sizes, access by hand, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_optimizer_state,
)
from support.comparisons import assert_same_bits
from support.engines import built, device, make_config
from support.models import loss_of, make_batch, make_model
from support.rounded_moments import copy_of, tensors_of

from hytrain.errors import ConfigError
from hytrain.placement.memory import state_bytes

pytestmark = pytest.mark.usefixtures("process_group")
BYTES = {"fp32": 12.0, "bf16": 8.0, "8bit": 6.0 + 1 / 32}


@pytest.fixture(params=["bf16", "8bit"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """After three steps, half of the layers on the device."""
    config = make_config(gpu_fraction=0.5, hytrain={"moments": request.param})
    with built(make_model("llama"), config) as engine:
        _train(engine, 3)
        yield engine


def _train(engine: Any, steps: int) -> None:
    for number in range(steps):
        engine.backward(loss_of(engine(**make_batch("llama", number, device()))))
        engine.step()


@pytest.mark.parametrize("moments", BYTES)
def test_bytes_are_those_that_placement_counts(moments: str) -> None:
    config = make_config(gpu_fraction=0.5, hytrain={"moments": moments})
    with built(make_model("llama"), config) as engine:
        states = engine.optimizer.layer_states
        held = sum(state.memory.nbytes for state in states)
        elements = sum(state.shard_size for state in states)
        assert held == BYTES[moments] * elements
        decision = engine.optimizer.placement.decisions[0]
        assert state_bytes(decision.layer_bytes) == held
        for state in states:
            parts = [state.master, *tensors_of(state.exp_avg), *tensors_of(state.exp_avg_sq)]
            assert sum(part.nbytes for part in parts) == state.memory.nbytes
        engine.set_gpu_fraction(1.0)
        engine.optimizer.pipeline.mover.finish()
        assert sum(state.memory.nbytes for state in states) == held


def test_what_is_read_can_be_set_again(engine: Any) -> None:
    before = {s.name: (copy_of(s.exp_avg), copy_of(s.exp_avg_sq)) for s in _flushed(engine)}
    values: dict[str, list[torch.Tensor]] = {}
    for name, parameter in engine.module.named_parameters():
        values[name] = [
            safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")
        ]
        assert all(value.dtype == torch.float32 for value in values[name])
        for kind, value in zip(("exp_avg", "exp_avg_sq"), values[name], strict=True):
            safe_set_full_optimizer_state(parameter, torch.zeros_like(value), kind)
            assert not safe_get_full_optimizer_state(parameter, kind).any()
            safe_set_full_optimizer_state(parameter, value, kind)
            assert_same_bits(
                f"{kind} of {name}", safe_get_full_optimizer_state(parameter, kind), value
            )
    # Not only values: training goes on as if nobody had touched it.
    for state in _flushed(engine):
        for mine, theirs in zip((state.exp_avg, state.exp_avg_sq), before[state.name], strict=True):
            if len(tensors_of(theirs)) == 1:
                assert_same_bits(state.name, copy_of(mine), theirs)
    state = engine.fp32_state_dict()
    for name, (m, v) in values.items():
        assert torch.equal(state[name]["exp_avg"], m.cpu())
        assert torch.equal(state[name]["exp_avg_sq"], v.cpu())


def _flushed(engine: Any) -> list[Any]:
    engine.optimizer.flush()
    return engine.optimizer.layer_states


def test_a_moment_that_is_set_is_rounded_to_the_nearest(engine: Any) -> None:
    parameter = next(engine.module.parameters())
    master = safe_get_full_fp32_param(parameter)
    safe_set_full_optimizer_state(parameter, master / 3, "exp_avg")
    found = safe_get_full_optimizer_state(parameter, "exp_avg")
    error = (found - master / 3).abs()
    assert 0.0 < float(error.max()) <= 0.04 * float(master.abs().max() / 3)
    _train(engine, 2)


def test_optimizer_state_is_read_and_refuses_to_be_written(engine: Any) -> None:
    optimizer = engine.optimizer
    for parameter in engine.module.parameters():
        state = optimizer.state[parameter]
        m = state["exp_avg"]
        assert_same_bits("m", m.as_subclass(torch.Tensor).cpu(),
                         safe_get_full_optimizer_state(parameter, "exp_avg").cpu())  # fmt: skip
        for write in (
            lambda m=m: m.zero_(),
            lambda m=m: m.__setitem__(0, 1.0),
            lambda m=m: m.mul_(2.0),
            lambda m=m: m.view(-1).add_(1.0),
            lambda m=m: torch.add(m, 1.0, out=m),
            lambda m=m: m.__imul__(2.0),
            lambda m=m: m.data.zero_(),
            lambda m=m: torch._foreach_zero_([m]),
            lambda m=m, state=state: state.update(exp_avg=m + 1.0),
        ):
            with pytest.raises(ConfigError, match="safe_set_full_optimizer_state"):
                write()
        norm = m.norm() + (m * 2).sum()
        assert type(norm) is torch.Tensor
        (m * 2).zero_()  # what was computed is the user's


@pytest.mark.parametrize("value", ["fp16", "int8", 8, None])
def test_other_kinds_are_refused(value: object) -> None:
    config = make_config(hytrain={"moments": value})
    with pytest.raises(ConfigError, match=r"hytrain\.moments"), built(make_model("llama"), config):
        pass


def test_seeds_make_other_moments() -> None:
    found: list[torch.Tensor] = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        config = make_config(hytrain={"moments": "bf16", "moments_seed": seed})
        with built(make_model("llama"), config) as engine:
            _train(engine, 2)
            found.append(torch.cat([copy_of(s.exp_avg_sq).float() for s in _flushed(engine)]))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], found[2], rtol=0.02, atol=0.0)
