"""Muon beside what else an engine offers: traces, states that leave the device, evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.comparisons import assert_same_states
from support.engines import built, device, make_config
from support.models import loss_of, make_batch, make_model

pytestmark = pytest.mark.usefixtures("process_group")
MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3}}


def steps(engine: Any, first: int, last: int) -> None:
    for number in range(first, last):
        engine.backward(loss_of(engine(**make_batch("mlp", number, device()))))
        engine.step()


def final_states(**keywords: Any) -> Any:
    with built(make_model("mlp"), make_config(optimizer=MUON, **keywords)) as engine:
        steps(engine, 0, 4)
        return engine.fp32_state_dict()


def test_a_traced_run_is_the_same_run(tmp_path: Path) -> None:
    traced = {"trace": {"steps": [1, 3], "dir": str(tmp_path)}}
    found = final_states(gpu_fraction=0.4, hytrain=traced)
    assert_same_states(found, final_states(gpu_fraction=0.4))
    (trace,) = tmp_path.rglob("trace_rank0.json*")
    assert "update layer" in trace.read_text()


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5, 1.0])
def test_states_leave_the_device_and_come_back(gpu_fraction: float) -> None:
    config = make_config(optimizer=MUON, gpu_fraction=gpu_fraction)
    with built(make_model("mlp"), config) as engine:
        steps(engine, 0, 2)
        engine.offload_states()
        engine.reload_states()
        engine.eval()
        loss_of(engine(**make_batch("mlp", 9, device())))
        engine.train()
        steps(engine, 2, 4)
        found = engine.fp32_state_dict()
    assert_same_states(found, final_states(gpu_fraction=gpu_fraction))


def test_a_forward_between_backward_and_step_takes_updates_back() -> None:
    """As an evaluation there does: gradients are kept, and the step is made with them."""
    with built(make_model("mlp"), make_config(optimizer=MUON, gpu_fraction=0.4)) as engine:
        steps(engine, 0, 2)
        engine.backward(loss_of(engine(**make_batch("mlp", 2, device()))))
        engine.eval()
        loss_of(engine(**make_batch("mlp", 9, device())))
        engine.train()
        engine.step()
        steps(engine, 3, 4)
        found = engine.fp32_state_dict()
    assert_same_states(found, final_states(gpu_fraction=0.4))
