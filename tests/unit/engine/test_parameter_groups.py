"""Parameter groups after the build: hyper-parameters are followed, anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import make_model
from support.shadow import Shadow
from torch import nn
from training import FRACTIONS, backward, make_steps

from hytrain.errors import UnsupportedError

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]

Groups = list[dict[str, Any]]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    return torch.optim.AdamW(
        [{"params": parameters[0::2]}, {"params": parameters[1::2], "lr": 3e-3}], lr=1e-2
    )


def _swap(groups: Groups) -> None:
    first, second = groups[0]["params"], groups[1]["params"]
    first[1], second[1] = second[1], first[1]


def _new_list(groups: Groups) -> None:
    groups[0]["params"] = groups[0]["params"][:-1]


def _go_on(engine: Any, when: str) -> None:
    if when == "before_backward":
        backward(engine, 3)
    engine.step()


CHANGES: dict[str, tuple[Callable[[Groups], Any], str]] = {
    "maximize": (lambda groups: groups[1].update(maximize=True), "group 1 sets maximize=True"),
    "amsgrad": (lambda groups: groups[0].update(amsgrad=True), "group 0 sets amsgrad=True"),
    "differentiable": (lambda groups: groups[0].update(differentiable=True), "differentiable"),
    "reversed": (lambda groups: groups.reverse(), "group 0 has other parameters"),
    "removed": (lambda groups: groups.pop(), "has 1 parameter groups"),
    "added": (lambda groups: groups.append(dict(groups[0])), "has 3 parameter groups"),
    "shorter": (lambda groups: groups[1]["params"].pop(), "group 1 has other parameters"),
    "swapped": (_swap, "group 0 has other parameters"),
    "new_list": (_new_list, "group 0 has other parameters"),
}


@pytest.mark.parametrize(
    ("name", "when"),
    [
        *((name, "before_step") for name in CHANGES),
        *((name, "before_backward") for name in ("maximize", "removed", "swapped")),
    ],
)
def test_refused_and_exact_once_undone(gpu_fraction: float, name: str, when: str) -> None:
    model = make_model("mlp")
    optimizer = _optimizer(model)
    change, match = CHANGES[name]
    config = make_config(gpu_fraction=gpu_fraction, optimizer=None)
    with built(model, config, optimizer=optimizer) as engine:
        shadow = Shadow(engine)
        make_steps(shadow, range(3))
        groups = optimizer.param_groups
        saved = [{**group, "params": list(group["params"])} for group in groups]
        if when == "before_step":
            backward(engine, 3)
        change(groups)
        with pytest.raises(UnsupportedError, match=match):
            _go_on(engine, when)
        groups[:] = saved
        shadow.check()
        if when == "before_backward":
            engine.optimizer.passes.discard_gradients()
            shadow.gradients.clear()
            backward(engine, 3)
        shadow.step()
        backward(engine, 4)
        shadow.step()
        shadow.check()


@pytest.mark.parametrize("name", ["maximize", "reversed", "shorter"])
def test_refused_before_anything_is_committed_directly(gpu_fraction: float, name: str) -> None:
    model = make_model("mlp")
    optimizer = _optimizer(model)
    change, match = CHANGES[name]
    config = make_config(gpu_fraction=gpu_fraction, optimizer=None, direct=True)
    with built(model, config, optimizer=optimizer) as engine:
        shadow = Shadow(engine)
        make_steps(shadow, range(2))
        saved = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
        change(optimizer.param_groups)
        with pytest.raises(UnsupportedError, match=match):
            backward(engine, 2)
        optimizer.param_groups[:] = saved
        shadow.check()
        backward(engine, 2)
        shadow.step()
        shadow.check()


def test_groups_that_were_copied_are_followed(gpu_fraction: float) -> None:
    """torch's own load_state_dict replaces the groups by others with the same parameters."""
    model = make_model("mlp")
    optimizer = _optimizer(model)
    config = make_config(gpu_fraction=gpu_fraction, optimizer=None)
    with built(model, config, optimizer=optimizer) as engine:
        shadow = Shadow(engine)
        stored = optimizer.state_dict()
        stored["param_groups"][0]["lr"] = 0.05
        optimizer.load_state_dict(stored)
        backward(engine, 0)
        shadow.step()
        engine.optimizer.param_groups = [
            {**group, "weight_decay": 0.3} for group in optimizer.param_groups
        ]
        assert optimizer.param_groups[0]["weight_decay"] == 0.3
        backward(engine, 1)
        shadow.step()
        shadow.check()
        with pytest.raises(UnsupportedError, match="has 1 parameter groups"):
            engine.optimizer.param_groups = optimizer.param_groups[:1]


def test_adding_a_group(gpu_fraction: float) -> None:
    config = make_config(gpu_fraction=gpu_fraction)
    with built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        more = nn.Parameter(torch.ones(3))
        with pytest.raises(UnsupportedError, match="add_param_group was called"):
            engine.optimizer.add_param_group({"params": [more]})
        backward(engine, 0)
        shadow.step()
        shadow.check()


def test_refused_before_the_second_micro_batch_is_stepped(gpu_fraction: float) -> None:
    """What was accumulated stays, and counts once the groups are as they were."""
    model = make_model("mlp")
    config = make_config(gpu_fraction=gpu_fraction, accumulation=2)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        (group,) = engine.optimizer.param_groups
        backward(engine, 0)
        engine.step()
        group["maximize"] = True
        with pytest.raises(UnsupportedError, match="maximize"):
            backward(engine, 1)
        group["maximize"] = False
        backward(engine, 1)
        shadow.step()
        shadow.check()
