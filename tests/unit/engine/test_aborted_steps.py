"""Errors in the user's code, and gradients that come in another order: the next steps are exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import Recomputed, loss_of
from training import FRACTIONS, Faulty, backward, followed, inputs, refused_step

from hytrain.errors import AbortedBackwardError, AbortedStepError
from hytrain.kernels import grouped_adam

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]


@pytest.mark.parametrize(
    ("fault", "block", "when"),
    [
        ("fail_forward", 2, "first"),
        ("fail_forward", 0, "later"),
        ("fail_backward", 0, "first"),
        ("fail_backward", 2, "later"),
    ],
)
def test_an_exception_of_the_user(gpu_fraction: float, fault: str, block: int, when: str) -> None:
    model = Faulty()
    with followed(model, gpu_fraction=gpu_fraction) as run:
        for number in range(0 if when == "first" else 2):
            run.good_step(number)
        for number in range(4):
            with model.failing(fault, block):
                backward(run.engine, 50 + number)
            run.good_step(10 + number)


@pytest.mark.parametrize("fault", ["fail_forward", "fail_backward"])
def test_timers_go_on_after_an_exception(gpu_fraction: float, fault: str) -> None:
    """DeepSpeed's own: they are started again."""
    model = Faulty()
    with followed(model, gpu_fraction=gpu_fraction, wall_clock_breakdown=True) as run:
        with model.failing(fault, 2):
            backward(run.engine, 50)
        run.good_step(0)
        with run.step(1):
            backward(run.engine, 1)
            refused_step(run.engine)


@pytest.mark.parametrize(
    ("way", "aborted"),
    [("engine", 1), ("loss", 0), ("loss", 2), ("engine, then step", 0), ("engine, then step", 2)],
)
def test_a_window_is_repeated_whole(gpu_fraction: float, aborted: int, way: str) -> None:
    """Whichever of three micro-batches raises: a step is made of three that came after that."""
    model = Faulty()

    def run_back(number: int) -> None:
        if way == "loss":
            loss_of(engine(**inputs(number))).backward()
        else:
            backward(engine, number)

    with followed(model, gpu_fraction=gpu_fraction, accumulation=3) as run:
        engine = run.engine
        for window in range(3):
            for micro in range(aborted):
                run_back(20 + micro)
                engine.step()
            with model.failing():
                run_back(50)
            if way == "engine, then step":
                with pytest.raises(AbortedBackwardError):
                    engine.step()
            repeated = [10 * window + micro for micro in range(3)]
            with run.step(*repeated, scale=1 / 3):
                for number in repeated:
                    assert engine.global_steps == window
                    run_back(number)
                    if number != repeated[-1]:
                        engine.step()
            assert engine.global_steps == window + 1


@pytest.mark.parametrize("cleaned", [False, True])
@pytest.mark.parametrize("first", [0, 2])
def test_step_after_an_exception(gpu_fraction: float, first: int, cleaned: bool) -> None:
    """There is nothing to step with, whatever has tidied up in between; state stays as it was."""
    model = Faulty()
    with followed(model, gpu_fraction=gpu_fraction) as run:
        for number in range(first):
            run.good_step(number)
        for number in range(3):
            with model.failing():
                backward(run.engine, 50 + number)
            if cleaned:
                run.engine.synchronize()
            for _ in range(2):
                with pytest.raises(AbortedBackwardError, match="Repeat the step from the forward"):
                    run.engine.step()
            run.shadow.check()
            assert run.engine.global_steps == run.shadow.steps
            run.shadow.gradients.clear()
            run.good_step(10 + number)


@pytest.mark.parametrize("through_engine", [True, False])
def test_a_backward_repeated_after_an_exception(gpu_fraction: float, through_engine: bool) -> None:
    """The user catches the error of one loss and goes on with another of the same forward."""
    model = Faulty()
    with followed(model, gpu_fraction=gpu_fraction) as run:
        engine = run.engine
        run.good_step(0)
        for number in range(1, 4):
            with run.step(number):
                good = engine(**inputs(number))
                model.fail_backward = 1
                bad = engine(**inputs(40 + number))
                with model.failing():
                    engine.backward(bad) if through_engine else bad.backward()
                engine.backward(good) if through_engine else good.backward()
                if number == 2:
                    engine.synchronize()  # this backward did finish: its gradients are kept


def test_an_exception_past_the_engine(gpu_fraction: float) -> None:
    """engine.module(...) and loss.backward() get neither of DeepSpeed's announcements."""
    model = Faulty()
    with followed(model, gpu_fraction=gpu_fraction) as run:
        for number in range(4):
            with model.failing():
                run.engine.module(**inputs(50 + number)).backward()
            with run.step(number):
                run.engine.module(**inputs(number)).backward()


def test_more_firings_than_the_first_backward_had(gpu_fraction: float) -> None:
    """Hooks that fire more often (blocks recomputed once more): updates are taken back."""
    model = Recomputed()
    with followed(model, gpu_fraction=gpu_fraction) as run:
        plain: Any = run.twin.plain
        for number, times in enumerate((1, 1, 2, 3, 3, 1, 2)):
            model.times = plain.times = times
            run.good_step(number)


@pytest.mark.parametrize("fault", ["fail_forward", "fail_backward"])
def test_step_after_a_train_batch_that_failed(gpu_fraction: float, fault: str) -> None:
    """By hand there is nothing to step with; the next train_batch makes a step of its own."""
    ends: list[dict[str, Any]] = []
    for fails in (False, True):
        model = Faulty()
        config = make_config(gpu_fraction=gpu_fraction, bf16=False, accumulation=2)
        with built(model, config) as engine:
            for number in range(3):
                before = engine.fp32_state_dict()
                if fails:
                    with model.failing(fault):
                        engine.train_batch(iter([inputs(1), inputs(2)]), num_valid=lambda _: 1)
                    with pytest.raises(AbortedBackwardError):
                        engine.step()
                    assert_same_states(engine.fp32_state_dict(), before)
                batches = [inputs(10 + number), inputs(20 + number)]
                engine.train_batch(iter(batches), num_valid=lambda _: 1)
                assert engine.global_steps == number + 1
            ends.append(engine.fp32_state_dict())
    assert_same_states(*ends)


@pytest.mark.parametrize("on_device", [pytest.param(True, marks=pytest.mark.cpu), False])
def test_a_step_that_fails_midway(
    gpu_fraction: float, on_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have made it: nothing goes on from there but a loaded checkpoint."""
    if gpu_fraction == (0.0 if on_device else 1.0):
        pytest.skip("no layer is updated there")
    model = Faulty()
    config = make_config(gpu_fraction=gpu_fraction, bf16=False)
    with built(model, config) as engine:
        backward(engine, 0)
        engine.step()
        engine.save_checkpoint(str(tmp_path))
        saved = engine.fp32_state_dict()
        backward(engine, 1)
        engine.step()
        expected = engine.fp32_state_dict()

        backward(engine, 2)
        with monkeypatch.context() as patch:
            if on_device:
                patch.setattr(grouped_adam, "device_adam", _failing_at(2, grouped_adam.device_adam))
            else:
                cpu = engine.optimizer.pipeline.cpu
                patch.setattr(cpu, "finalize", _failing_at(1, cpu.finalize))
            with pytest.raises(torch.OutOfMemoryError):
                engine.step()
        refused: list[Callable[[], object]] = [
            lambda: engine(**inputs(3)),
            engine.step,
            engine.optimizer.zero_grad,
            engine.synchronize,
            engine.fp32_state_dict,
            lambda: engine.save_checkpoint(str(tmp_path), tag="torn"),
        ]
        for use in refused:
            with pytest.raises(AbortedStepError, match="load_checkpoint"):
                use()

        engine.load_checkpoint(str(tmp_path))
        assert_same_states(engine.fp32_state_dict(), saved)
        backward(engine, 1)
        engine.step()
        assert_same_states(engine.fp32_state_dict(), expected)


def _failing_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Raises at its numberth call; without having done anything."""
    calls = itertools.count(1)

    def failing(*arguments: Any) -> Any:
        if next(calls) == number:
            raise torch.OutOfMemoryError("injected")
        return function(*arguments)

    return failing
