"""Shared by the engine's tests: steps that are compared with a plain model and a serial loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from support.engines import built, make_config
from support.models import HIDDEN, Mlp, loss_of
from support.shadow import Shadow, Twin
from torch import nn

from hytrain.errors import UnsupportedError

ALL_FRACTIONS = [0.0, 0.5, 1.0]
FRACTIONS = [0.5, *(pytest.param(k, marks=pytest.mark.parity_full) for k in (0.0, 1.0))]
"""Half of the layers on each side run the code of both; test-parity has the ends too."""


def inputs(number: int) -> dict[str, torch.Tensor]:
    """A batch for models that take ``inputs``."""
    generator = torch.Generator().manual_seed(number)
    return {"inputs": torch.randn(2, HIDDEN, generator=generator)}


def refused_step(engine: Any) -> None:
    """A step() that changes nothing, and may be repeated."""
    group = engine.optimizer.param_groups[0]
    group["maximize"] = True
    with pytest.raises(UnsupportedError, match="maximize"):
        engine.step()
    group["maximize"] = False


def backward(engine: Any, number: int) -> None:
    """One micro-batch's forward and backward."""
    engine.backward(loss_of(engine(**inputs(number))))


@contextmanager
def untouched(model: nn.Module, kind: type[Exception], match: str) -> Iterator[Any]:
    """The block raises a user's error, and the model is what it was."""
    before = [(p.data_ptr(), p.dtype, p.detach().clone()) for p in model.parameters()]
    with pytest.raises(kind, match=match) as raised:
        yield raised
    assert isinstance(raised.value, ValueError)
    for parameter, (address, dtype, values) in zip(model.parameters(), before, strict=True):
        # DeepSpeed has moved the model to a GPU before it asks for the optimizer.
        assert parameter.is_cuda or parameter.data_ptr() == address
        assert parameter.dtype == dtype
        assert torch.equal(parameter, values)
        assert not parameter._post_accumulate_grad_hooks


def make_steps(one: Any, numbers: Iterable[int]) -> None:
    """Steps of one micro-batch each, of an engine, or of a shadow and its engine."""
    engine = one.engine if isinstance(one, Shadow) else one
    for number in numbers:
        backward(engine, number)
        one.step()


class Followed(NamedTuple):
    """An engine with a serial loop beside it, and a plain model that gives gradients."""

    engine: Any
    shadow: Shadow
    twin: Twin

    @contextmanager
    def step(self, *numbers: int, scale: float = 1.0) -> Iterator[list[dict[str, torch.Tensor]]]:
        """A step that the block runs back for, up to its step().

        Its reduced gradients are the plain model's of these batches, times ``scale``, and its
        update is the serial one.
        """
        batches = [inputs(number) for number in numbers]
        expected = self.twin.gradients(self.engine, batches, scale)
        yield batches
        self.shadow.step()
        self.twin.assert_were_reduced(self.shadow, expected)

    def good_step(self, number: int) -> None:
        """One micro-batch, as most scripts have it."""
        with self.step(number):
            backward(self.engine, number)

    def sent(self) -> int:
        """Layers whose update has begun."""
        return sum(state.update.sent for state in self.shadow.states)


@contextmanager
def followed(
    model: nn.Module,
    *,
    trained: Iterable[nn.Parameter] | None = None,
    twin: Twin | None = None,
    **config: Any,
) -> Iterator[Followed]:
    """An engine whose state is the serial loop's at the end of the block.

    Args:
        model: takes ``inputs``, returns the loss.
        trained: parameters to train; default: those that require gradients.
        twin: the plain model, where a deep copy of ``model`` does not do.
        config: for make_config; without bf16, whose roundings the plain model's sums do not have.
    """
    twin = twin or Twin(model)
    config = make_config(**{"bf16": False, "clipping": 0.5, **config})
    keywords = {} if trained is None else {"model_parameters": list(trained)}
    with built(model, config, **keywords) as engine:
        run = Followed(engine, Shadow(engine), twin)
        yield run
        run.shadow.check()


def train_and_compare(
    model: nn.Module, *, steps: int = 5, before: Callable[[int], None] | None = None, **more: Any
) -> list[int]:
    """Follows some steps of one micro-batch each.

    Args:
        model: takes ``inputs``, returns the loss.
        steps: number of steps.
        before: called before each step with its number.
        more: see :func:`followed`.

    Returns:
        For each step, how many layers left before the backward had ended.
    """
    early: list[int] = []
    with followed(model, **more) as run:
        for number in range(steps):
            if before:
                before(number)
            with run.step(number):
                backward(run.engine, number)
                early.append(run.sent())
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

    @contextmanager
    def failing(self, where: str = "fail_backward", block: int = 1) -> Iterator[None]:
        """The block of code raises this model's error, in "fail_forward" or "fail_backward"."""
        setattr(self, where, block)
        with pytest.raises(UserError):
            yield
        setattr(self, where, None)

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
