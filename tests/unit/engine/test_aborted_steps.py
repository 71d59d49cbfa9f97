"""Errors in the user's code, and gradients that come in another order: the next steps are exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_bits
from support.engines import built, make_config
from support.models import Recomputed, loss_of
from support.shadow import Shadow, Twin
from torch import nn
from training import FRACTIONS, Faulty, UserError, backward, inputs

from hytrain.errors import AbortedBackwardError, AbortedStepError
from hytrain.kernels import grouped_adam

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]


@contextmanager
def _training(
    model: nn.Module, gpu_fraction: float, **config: Any
) -> Iterator[tuple[Any, Shadow, Twin]]:
    twin = Twin(model)
    config = {"bf16": False, "clipping": 0.5, **config}
    with built(model, make_config(gpu_fraction=gpu_fraction, **config)) as engine:
        yield engine, Shadow(engine), twin


def _good_step(engine: Any, shadow: Shadow, twin: Twin, number: int) -> None:
    expected = twin.gradients(engine, [inputs(number)])
    backward(engine, number)
    shadow.step()
    twin.assert_were_reduced(shadow, expected)


@pytest.mark.parametrize("fault", ["fail_forward", "fail_backward"])
@pytest.mark.parametrize("block", [0, 2])
@pytest.mark.parametrize("when", ["first", "later"])
def test_an_exception_of_the_user(gpu_fraction: float, fault: str, block: int, when: str) -> None:
    model = Faulty()
    with _training(model, gpu_fraction) as (engine, shadow, twin):
        for number in range(0 if when == "first" else 2):
            _good_step(engine, shadow, twin, number)
        for number in range(4):
            setattr(model, fault, block)
            with pytest.raises(UserError):
                backward(engine, 50 + number)
            setattr(model, fault, None)
            _good_step(engine, shadow, twin, 10 + number)
        shadow.check()


def test_an_exception_in_an_accumulated_micro_batch(gpu_fraction: float) -> None:
    """The gradients of the whole step are dropped: which of them were complete nobody knows."""
    model = Faulty()
    with _training(model, gpu_fraction, accumulation=2) as (engine, shadow, twin):
        for number in range(3):
            backward(engine, 20 + number)
            model.fail_backward = 2
            with pytest.raises(UserError):
                backward(engine, 50 + number)
            model.fail_backward = None
            for micro in range(2):
                if micro == 0:
                    expected = twin.gradients(engine, [inputs(number), inputs(9)], 0.5)
                backward(engine, (number, 9)[micro])
                if micro == 0:
                    engine.step()
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


@pytest.mark.parametrize("plain", [False, True], ids=["engine", "loss"])
@pytest.mark.parametrize("aborted", [0, 1, 2])
def test_a_window_is_repeated_whole(gpu_fraction: float, aborted: int, plain: bool) -> None:
    """Whichever of three micro-batches raises: a step is made of three that came after that."""
    model = Faulty()

    def run_back(number: int) -> None:
        if plain:
            loss_of(engine(**inputs(number))).backward()
        else:
            backward(engine, number)

    with _training(model, gpu_fraction, accumulation=3) as (engine, shadow, twin):
        for window in range(3):
            for micro in range(aborted):
                run_back(20 + micro)
                engine.step()
            model.fail_backward = 1
            with pytest.raises(UserError):
                run_back(50)
            model.fail_backward = None
            repeated = [10 * window + micro for micro in range(3)]
            expected = twin.gradients(engine, [inputs(number) for number in repeated], 1 / 3)
            for number in repeated:
                assert engine.global_steps == window
                run_back(number)
                if number != repeated[-1]:
                    engine.step()
            shadow.step()
            assert engine.global_steps == window + 1
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


@pytest.mark.parametrize("cleaned", [False, True])
@pytest.mark.parametrize("first", [0, 2])
def test_step_after_an_exception(gpu_fraction: float, first: int, cleaned: bool) -> None:
    """There is nothing to step with, whatever has tidied up in between; state stays as it was."""
    model = Faulty()
    with _training(model, gpu_fraction) as (engine, shadow, twin):
        for number in range(first):
            _good_step(engine, shadow, twin, number)
        for number in range(3):
            model.fail_backward = 1
            with pytest.raises(UserError):
                backward(engine, 50 + number)
            model.fail_backward = None
            if cleaned:
                engine.synchronize()
            for _ in range(2):
                with pytest.raises(AbortedBackwardError, match="Repeat the step from the forward"):
                    engine.step()
            shadow.check()
            assert engine.global_steps == shadow.steps
            shadow.gradients.clear()
            _good_step(engine, shadow, twin, 10 + number)
        shadow.check()


def test_step_after_an_exception_in_a_later_micro_batch(gpu_fraction: float) -> None:
    """Earlier micro-batches are discarded too, and the next one is the first of a step."""
    model = Faulty()
    with _training(model, gpu_fraction, accumulation=2) as (engine, shadow, twin):
        for number in range(0, 6, 2):
            backward(engine, 30 + number)
            engine.step()
            model.fail_backward = 2
            with pytest.raises(UserError):
                backward(engine, 50 + number)
            model.fail_backward = None
            with pytest.raises(AbortedBackwardError):
                engine.step()
            expected = twin.gradients(engine, [inputs(number), inputs(number + 1)], 0.5)
            backward(engine, number)
            engine.step()
            backward(engine, number + 1)
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()
        assert engine.global_steps == 3


@pytest.mark.parametrize("through_engine", [True, False])
def test_a_backward_repeated_after_an_exception(gpu_fraction: float, through_engine: bool) -> None:
    """The user catches the error of one loss and goes on with another of the same forward."""
    model = Faulty()
    with _training(model, gpu_fraction) as (engine, shadow, twin):
        _good_step(engine, shadow, twin, 0)
        for number in range(1, 4):
            expected = twin.gradients(engine, [inputs(number)])
            good = engine(**inputs(number))
            model.fail_backward = 1
            bad = engine(**inputs(40 + number))
            model.fail_backward = None
            with pytest.raises(UserError):
                engine.backward(bad) if through_engine else bad.backward()
            engine.backward(good) if through_engine else good.backward()
            if number == 2:
                engine.synchronize()  # this backward did finish: its gradients are kept
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


def test_an_exception_past_the_engine(gpu_fraction: float) -> None:
    """engine.module(...) and loss.backward() get neither of DeepSpeed's announcements."""
    model = Faulty()
    with _training(model, gpu_fraction) as (engine, shadow, twin):
        for number in range(4):
            model.fail_backward = 1
            with pytest.raises(UserError):
                engine.module(**inputs(50 + number)).backward()
            model.fail_backward = None
            expected = twin.gradients(engine, [inputs(number)])
            engine.module(**inputs(number)).backward()
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


def test_more_firings_than_the_first_backward_had(gpu_fraction: float) -> None:
    """Hooks that fire more often (blocks recomputed once more): updates are taken back."""
    model = Recomputed()
    with _training(model, gpu_fraction) as (engine, shadow, twin):
        plain: Any = twin.plain
        for number, times in enumerate((1, 1, 2, 3, 3, 1, 2)):
            model.times = plain.times = times
            _good_step(engine, shadow, twin, number)
        shadow.check()


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
                    setattr(model, fault, 1)
                    with pytest.raises(UserError):
                        engine.train_batch(iter([inputs(1), inputs(2)]), num_valid=lambda _: 1)
                    with pytest.raises(AbortedBackwardError):
                        engine.step()
                    setattr(model, fault, None)
                    _assert_equal(engine.fp32_state_dict(), before)
                batches = [inputs(10 + number), inputs(20 + number)]
                engine.train_batch(iter(batches), num_valid=lambda _: 1)
                assert engine.global_steps == number + 1
            ends.append(engine.fp32_state_dict())
    _assert_equal(*ends)


def _assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensors in expected.items():
        for kind, tensor in tensors.items():
            assert_same_bits(f"{kind} of {name}", found[name][kind], tensor)


def test_a_step_that_fails_midway(
    gpu_fraction: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some layers have made it: nothing goes on from there but a loaded checkpoint."""
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
            if gpu_fraction:
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
        _assert_equal(engine.fp32_state_dict(), saved)
        backward(engine, 1)
        engine.step()
        _assert_equal(engine.fp32_state_dict(), expected)


def _failing_at(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Raises at its numberth call; without having done anything."""
    calls = itertools.count(1)

    def failing(*arguments: Any) -> Any:
        if next(calls) == number:
            raise torch.OutOfMemoryError("injected")
        return function(*arguments)

    return failing
