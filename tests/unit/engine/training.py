"""Shared by the engine's tests: steps that are compared with a plain model and a serial loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from support.engines import built, make_config
from support.models import HIDDEN, Mlp, loss_of
from support.shadow import Shadow, Twin
from torch import nn

FRACTIONS = [0.0, 0.5, 1.0]


def inputs(number: int) -> dict[str, torch.Tensor]:
    """A batch for models that take ``inputs``."""
    generator = torch.Generator().manual_seed(number)
    return {"inputs": torch.randn(2, HIDDEN, generator=generator)}


def backward(engine: Any, number: int) -> None:
    """One micro-batch's forward and backward."""
    engine.backward(loss_of(engine(**inputs(number))))


def train_and_compare(
    model: nn.Module,
    *,
    gpu_fraction: float,
    steps: int = 5,
    before: Callable[[int], None] | None = None,
    trained: Iterable[nn.Parameter] | None = None,
    twin: Twin | None = None,
    **config: Any,
) -> list[int]:
    """Each step's reduced gradients are the plain model's, and its update is the serial one.

    Args:
        model: takes ``inputs``, returns the loss.
        gpu_fraction: share of layers on the GPU.
        steps: number of steps.
        before: called before each step with its number.
        trained: parameters to train; default: those that require gradients.
        twin: the plain model, where a deep copy of ``model`` does not do.
        config: for make_config.

    Returns:
        For each step, how many layers left before the backward had ended.
    """
    twin = twin or Twin(model)
    config = {"bf16": False, "clipping": 0.5, **config}
    keywords = {} if trained is None else {"model_parameters": list(trained)}
    early: list[int] = []
    with built(model, make_config(gpu_fraction=gpu_fraction, **config), **keywords) as engine:
        shadow = Shadow(engine)
        for number in range(steps):
            if before:
                before(number)
            expected = twin.gradients(engine, [inputs(number)])
            backward(engine, number)
            early.append(sum(state.update.sent for state in shadow.states))
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()
    return early


class UserError(Exception):
    """Raised by what stands for the user's code."""


class Faulty(Mlp):
    """Raises in the forward or the backward of a block, when told to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.fail_forward: int | None = None
        self.fail_backward: int | None = None
        self.repeats = 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for index, block in enumerate(self.blocks):
            if index == self.fail_forward:
                raise UserError("forward")
            if index == self.fail_backward:
                x.register_hook(self._raise)
            for _ in range(self.repeats if index == 1 else 1):
                x = block(x)
        return self.head(x).pow(2).mean()

    @staticmethod
    def _raise(_gradient: torch.Tensor) -> None:
        raise UserError("backward")
