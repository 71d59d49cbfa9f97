"""The phases between two steps: what may follow what, and that profilers see them."""

from __future__ import annotations

import pytest
import torch
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model
from torch.profiler import ProfilerActivity, profile

from hytrain.errors import AbortedBackwardError
from hytrain.optimizer.step_state import StepPhase, StepState


def test_a_step_of_two_micro_batches() -> None:
    step = StepState()
    for reduces in (False, True):
        step.begin_backward(reduces=reduces)
        assert step.in_backward
        assert step.is_open
        step.end_backward()
        assert not step.in_backward
        assert step.is_open
        step.complete()
        assert step.has_gradients
        assert step.backward.reduces is reduces
    step.end()
    assert step.phase is StepPhase.IDLE
    assert not step.backward.reduces
    assert not step.has_gradients


def test_a_backward_begins_when_the_one_before_is_complete() -> None:
    step = StepState()
    step.begin_backward(reduces=True)
    for _ in range(2):
        with pytest.raises(AssertionError, match="BACKWARD after"):
            step.begin_backward(reduces=True)
        step.end_backward()


@pytest.mark.parametrize("gradients", [False, True])
def test_what_was_there_before_a_backward_for_inputs_is_there_after_it(gradients: bool) -> None:
    step = StepState()
    if gradients:
        step.begin_backward(reduces=True)
        step.end_backward()
    before = step.phase
    step.begin_inputs()
    assert not step.is_open
    assert step.has_gradients is gradients
    step.end_inputs()
    assert step.phase is before


def test_what_was_dropped_or_aborted_is_over_with_the_next_backward() -> None:
    step = StepState()
    step.drop()
    assert not step.has_gradients
    step.begin_backward(reduces=False)
    step.abort()
    with pytest.raises(AbortedBackwardError, match="last micro-batch did not finish"):
        step.refuse_aborted()
    assert not step.skip_dropped()
    step.begin_batch()
    step.refuse_aborted()
    step.drop()
    assert step.skip_dropped()
    assert not step.skip_dropped()


def test_nothing_follows_the_end() -> None:
    step = StepState()
    step.begin_backward(reduces=True)
    step.close()
    step.end()
    step.abort()
    assert step.is_closed


def test_torchs_profiler_sees_the_phases() -> None:
    with built(make_model("mlp"), make_config()) as engine:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            engine.backward(loss_of(engine(**make_batch("mlp", 0))))
            engine.step()
        torch.testing.assert_close(engine.optimizer.steps, [1])
        layers = [layer.name for layer in engine.optimizer.layer_states]
    seen = {event.key for event in profiled.key_averages()}
    assert {"hytrain::begin_backward", "hytrain::end_backward", "hytrain::step"} <= seen
    assert {f"hytrain::reduce {name}" for name in layers} <= seen
