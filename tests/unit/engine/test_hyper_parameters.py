"""Hyper-parameters are read every step, wherever they come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import built, environment, make_config
from support.models import make_model
from support.shadow import Shadow
from torch import nn
from training import FRACTIONS, backward, make_steps

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]


@pytest.mark.parametrize(
    ("change", "delays"),
    [
        ({"lr": 0.03}, ""),
        ({"lr": 0.03}, "3:400"),
        ({"betas": (0.5, 0.6)}, ""),
        ({"eps": 1e-3}, "3:400"),
        ({"weight_decay": 0.7}, ""),
    ],
    ids=str,
)
def test_changed_between_backward_and_step(
    gpu_fraction: float, change: dict[str, Any], delays: str
) -> None:
    """What was previewed with the old values is previewed again."""
    config = make_config(gpu_fraction=gpu_fraction, clipping=100.0)
    with environment("HYTRAIN_DELAYS", delays), built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        (group,) = engine.optimizer.param_groups
        usual = {key: group[key] for key in change}
        for number in range(6):
            backward(engine, number)
            group.update(change if number % 2 else usual)
            shadow.step()
        shadow.check()


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [
        {"params": parameters[0::3], "lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0},
        {"params": parameters[1::3], "lr": 5e-2, "eps": 1e-4},
        {"params": parameters[2::3], "betas": (0.0, 0.9), "weight_decay": 0.5},
    ]


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Adam_decoupled"])
def test_a_clients_optimizer(gpu_fraction: float, kind: str) -> None:
    model = make_model("mlp")
    groups = _groups(model)
    if kind == "AdamW":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1e-2)
    else:
        decoupled = {"decoupled_weight_decay": True} if kind == "Adam_decoupled" else {}
        optimizer = torch.optim.Adam(groups, lr=1e-2, weight_decay=0.3, **decoupled)
    config = make_config(gpu_fraction=gpu_fraction, optimizer=None)
    with built(model, config, optimizer=optimizer) as engine:
        assert engine.optimizer.param_groups is optimizer.param_groups
        shadow = Shadow(engine, decoupled=kind != "Adam")
        make_steps(shadow, range(4))
        shadow.check()


@pytest.mark.parametrize(
    ("kind", "adam_w_mode", "decoupled", "bias_correction"),
    [
        ("AdamW", None, True, True),
        ("AdamW", None, True, False),
        ("Adam", True, True, True),
        ("Adam", False, False, False),
        ("Adam", None, True, True),
    ],
)
def test_the_optimizer_of_the_json(
    gpu_fraction: float,
    kind: str,
    adam_w_mode: bool | None,
    decoupled: bool,
    bias_correction: bool,
) -> None:
    """DeepSpeed's "Adam" decouples the decay unless adam_w_mode is false."""
    params = {"lr": 2e-3, "weight_decay": 0.4, "bias_correction": bias_correction}
    if adam_w_mode is not None:
        params["adam_w_mode"] = adam_w_mode
    config = make_config(gpu_fraction=gpu_fraction, optimizer={"type": kind, "params": params})
    with built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine, decoupled=decoupled)
        (group,) = engine.optimizer.param_groups
        assert group.get("bias_correction", True) is bias_correction
        make_steps(shadow, range(4))
        shadow.check()


def _falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)


SCHEDULERS: dict[str, Any] = {
    "DeepSpeed's in the JSON": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    },
    "torch's in the JSON": {"type": "StepLR", "params": {"step_size": 2, "gamma": 0.5}},
    "made by the engine": _falling,
    "a client's": None,
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler(gpu_fraction: float, name: str) -> None:
    model, scheduler = make_model("mlp"), SCHEDULERS[name]
    keywords: dict[str, Any] = {}
    config = make_config(gpu_fraction=gpu_fraction)
    if isinstance(scheduler, dict):
        config["scheduler"] = scheduler
    elif scheduler is not None:
        keywords["lr_scheduler"] = scheduler
    else:
        del config["optimizer"]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        keywords = {"optimizer": optimizer, "lr_scheduler": _falling(optimizer)}
    with built(model, config, **keywords) as engine:
        shadow = Shadow(engine)
        rates: list[float] = []
        for number in range(5):
            backward(engine, number)
            rates.append(engine.optimizer.param_groups[0]["lr"])
            shadow.step()
        shadow.check()
        assert len(set(rates)) > 1
        assert engine.get_lr() == [engine.optimizer.param_groups[0]["lr"]]


@pytest.mark.parametrize(
    ("key", "value"), [("lr", -1.0), ("lr", float("nan")), ("eps", -1e-8), ("betas", (1.0, 0.9))]
)
def test_a_bad_value_is_refused_and_nothing_is_changed(
    gpu_fraction: float, key: str, value: Any
) -> None:
    config = make_config(gpu_fraction=gpu_fraction)
    with built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        backward(engine, 0)
        shadow.step()
        (group,) = engine.optimizer.param_groups
        usual = group[key]
        backward(engine, 1)
        group[key] = value
        with pytest.raises(ValueError, match=key.rstrip("s")):
            engine.step()
        group[key] = usual
        shadow.check()
        shadow.step()
        backward(engine, 2)
        shadow.step()
        shadow.check()
