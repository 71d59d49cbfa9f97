"""Hooks on hidden states between blocks, and settings that a forward changes around them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from layer_major_runs import MICRO_BATCHES, STEPS, assert_same, train
from support.models import Mlp
from torch.nn.attention import SDPBackend, sdpa_kernel

from hytrain.layer_major.thread_context import process_settings

pytestmark = pytest.mark.timeout(60)


# -- hooks on the hidden states between blocks see what they see -------------------------------


class Hooked(Mlp):
    """Puts a hook on every block's output; how often hooks were called is in ``calls``."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.kept: list[torch.Tensor] = []

    def _halve(self, gradient: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return gradient * 0.5

    def _limit(self, gradient: torch.Tensor) -> torch.Tensor:
        """Not linear: of a gradient in parts it would make something else."""
        self.calls += 1
        return gradient.clamp(-1e-4, 1e-4)

    def after(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(self._limit)
        return x

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.after(block(x))
        return x


class TwoHooks(Hooked):
    def after(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(self._halve)
        return super().after(x)


class BesideAnother(Hooked):
    """The next block's input is made of the hooked tensor."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return super().after(x) * 1.5


class BothWays(Hooked):
    """The hooked tensor and what is made of it are both given to the next block's input."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        return super().after(x) + x.tanh()


class WrittenTo(Hooked):
    """Hooks before and after the tensor has been written to."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        super().after(x)
        x *= 0.5
        if x.requires_grad:
            x.register_hook(self._halve)
        return x


class Kept(Hooked):
    """The hidden states' gradients are kept."""

    def after(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.retain_grad()
            self.kept.append(x)
        return x


class Skipping(Hooked):
    """The first block's hooked output is used again further up."""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        x = first = self.after(self.blocks[0](x))
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.blocks[-1](x + first)


class Supervised(Hooked):
    """The loss reads every hooked hidden state."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x, penalty = self.embed(inputs), torch.zeros(())
        for block in self.blocks:
            x = self.after(block(x))
            penalty = penalty + x.pow(2).mean()
        return self.head(x).pow(2).mean() + 0.1 * penalty


def _both(make: Callable[[], Hooked]) -> tuple[str | None, list[Hooked]]:
    models: list[Hooked] = []

    def made() -> Hooked:
        models.append(make())
        return models[-1]

    run = train(made)
    assert_same(run, train(made, accumulation="micro_batch_major"))
    return run.refusal, models


@pytest.mark.parametrize("make", [Hooked, TwoHooks, BesideAnother, BothWays, WrittenTo])
def test_a_hook_sees_the_gradient_once_and_changes_it(make: type[Hooked]) -> None:
    refusal, (by_layer, one_by_one) = _both(make)
    assert refusal is None
    assert by_layer.calls == one_by_one.calls
    assert one_by_one.calls >= STEPS * len(by_layer.blocks)


def test_gradients_that_are_kept() -> None:
    refusal, (by_layer, one_by_one) = _both(Kept)
    assert refusal is None
    blocks = len(by_layer.blocks)
    for step in range(STEPS):
        for micro_batch in range(MICRO_BATCHES):
            for block in range(blocks):
                begin = step * MICRO_BATCHES * blocks
                ours = by_layer.kept[begin + block * MICRO_BATCHES + micro_batch].grad
                theirs = one_by_one.kept[begin + micro_batch * blocks + block].grad
                assert ours is not None
                assert theirs is not None
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("make", [Skipping, Supervised])
def test_where_a_hook_would_see_parts_the_model_is_refused(make: type[Hooked]) -> None:
    refusal, _ = _both(make)
    assert refusal is not None
    assert "a hook is on a tensor that a block returns" in refusal


# -- settings of the whole process that a forward changes --------------------------------------


@contextmanager
def _in_double() -> Generator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Around(Mlp):
    """Enters a context around its last two blocks."""

    def __init__(self, context: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.context = context

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:-2]:
            x = block(x)
        with self.context():
            for block in self.blocks[-2:]:
                x = block(x)
        return x


@pytest.mark.parametrize(
    ("context", "name"),
    [(lambda: sdpa_kernel(SDPBackend.MATH), "sdpa_kernel"), (_in_double, "default dtype")],
    ids=["sdpa_kernel", "default dtype"],
)
def test_a_setting_of_the_process_around_the_blocks(
    context: Callable[[], AbstractContextManager[object]], name: str
) -> None:
    before = process_settings()
    by_layer = train(lambda: Around(context))
    assert process_settings() == before
    assert by_layer.refusal is not None
    assert name in by_layer.refusal
    assert_same(by_layer, train(lambda: Around(context), accumulation="micro_batch_major"))


def test_filters_of_warnings_are_as_before() -> None:
    def context() -> AbstractContextManager[object]:
        return warnings.catch_warnings(action="ignore")

    filters = warnings.filters
    assert train(lambda: Around(context)).refusal is None
    assert warnings.filters is filters
