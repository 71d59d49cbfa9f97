"""An optimizer of a user's own, whose update is made on the device: Lion beside a plain loop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model

import hytrain
from hytrain.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("process_group")


class Lion(torch.optim.Optimizer):
    """Its step is never called: hytrain's engine asks for its parameter groups."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})


def read_lion(group: Mapping[str, Any], _step: int) -> tuple[float, float, float, float]:
    return group["lr"], *group["betas"], group["weight_decay"]


def lion(
    weight: torch.Tensor, states: Any, gradient: torch.Tensor, values: Any, _parameter: Any
) -> None:
    (average,), (lr, beta1, beta2, decay) = states, values
    direction = average.lerp(gradient, 1 - beta1).sign_()
    weight.mul_(1 - lr * decay).add_(direction, alpha=-lr)
    average.lerp_(gradient, 1 - beta2)


def config(**section: Any) -> dict[str, Any]:
    return make_config(
        bf16=False, optimizer=None, zero_allow_untested_optimizer=True, hytrain=section
    )


def steps(engine: Any, first: int, last: int) -> None:
    for number in range(first, last):
        engine.backward(loss_of(engine(**make_batch("mlp", number))))
        engine.step()


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.4, 1.0])
def test_lion(gpu_fraction: float, tmp_path: Path) -> None:
    hytrain.register_optimizer(Lion, hytrain.DeviceOptimizer(("exp_avg",), read_lion, lion))
    model, plain = make_model("mlp"), make_model("mlp")
    averages = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    for number in range(4):
        plain.zero_grad()
        loss_of(plain(**make_batch("mlp", number))).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        with torch.no_grad():
            for name, p in plain.named_parameters():
                lion(p, (averages[name],), p.grad, (1e-3, 0.9, 0.99, 0.0), p)
    settings = config(gpu_fraction=gpu_fraction)
    with built(model, settings, optimizer=Lion(model.parameters(), lr=1e-3)) as engine:
        steps(engine, 0, 4)
        found = engine.fp32_state_dict()
        engine.save_checkpoint(str(tmp_path), "four")
    for name, parameter in plain.named_parameters():
        # A sign may differ where the average is next to nothing.
        differs = (found[name]["fp32"] - parameter.detach()).abs() > 1e-5
        assert differs.float().mean() < 0.01
        torch.testing.assert_close(found[name]["exp_avg"], averages[name], rtol=1e-3, atol=1e-6)
    other = make_model("mlp", seed=1)
    with built(other, config(gpu_fraction=0.0), optimizer=Lion(other.parameters())) as engine:
        engine.load_checkpoint(str(tmp_path), "four")
        assert_same_states(engine.fp32_state_dict(), found)


def test_one_that_is_not_registered() -> None:
    model = make_model("mlp")
    with (
        pytest.raises(UnsupportedError, match="register_optimizer"),
        built(model, config(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        pass
