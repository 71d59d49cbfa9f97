"""What was profiled is gone when the call returns, not when the garbage collector comes by.

On a GPU a copy that only the collector frees is missing for what follows: hundreds of MiB.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from paced_model import profile_layer
from support.configs import LLAMA, write_config
from torch import nn

from hytrain.errors import ConfigError
from hytrain.formats.profile_file import CollectiveSample
from hytrain.tools.profiler import collective_profile
from hytrain.tools.profiler.layer_profile import LayerProfiling
from hytrain.tools.profiler.measured_model import MeasuredModel, SmallModel, read_subject
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.ranks import Ranks
from hytrain.tools.profiler.run import profile_ranks

CPU = torch.device("cpu")
WIDTH = 16
OPTIONS = ProfileOptions(
    micro_batches=(1, 2, 4),
    seconds=0.2,
    rate_seconds=0.01,
    cpu_elements=1 << 14,
    copy_bytes=1 << 16,
)


@contextlib.contextmanager
def no_collector() -> Generator[None]:
    """Only what nobody refers to is freed."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Copies:
    """Follows the tensors of all copies that are made, without keeping them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref[Any]] = []
        make = SmallModel.__init__

        def made(copy: SmallModel, *args: Any) -> None:
            make(copy, *args)
            self._made += map(weakref.ref, [*copy.model.parameters(), copy.model, copy])

        monkeypatch.setattr(SmallModel, "__init__", made)

    def alive(self) -> int:
        """Of those that have been made, which must be some."""
        assert self._made
        return sum(reference() is not None for reference in self._made)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    return Copies(monkeypatch)


def llama(folder: Path) -> MeasuredModel:
    return read_subject(str(write_config(folder / "model", LLAMA)), seq_len=16, dtype=torch.float32)


class Block(nn.Module):
    def __init__(self, fails_at: int, error: type[Exception]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.fails_at = fails_at
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) >= self.fails_at:
            raise self.error("no more")
        return self.linear(x).relu()


class Stack(nn.Module):
    """Its last block fails, when the others' graph is there."""

    def __init__(self, num_layers: int, fails_at: int, error: type[Exception]) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        last = num_layers - 1
        self.blocks = nn.ModuleList(
            Block(fails_at if number == last else 2**30, error) for number in range(num_layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def stack(fails_at: int, error: type[Exception]) -> MeasuredModel:
    def build(num_layers: int | None, seq_len: int) -> Any:
        return Stack(num_layers or 4, fails_at, error), make_batch

    def make_batch(size: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(size, WIDTH)}

    return MeasuredModel("stack", build, seq_len=1, dtype=torch.float32)


def test_a_profiling_that_has_ended_has_no_copy(tmp_path: Path, copies: Copies) -> None:
    with no_collector():
        with LayerProfiling(llama(tmp_path), CPU, OPTIONS) as layers:
            layers.measure()
            assert copies.alive() > 0
        assert copies.alive() == 0


def test_collectives_are_measured_without_the_copy(
    tmp_path: Path, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the device has left for training is looked at after them."""
    alive: list[int] = []

    def samples(*_: object, **__: object) -> tuple[CollectiveSample, ...]:
        alive.append(copies.alive())
        return ()

    monkeypatch.setattr(collective_profile, "collective_samples", samples)
    with no_collector():
        profile_ranks(llama(tmp_path), CPU, OPTIONS, ranks=Ranks(alone=True))
    assert alive == [0]


def test_a_copy_whose_larger_batches_do_not_fit(copies: Copies) -> None:
    subject = stack(fails_at=4, error=torch.cuda.OutOfMemoryError)
    with no_collector():
        found = profile_layer(subject, CPU, OPTIONS)
        assert [row.samples for row in found.layer] == [1, 2]
        assert copies.alive() == 0


@pytest.mark.parametrize("error", [ConfigError, KeyError])
def test_a_copy_that_fails(copies: Copies, error: type[Exception]) -> None:
    subject = stack(fails_at=2, error=error)
    with no_collector():
        try:
            profile_ranks(subject, CPU, OPTIONS, ranks=Ranks(alone=True))
        except error:
            pass
        else:
            pytest.fail("it has not failed")
        assert copies.alive() == 0


def test_no_tensor_of_any_measurement(tmp_path: Path) -> None:
    subject = llama(tmp_path)
    profile_ranks(subject, CPU, OPTIONS, ranks=Ranks(alone=True))  # what libraries keep
    with no_collector():
        before = tensors()
        profile_ranks(subject, CPU, OPTIONS, ranks=Ranks(alone=True))
        assert tensors() - before == set()


def tensors() -> set[tuple[int, torch.Size]]:
    """Those that there are, as addresses: a set of themselves would keep them."""
    found = (each for each in gc.get_objects() if isinstance(each, torch.Tensor))
    return {(id(each), each.shape) for each in found}
