"""optimizer.state_dict() and load_state_dict(): this rank's state, to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, environment, make_config
from support.models import loss_of, make_batch, make_model
from support.resume import Run, assert_same, engine_of, micro_batch, snapshot, train

from hytrain.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(120)]


@pytest.mark.parametrize("gpu_fractions", [(0.0, 0.0), (0.5, 1.0), (1.0, 0.5)], ids=str)
@pytest.mark.parametrize("bf16", [True, False])
def test_training_goes_on_from_it(
    bf16: bool, gpu_fractions: tuple[float, float], tmp_path: Path
) -> None:
    """Into an engine with other weights, whose state is placed elsewhere."""
    file = tmp_path / "optimizer.pt"
    first, second = gpu_fractions
    with (
        environment("HYTRAIN_DELAYS", "3:1000"),
        engine_of(Run(bf16=bf16, gpu_fraction=first)) as engine,
    ):
        train(engine, 0, 3)
        torch.save(engine.optimizer.state_dict(), file)
        rest = {"calls": engine.module.calls.clone(), "schedule": engine.lr_scheduler.state_dict()}
        before = snapshot(engine)
        losses = train(engine, 3, 6)
        after = snapshot(engine)
    with engine_of(Run(bf16=bf16, gpu_fraction=second, seed=7)) as engine:
        train(engine, 40, 42)
        engine.backward(engine(micro_batch(43).to(engine.device)))
        stored = torch.load(file)
        engine.optimizer.load_state_dict([stored] if bf16 else stored)
        with torch.no_grad():
            engine.module.calls.copy_(rest["calls"])
            frozen = {k: v for k, v in before.weights.items() if k.startswith("frozen")}
            engine.module.load_state_dict(frozen, strict=False)
        engine.lr_scheduler.load_state_dict(rest["schedule"])
        assert engine.optimizer.steps == [3] * len(engine.optimizer.steps)
        assert_same_states(snapshot(engine).state, before.state)
        found = train(engine, 3, 6)
        if first == second:  # the CPU's and the GPU's kernel may differ in the last bit
            assert found == losses
            assert_same_states(snapshot(engine).state, after.state)
        else:
            assert found == pytest.approx(losses, rel=1e-4)


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_moments_in_fewer_bytes_are_saved(
    moments: str, gpu_fraction: float, tmp_path: Path
) -> None:
    """Of one layer they lie in one block with its master weights, which have another dtype."""
    config = make_config(gpu_fraction=gpu_fraction, hytrain={"moments": moments})
    with built(make_model("mlp"), config) as engine:
        engine.backward(loss_of(engine(**make_batch("mlp", 0))))
        engine.step()
        torch.save(engine.optimizer.state_dict(), tmp_path / "optimizer.pt")
        expected = engine.fp32_state_dict()
    with built(make_model("mlp", seed=1), config) as engine:
        engine.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
        assert_same_states(engine.fp32_state_dict(), expected)


def test_the_tensors_are_the_optimizers_own() -> None:
    with engine_of(Run()) as engine:
        train(engine, 0, 1)
        (layer, *_), (stored, *_) = (
            engine.optimizer.layer_states,
            engine.optimizer.state_dict()["layers"],
        )
        assert stored["fp32"].data_ptr() == layer.master.data_ptr()
        assert stored["exp_avg"].data_ptr() == layer.exp_avg.data_ptr()


def test_taking_it_changes_nothing() -> None:
    with engine_of(Run()) as engine:
        train(engine, 0, 3)
        expected = snapshot(engine)
    with engine_of(Run()) as engine:
        for number in range(3):
            engine.optimizer.state_dict()
            engine.backward(engine(micro_batch(number).to(engine.device)))
            engine.optimizer.state_dict()
            engine.step()
        assert_same(snapshot(engine), expected)


def _of_torch(stored: dict[str, Any]) -> dict[str, Any]:
    return {"state": {}, "param_groups": stored["param_groups"]}


def _of_another_layout(stored: dict[str, Any]) -> dict[str, Any]:
    stored["layers"][1]["end"] //= 2
    return stored


def _of_other_groups(stored: dict[str, Any]) -> dict[str, Any]:
    return {**stored, "param_groups": stored["param_groups"] * 2}


WRONG = {
    "torch": (_of_torch, "not made by the state_dict"),
    "layout": (_of_another_layout, "layers or shards are others"),
    "groups": (_of_other_groups, "parameter groups are others"),
    "ranks": (lambda stored: [stored, stored], "on as many ranks"),
    "nothing": (lambda _stored: None, "not made by the state_dict"),
    "nothing of this rank": (lambda _stored: [None], "not made by the state_dict"),
}


@pytest.mark.parametrize("name", WRONG)
def test_anything_else_is_refused_and_nothing_is_touched(name: str) -> None:
    change, match = WRONG[name]
    with engine_of(Run()) as engine:
        train(engine, 0, 2)
        before = snapshot(engine)
        stored = change(copy.deepcopy(engine.optimizer.state_dict()))
        with pytest.raises(CheckpointError, match=rf"{match}.* use engine\.save_checkpoint"):
            engine.optimizer.load_state_dict(stored)
        assert_same(snapshot(engine), before)
