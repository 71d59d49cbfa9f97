"""Placements that memory, the configuration or the user decides."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.engines import built, environment, make_config
from support.models import make_model
from support.shadow import Shadow
from training import backward, inputs, make_steps

import hytrain
from hytrain.engine import build_optimizer as build
from hytrain.errors import ConfigError, MemoryBudgetError
from hytrain.offload import arena
from hytrain.placement import memory_probe
from hytrain.placement.memory import gpu_peak_bytes, host_bytes
from hytrain.placement.records import Decision

pytestmark = pytest.mark.timeout(60)

SOLVE: Any = "solve"
L = 6
NO_RESERVE = {"gpu_memory_reserve_bytes": 0, "host_memory_reserve_bytes": 0}


def solving(**solver: Any) -> dict[str, Any]:
    return make_config(gpu_fraction=SOLVE, hytrain={"solver": {**NO_RESERVE, **solver}})


def gpu_layers(engine: Any) -> int:
    return int(engine.optimizer.pipeline.num_gpu_layers)


@pytest.fixture
def first() -> Decision:
    """The first decision where memory is plenty: it has the sizes of everything."""
    with built(make_model("mlp"), solving()) as engine:
        (decision,) = engine.placement_decisions()
        assert decision.gpu_layers_target == 0
        return decision


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the host has left and what the "GPU" has."""

    def limit(host: int, gpu: int | None = None) -> None:
        monkeypatch.setattr(memory_probe, "host_memory_pools", lambda: {"machine": host})
        monkeypatch.setattr(memory_probe, "usable_gpu_bytes", lambda _device: gpu)

    return limit


# -- before the first step ---------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 4, L])
def test_k_rises_to_what_the_host_can_hold(memory: Any, first: Decision, number: int) -> None:
    memory(host_bytes(first.layer_bytes, number, first.staging_bytes))
    with built(make_model("mlp"), solving()) as engine:
        assert gpu_layers(engine) == number
        (decision,) = engine.placement_decisions()
        assert decision.bounds.min_gpu_layers == number
        assert f"the fewest GPU layers that fit, {number} of 6" in decision.reason
        memory(0)  # all of it is taken
        shadow = Shadow(engine)
        for step in range(12):
            backward(engine, step)
            shadow.step()
            assert gpu_layers(engine) >= number
        shadow.check()


def test_a_reserve_stays_free(memory: Any, first: Decision) -> None:
    memory(host_bytes(first.layer_bytes, 0, first.staging_bytes))
    with built(make_model("mlp"), solving(host_memory_reserve_bytes=1)) as engine:
        assert gpu_layers(engine) == 1


@pytest.mark.parametrize("has_gpu", [True, False])
def test_what_fits_nowhere_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch, memory: Any, first: Decision, has_gpu: bool
) -> None:
    layers, staging = first.layer_bytes, first.staging_bytes
    if has_gpu:  # three layers fit here and two there
        memory(host_bytes(layers, 3, staging), gpu_peak_bytes(layers, first.limits, 2))
    else:
        memory(staging - 1)

    def refuse(*_arguments: Any, **_keywords: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(build, "_allocate_state", refuse)
    monkeypatch.setattr(build, "place_threads", refuse)
    monkeypatch.setattr(arena, "map_anonymous", refuse)
    model = make_model("mlp")
    with pytest.raises(MemoryBudgetError, match="fits in no split between GPU and host") as raised:
        hytrain.initialize(model=model, model_parameters=model.parameters(), config=solving())
    text = str(raised.value)
    assert "What would make it fit:" in text
    assert "host: needed" in text
    assert isinstance(raised.value, ValueError)


@pytest.mark.cpu  # a GPU without memory is refused
def test_a_fixed_number_is_not_questioned(memory: Any) -> None:
    memory(0, 0)
    with built(make_model("mlp"), make_config(gpu_fraction=0.5)) as engine:
        assert gpu_layers(engine) == 3
        make_steps(engine, range(10))
        assert gpu_layers(engine) == 3
        (decision,) = engine.placement_decisions()
        assert (decision.reason, decision.decider) == ("gpu_fraction is 0.5", "user")
        assert decision.measured_seconds is not None
        assert not decision.bounds.fits
        engine.set_gpu_fraction("solve")
        engine.optimizer.placement.resume(10, [decision])  # as a checkpoint's load does
        assert gpu_layers(engine) == 3


def test_the_gpu_bounds_the_solver(
    monkeypatch: pytest.MonkeyPatch, memory: Any, first: Decision
) -> None:
    from hytrain.placement import moves

    memory(10**12, gpu_peak_bytes(first.layer_bytes, first.limits, 2))
    monkeypatch.setattr(moves, "SETTLED_STEPS", 0)
    config = solving(method="closed_form", alpha=1e-9)
    with built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        for step in range(20):
            backward(engine, step)
            shadow.step()
            assert gpu_layers(engine) <= 2
        shadow.check()


# -- by hand -----------------------------------------------------------------------------------


def test_fractions_by_hand() -> None:
    with (
        environment("HYTRAIN_DELAYS", "8:300"),
        built(make_model("mlp"), make_config(clipping=0.05)) as engine,
    ):
        shadow = Shadow(engine)
        engine.set_gpu_fraction(0.5)  # before the first step
        assert gpu_layers(engine) == 3
        for step, fraction in enumerate([1.0, 0.0, 1 / 6, 1, 0, 0.5]):
            backward(engine, step)
            shadow.step()
            engine.set_gpu_fraction(fraction)
            assert gpu_layers(engine) == round(fraction * L)
            shadow.check()
        decisions = engine.placement_decisions()
        assert [d.gpu_layers_target for d in decisions] == [0, 3, 6, 0, 1, 6, 0, 3]
        assert [d.gpu_layers_before for d in decisions] == [0, 0, 3, 6, 0, 1, 6, 0]
        assert [d.step for d in decisions] == [0, 0, 1, 2, 3, 4, 5, 6]
        assert decisions[1].reason == "gpu_fraction 0.5 was set"
        assert [d.decider for d in decisions] == ["user"] * len(decisions)
        assert engine.placement_decisions(since=6) == decisions[6:]
        assert engine.placement_decisions(since=99) == []
        for decision in decisions:
            assert Decision.from_json(decision.to_json()) == decision


def test_numbers_that_are_none() -> None:
    with built(make_model("mlp"), make_config(gpu_fraction=0.5)) as engine:
        for value in (-0.1, 1.01, float("nan"), float("inf"), "auto", "0.5"):
            with pytest.raises(ConfigError, match=r'must be "solve" or a number in \[0, 1\], got'):
                engine.set_gpu_fraction(value)
        assert gpu_layers(engine) == 3
        assert len(engine.placement_decisions()) == 1


@pytest.mark.parametrize("value", [1.0, SOLVE])
@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
def test_not_between_backward_and_step(gpu_fraction: float, value: Any) -> None:
    with built(make_model("mlp"), make_config(gpu_fraction=gpu_fraction)) as engine:
        shadow = Shadow(engine)
        for step in range(3):
            loss = engine(**inputs(step))
            engine.set_gpu_fraction(gpu_fraction)  # a forward is no step
            engine.backward(loss)
            with pytest.raises(ConfigError, match="between steps only: call this after step"):
                engine.set_gpu_fraction(value)
            shadow.step()
            engine.set_gpu_fraction(gpu_fraction)
        shadow.check()


@pytest.mark.parametrize("stage", [1, 2])
def test_between_the_micro_batches_of_a_step(stage: int) -> None:
    config = make_config(accumulation=3, stage=stage, clipping=0.05)
    with environment("HYTRAIN_DELAYS", "9:300"), built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        for step in range(5):
            for micro in range(2):
                backward(engine, 10 * step + micro)
                engine.step()
                engine.set_gpu_fraction((step + micro) % 2)
            backward(engine, 10 * step + 2)
            shadow.step()
        shadow.check()


@pytest.mark.cpu  # the peak is that of a plan for a CPU
def test_what_does_not_fit_by_hand(memory: Any, first: Decision) -> None:
    with built(make_model("mlp"), solving()) as engine:
        backward(engine, 0)
        engine.step()
        peak = gpu_peak_bytes(first.layer_bytes, first.limits, 4)
        memory(0, peak)
        engine.optimizer.placement._limits.forget()
        for value in (5 / 6, 1.0):
            with pytest.raises(ConfigError, match=rf"gpu_fraction {value} means \d of 6 layers"):
                engine.set_gpu_fraction(value)
        assert gpu_layers(engine) == 0
        engine.set_gpu_fraction(4 / 6)
        assert gpu_layers(engine) == 4
        decision = engine.placement_decisions()[-1]
        assert decision.limits.gpu == peak
        assert decision.bounds.max_gpu_layers == 4


def test_back_to_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    from hytrain.placement import controller, moves

    monkeypatch.setattr(moves, "SETTLED_STEPS", 0)
    monkeypatch.setattr(controller, "worth_moving", lambda *_rest, **_more: True)
    with built(make_model("mlp"), solving()) as engine:
        shadow = Shadow(engine)

        def steps(number: int) -> None:
            make_steps(shadow, range(number))

        steps(3)
        engine.set_gpu_fraction(1.0)
        by_hand = len(engine.placement_decisions())
        steps(10)
        assert gpu_layers(engine) == L
        assert len(engine.placement_decisions()) == by_hand
        engine.set_gpu_fraction("solve")
        assert engine.optimizer.placement.controller.solves
        steps(15)
        shadow.check()
        # A solver that moves for nothing leaves no toy on the GPU whole.
        assert len(engine.placement_decisions()) > by_hand


# -- what DeepSpeed would do beside --------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, False),
        ({"throughput": {"enabled": True}}, False),
        ({"throughput": {"synchronized": True}}, True),
        ({"throughput": {"enabled": False, "synchronized": True}}, True),
    ],
    ids=str,
)
def test_the_throughput_timer_waits_only_when_asked_to(asked: Any, expected: bool) -> None:
    with built(make_model("mlp"), make_config(timers=asked)) as engine:
        assert engine.tput_timer.config.synchronized is expected
        backward(engine, 0)
        engine.step()


def test_alpha_is_taken_as_given(caplog: pytest.LogCaptureFixture) -> None:
    threads = torch.get_num_threads()
    with caplog.at_level(logging.INFO), built(make_model("mlp"), solving(alpha=0.25)) as engine:
        estimator = engine.optimizer.placement._estimator
        gpu, cpu = estimator.gpu_seconds_per_parameter, estimator.cpu_seconds_per_parameter
        assert gpu == pytest.approx(0.25 * cpu("update"))
        assert torch.get_num_threads() == threads
