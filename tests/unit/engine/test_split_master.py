""" "hytrain.master": "split" through an engine: access by hand, writes, saves, refusals."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from support.comparisons import assert_same_bits, assert_same_states
from support.covering import everyday
from support.engines import GATHERS, built, environment, make_config, split_on_cpu
from support.models import make_model
from support.plans import a_plan, write_a_plan
from support.precision import fp16_on_a_cpu
from support.reference_adam import copy_away_from_zero
from support.resume import Run, Snapshot, assert_same, engine_of, micro_batch, snapshot, train
from support.shadow import Shadow
from training import backward, inputs, make_steps, untouched

from hytrain.errors import ConfigError, PlanError
from hytrain.placement.memory import host_state_bytes, state_bytes

pytestmark = pytest.mark.timeout(120)
SPLIT = {"master": "split"}
WAYS: dict[str, dict[str, Any]] = {
    "previewed": {},
    "late": {"late": 1.0},
    "both": {"late": 0.4},
    "direct": {"direct": True},
}
"""Updates on the CPU are previewed, follow the step's outcome, are some of them that and some this,
or follow their gradient."""
RUN = Run(master="split", gpu_fraction=0.5)
LATE = replace(RUN, late=1.0)
BOTH = replace(RUN, late=0.4)
DIRECT = replace(RUN, clipping=0.0, check_overflow=False)
RUNS = (RUN, LATE, BOTH, DIRECT)
ALL = pytest.mark.parametrize("run", RUNS, ids=list(WAYS))


@contextmanager
def _engine(
    *,
    direct: bool = False,
    late: float = 0.0,
    gpu_fraction: float = 0.5,
    is_sharded: bool = True,
    **more: Any,
) -> Iterator[Any]:
    """After two steps, each update with a delay."""
    config = make_config(gpu_fraction=gpu_fraction, hytrain=SPLIT, direct=direct, **more)
    if more.get("stage") == 3 and is_sharded:
        # One rank shards nothing unless its weights are kept on the host.
        config["zero_optimization"].update(GATHERS["each"], offload_param={"device": "cpu"})
    with (
        environment("HYTRAIN_DELAYS", "3:500"),
        split_on_cpu(late),
        built(make_model("mlp"), config) as engine,
    ):
        make_steps(engine, range(2))
        yield engine


@pytest.fixture(params=[(d, k) for d in WAYS for k in (0.0, 0.5, 1.0)], ids=str)
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Of all ways to update, with state on either side and on both."""
    way, gpu_fraction = request.param
    with _engine(**WAYS[way], gpu_fraction=gpu_fraction) as found:
        yield found


@pytest.fixture(
    params=[(w, k) for w in ("previewed", "late", "both") for k in (0.0, 0.5, 1.0)], ids=str
)
def shadow(request: pytest.FixtureRequest) -> Iterator[Shadow]:
    """Of steps that may be taken back: the serial loop beside them."""
    way, gpu_fraction = request.param
    with _engine(**WAYS[way], gpu_fraction=gpu_fraction) as found:
        yield Shadow(found)


def _hard_values(like: torch.Tensor) -> torch.Tensor:
    """Random, with ties, zeros of both signs, tiny and huge numbers among them."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(like.numel(), generator=generator)
    bits = [0x3F808000, 0x3F818000, 0xBF808000, 0xBF817FFF, 0, 1, 0x7FFF, 0x8000, 0x7F7FFFFF]
    bits += [0x80000000, 0x80000001, 0xFF7F8000]
    patterns = torch.tensor(bits, dtype=torch.int64).to(torch.int32)
    values[: len(bits)] = patterns.view(torch.float32)
    return values.view(like.shape).to(like.device)


def _masters(engine: Any) -> torch.Tensor:
    engine.optimizer.flush()
    states = engine.optimizer.layer_states
    return torch.cat([state.read_master(0, state.shard_size).cpu() for state in states])


# -- what is refused, and what it takes -----------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_is_not_bf16_is_refused_by_name(dtype: str) -> None:
    more = {"fp16": {"enabled": True}} if dtype == "float16" else {}
    model = make_model("mlp").to(getattr(torch, dtype))
    config = make_config(bf16=False, hytrain=SPLIT, **more)
    text = rf"parameter '\w[\w.]*' is trained in torch\.{dtype}: set \"bf16\.enabled\" to true"
    with fp16_on_a_cpu(), untouched(model, ConfigError, text) as raised, built(model, config):
        pass
    assert '"hytrain.master" is "split"' in str(raised.value)
    assert '"hytrain.master" to "fp32"' in str(raised.value)


@pytest.mark.parametrize("value", ["bf16", "Split", 16, None])
def test_other_ways_are_refused(value: object) -> None:
    config = make_config(hytrain={"master": value})
    with pytest.raises(ConfigError, match=r"hytrain\.master"), built(make_model("mlp"), config):
        pass


def test_a_plan_is_refused(tmp_path: Path) -> None:
    plan = write_a_plan(tmp_path, a_plan(make_model("llama"), (4,), (2,)))
    config = make_config(hytrain={"plan": plan, **SPLIT})
    del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    match = r'"hytrain\.plan" with "hytrain\.master": "split".*remove one of the two keys'
    model = make_model("llama")
    with untouched(model, PlanError, match), built(model, config):
        pass


@pytest.mark.parametrize(("moments", "each"), [("fp32", 10.0), ("bf16", 6.0), ("8bit", 4 + 1 / 32)])
def test_bytes_are_those_that_placement_counts(moments: str, each: float) -> None:
    config = make_config(gpu_fraction=0.5, hytrain={"moments": moments, **SPLIT})
    with built(make_model("llama"), config) as engine:
        states = engine.optimizer.layer_states
        counted = engine.optimizer.placement.decisions[0].layer_bytes
        for number in (len(states) // 2, len(states), 0):
            engine.set_gpu_fraction(number / len(states))
            engine.optimizer.pipeline.mover.finish()
            held = [state.memory.nbytes for state in states]
            sizes = [state.shard_size for state in states]
            assert sum(held[:number]) == each * sum(sizes[:number])
            assert sum(held[number:]) == (each + 2) * sum(sizes[number:])
            assert sum(held[:number]) == state_bytes(counted[:number])
            assert sum(held[number:]) == host_state_bytes(counted[number:])


@pytest.mark.parametrize("reserve", [0, 2**50], ids=["room", "none"])
def test_updates_are_previewed_where_the_host_has_room(reserve: int) -> None:
    config = make_config(clipping=1e6, hytrain=SPLIT)
    config["hytrain"]["solver"] = {"host_memory_reserve_bytes": reserve}
    with built(make_model("mlp"), config) as engine:
        states = engine.optimizer.layer_states
        why = engine.optimizer.placement.decisions[0].host_master_reason
        assert ("previewed" in why) is (reserve == 0)
        assert all(state.form.is_split is (reserve != 0) for state in states)
        make_steps(engine, range(3))
        costs = engine.optimizer.placement.costs()
        assert costs is not None
        assert costs.first_late(0) == (0 if reserve else len(states))
        engine.synchronize()
        before = [state.read_copy() for state in states]
        backward(engine, 2)
        engine.optimizer.pipeline.cpu.wait_copies()
        is_ahead = [
            not torch.equal(state.read_copy(), b) for state, b in zip(states, before, strict=True)
        ]
        assert is_ahead == [reserve == 0] * len(states)
        engine.step()


# -- access by hand, and writes -------------------------------------------------------------------


def test_what_is_set_is_kept_bit_for_bit(engine: Any) -> None:
    values: dict[str, torch.Tensor] = {}
    for name, parameter in engine.module.named_parameters():
        values[name] = _hard_values(safe_get_full_fp32_param(parameter))
        safe_set_full_fp32_param(parameter, values[name])
        with torch.no_grad():
            engine(**inputs(7))  # before which writes by others are taken over
    for name, parameter in engine.module.named_parameters():
        engine.optimizer.flush()
        assert_same_bits(name, safe_get_full_fp32_param(parameter), values[name])
        rounded = copy_away_from_zero(values[name].cpu()).view_as(values[name])
        assert_same_bits(f"copy of {name}", parameter.detach().cpu(), rounded)
    for name, tensors in engine.fp32_state_dict().items():
        assert_same_bits(name, tensors["fp32"], values[name].cpu())


def test_steps_go_on_from_what_was_set(engine: Any) -> None:
    for parameter in engine.module.parameters():
        master = safe_get_full_fp32_param(parameter)
        safe_set_full_fp32_param(parameter, master * 1.001)
        for kind in ("exp_avg", "exp_avg_sq"):
            value = safe_get_full_optimizer_state(parameter, kind) * 1.5
            safe_set_full_optimizer_state(parameter, value, kind)
            assert_same_bits(kind, safe_get_full_optimizer_state(parameter, kind), value)
        assert_same_bits("master", safe_get_full_fp32_param(parameter), master * 1.001)
    shadow = Shadow(engine)
    assert (_masters(engine) != _masters(engine).bfloat16()).any()
    make_steps(shadow, range(3))
    shadow.check()


def test_setting_between_backward_and_step(shadow: Shadow) -> None:
    for number in range(2):
        backward(shadow.engine, number)
        parameter = next(shadow.engine.module.parameters())
        value = _hard_values(safe_get_full_fp32_param(parameter)).clamp(-1.0, 1.0)
        safe_set_full_fp32_param(parameter, value)
        shadow.shards[0].p[: value.numel()] = value.flatten().cpu()
        shadow.step()
        shadow.check()


def test_a_write_becomes_the_master_weight_and_is_told_once(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    before = engine.fp32_state_dict()
    written = ["blocks.1.up.weight", "blocks.0.up.bias"]
    with caplog.at_level(logging.WARNING, "hytrain"):
        for name in written:
            parameter = engine.module.get_parameter(name)
            with torch.no_grad():
                parameter[:1].fill_(0.3)
        for name, tensors in engine.fp32_state_dict().items():
            there = engine.module.get_parameter(name).detach().float().cpu()
            expected = there if name in written else before[name]["fp32"]
            assert_same_bits(name, tensors["fp32"], expected)
        with torch.no_grad():
            engine.module.get_parameter(written[0]).mul_(1.5)
        shadow = Shadow(engine)
        make_steps(shadow, range(2))
        shadow.check()
    (text,) = [r.getMessage() for r in caplog.records if "hytrain.master" in r.getMessage()]
    assert "blocks.0.up.bias" in text
    assert "safe_set_full_fp32_param" in text


def test_what_the_engine_writes_itself_is_not_told(
    engine: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING, "hytrain"):
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        parameter = next(engine.module.parameters())
        safe_set_full_fp32_param(parameter, safe_get_full_fp32_param(parameter))
        make_steps(engine, range(2))
        engine.fp32_state_dict()
    assert not [r for r in caplog.records if "hytrain.master" in r.getMessage()]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("is_sharded", [True, False], ids=["sharded", "resident"])
def test_elements_that_were_not_written_where_gathered_stay(
    is_sharded: bool, way: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    with (
        _engine(stage=3, is_sharded=is_sharded, **way) as engine,
        caplog.at_level(logging.WARNING, "hytrain"),
    ):
        before = engine.fp32_state_dict()
        names = ["blocks.1.up.weight", "blocks.1.down.weight", "head.bias"]
        *some, inner = [engine.module.get_parameter(name) for name in names]
        some.append(engine.module.get_parameter("head.weight"))  # of the inner one's layer
        with deepspeed.zero.GatheredParameters(some, modifier_rank=0), torch.no_grad():
            some[0][0, :3] = 0.25
            some[2].view(-1)[5] = 0.75
            with deepspeed.zero.GatheredParameters([inner]):
                pass
            with deepspeed.zero.GatheredParameters([inner], modifier_rank=0):
                inner.data[0] = 0.5  # of which torch keeps no count
            some[1].view(-1)[4] = 0.125
        written = {
            names[0]: (slice(3), 0.25),
            names[1]: (4, 0.125),
            names[2]: (0, 0.5),
            "head.weight": (5, 0.75),
        }
        for name, tensors in engine.fp32_state_dict().items():
            expected = before[name]["fp32"].clone()
            if name in written:
                place, value = written[name]
                expected.view(-1)[place] = value
            assert_same_bits(name, tensors["fp32"], expected)
        shadow = Shadow(engine)
        make_steps(shadow, range(2))
        shadow.check()
    assert not [r for r in caplog.records if "hytrain.master" in r.getMessage()]


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_was_written_before_a_gathering_counts(way: dict[str, bool]) -> None:
    """Also where a write within it leaves the elements as they are."""
    with _engine(stage=3, is_sharded=False, **way) as engine:
        outer, parameter = (engine.module.get_parameter(n) for n in ("embed.weight", "head.weight"))
        with torch.no_grad():
            parameter.fill_(0.25)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter[0, 0] = 0.5
        expected = torch.full(parameter.shape, 0.25)
        expected[0, 0] = 0.5
        master = engine.fp32_state_dict()["head.weight"]["fp32"]
        assert_same_bits("head.weight", master, expected)
        with deepspeed.zero.GatheredParameters([outer], modifier_rank=0), torch.no_grad():
            parameter.fill_(0.125)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter[0, 0] = 0.75
        master = engine.fp32_state_dict()["head.weight"]["fp32"]
        expected.fill_(0.125)[0, 0] = 0.75
        assert_same_bits("head.weight", master, expected)


@pytest.mark.parametrize("master", ["fp32", "split"])
def test_a_write_where_gathered_waits_for_a_save(master: str) -> None:
    """Beside training it may not have read the state yet."""
    config = make_config(gpu_fraction=0.5, hytrain={"master": master}, stage=3)
    config["zero_optimization"].update(GATHERS["each"], offload_param={"device": "cpu"})
    with built(make_model("mlp"), config) as engine:
        make_steps(engine, range(2))
        parameter = engine.module.get_parameter("head.bias")
        layer = next(
            layer
            for layer in engine.optimizer.kept.layers
            for slot in layer.layout.slots
            if slot.parameter is parameter
        )
        engine.synchronize()
        old = layer.read_master(0, layer.shard_size).clone()
        read: list[torch.Tensor] = []
        layer.hold_for(
            lambda: read.append(layer.read_master(0, layer.shard_size).clone()), updates=True
        )
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            parameter.add_(1.0)
        (saved,) = read
        assert_same_bits("what is saved", saved, old)
        assert not torch.equal(layer.read_master(0, layer.shard_size), old)


# -- steps that are taken back --------------------------------------------------------------------


def test_a_forward_between_backward_and_step(shadow: Shadow) -> None:
    for number in range(4):
        backward(shadow.engine, number)
        shadow.engine.eval()
        with torch.no_grad():
            shadow.engine(**inputs(77))
        shadow.engine.train()
        shadow.assert_copy_is_current()
        shadow.step()
    shadow.check()


def test_two_backward_passes_in_a_step(shadow: Shadow) -> None:
    for number in range(0, 6, 2):
        backward(shadow.engine, number)
        backward(shadow.engine, number + 1)
        shadow.step()
    shadow.check()


def test_skipped_steps(shadow: Shadow) -> None:
    for number, factor in enumerate([1.0, float("inf"), float("inf"), 1.0, float("nan")]):
        loss = shadow.engine(**inputs(number)) * factor
        shadow.engine.backward(loss)
        assert shadow.step() is (factor != 1.0)
        shadow.check()


def test_gradients_that_are_dropped(shadow: Shadow) -> None:
    for number in range(3):
        backward(shadow.engine, 40 + number)
        shadow.engine.zero_grad()
        shadow.engine.step()
        shadow.gradients.clear()
        assert shadow.engine.optimizer.overflow
        shadow.check()
        make_steps(shadow, [number])
    shadow.check()


# -- moves ----------------------------------------------------------------------------------------


def test_moves_keep_every_bit(engine: Any) -> None:
    shadow = Shadow(engine)
    for number, fraction in enumerate((1.0, 0.0, 0.5, 0.3, 1.0)):
        engine.set_gpu_fraction(fraction)
        make_steps(shadow, [number])
        if number % 2:
            shadow.check()
    before = engine.fp32_state_dict()
    engine.set_gpu_fraction(0.0)
    engine.optimizer.pipeline.mover.finish()
    assert_same_states(engine.fp32_state_dict(), before)
    shadow.check()


SETS = [None, ["lp_params"], ["hp_params"], ["optim_states", "lp_params"]]


@ALL
@pytest.mark.parametrize("stage", [2, 3])
def test_states_that_were_away(run: Run, stage: int) -> None:
    run = replace(run, stage=stage, accumulation=2)
    with engine_of(run) as engine:
        losses, expected = train(engine, 0, 8), snapshot(engine)
    with engine_of(run) as engine:
        found: list[float] = []
        for number in range(8):
            engine.offload_states(include=SETS[number % len(SETS)])
            engine.reload_states()
            found += train(engine, number, number + 1)
        assert found == losses
        assert_same(snapshot(engine), expected)


# -- saves ----------------------------------------------------------------------------------------


def _check_loaded(engine: Any, saved: Snapshot) -> None:
    """Every master weight and moment, and a training copy of either rounding."""
    found = snapshot(engine)
    assert_same_states(found.state, saved.state)
    for name, tensors in found.state.items():
        p, rounded = tensors["fp32"], found.weights[name].flatten()
        is_split = engine.hytrain_config.master == "split"
        expected = copy_away_from_zero(p.flatten()) if is_split else p.flatten().bfloat16()
        assert_same_bits(name, rounded, expected)


FORMS: dict[str, dict[str, Any]] = {
    "split": {"master": "split"},
    "late": {"master": "split", "late": 0.5},
    "fp32": {"master": "fp32"},
}


@everyday({"run": (RUN, DIRECT), "forms": tuple(permutations(FORMS, 2)), "stage": (2, 3)}, ids=str)
def test_one_resumes_the_other(
    run: Run, forms: tuple[str, str], stage: int, tmp_path: Path
) -> None:
    first, second = (FORMS[name] for name in forms)
    with engine_of(replace(run, **first, stage=stage)) as engine:
        train(engine, 0, 3)
        parameter = engine.module.blocks[0].up.weight
        hard = _hard_values(safe_get_full_fp32_param(parameter)).clamp(-1.0, 1.0)
        safe_set_full_fp32_param(parameter, hard)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
        assert_same_bits("set", saved.state["blocks.0.up.weight"]["fp32"], hard.cpu())
    other = run.another(**second, stage=stage)
    for fraction in (0.0, 1.0):
        with engine_of(replace(other, gpu_fraction=fraction)) as engine:
            train(engine, 40, 41)
            engine.backward(engine(micro_batch(42)))
            engine.load_checkpoint(tmp_path)
            _check_loaded(engine, saved)
            shadow = Shadow(engine)
            for number in range(3, 5):
                engine.backward(engine(micro_batch(number)))
                shadow.step()
            shadow.check()


@everyday({"run": RUNS, "gpu_fraction": (0.0, 0.5, 1.0)}, pairs=False, ids=str)
def test_an_asynchronous_save_is_a_synchronous_one(
    run: Run, gpu_fraction: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = replace(run, gpu_fraction=gpu_fraction)
    with engine_of(run) as engine:
        train(engine, 0, 2)
        saved = snapshot(engine)
        train(engine, 2, 6)
        end = snapshot(engine)
    with (
        caplog.at_level(logging.WARNING, "hytrain"),
        environment("HYTRAIN_DELAYS", "3:3000"),
        engine_of(replace(run, asynchronous=True)) as engine,
    ):
        assert any('"hytrain.checkpoint.async"' in r.getMessage() for r in caplog.records)
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        train(engine, 2, 6)
        engine.wait_for_checkpoint()
        assert_same(snapshot(engine), end)
        engine.load_checkpoint(tmp_path)
        assert_same(snapshot(engine), saved)


@everyday({"run": RUNS, "fractions": ((0.0, 0.0), (0.5, 1.0), (1.0, 0.0))}, pairs=False, ids=str)
def test_the_optimizers_state_dict(run: Run, fractions: tuple[float, float]) -> None:
    first, second = fractions
    with engine_of(replace(run, gpu_fraction=first)) as engine:
        train(engine, 0, 3)
        stored, saved = copy.deepcopy(engine.optimizer.state_dict()), snapshot(engine)
    with engine_of(replace(run, gpu_fraction=second, seed=7)) as engine:
        train(engine, 40, 42)
        engine.optimizer.load_state_dict(stored)
        assert engine.optimizer.steps == [3] * len(engine.optimizer.steps)
        _check_loaded(engine, saved)
