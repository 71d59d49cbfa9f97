"""Settings of the whole process that a forward changes: refused, and as before behind it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
from layer_major_runs import assert_same, train
from support.models import Mlp
from torch.nn.attention import SDPBackend, sdpa_kernel

from hytrain.layer_major.thread_context import process_settings

pytestmark = pytest.mark.timeout(60)


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
