"""What a step takes of the host, in calls of functions of the package: no clock, no machine."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from torch import nn

import hytrain
from hytrain.kernels import square_sums
from hytrain.kernels.grouped_adam import GroupedAdam
from hytrain.placement.solve_schedule import SolveSchedule

pytestmark = [pytest.mark.timeout(60), pytest.mark.cpu]

WIDTH = 64  # parameters leave no gaps between them
WARM, STEPS = 4, 4
A_LAYER = 46
"""Calls, at most, that one layer more takes of a step; 45.3 on Python 3.11, fewer on later ones.
Each is 0.1 us or more of a step that the host's launches bound, and many call torch as well."""
A_STEP = 310
"""Calls, at most, that do not depend on the number of layers; 309 on Python 3.11."""


class Block(nn.Module):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(parameters))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Deep(nn.Module):
    """Blocks, each a layer of some parameters."""

    def __init__(self, blocks: int, parameters: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(parameters) for _ in range(blocks))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = inputs.to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()


def calls_of_a_step(blocks: int, parameters: int = 3) -> Counter[str]:
    """Calls of the package's functions, by name, where no step is measured."""
    found: Counter[str] = Counter()
    root = str(hytrain.__path__[0])

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(root):
            found[frame.f_code.co_qualname] += 1

    def step(engine: Any) -> None:
        engine.backward(engine(torch.ones(1, WIDTH)))
        engine.step()

    torch.manual_seed(0)
    with built(Deep(blocks, parameters), make_config(gpu_fraction=1.0)) as engine:
        assert len(engine.optimizer.layer_states) == blocks
        for _ in range(WARM):
            step(engine)
        gc.collect()
        gc.disable()  # or the end of an earlier engine, which is in cycles, would be among them
        sys.setprofile(count)
        try:
            for _ in range(STEPS):
                step(engine)
        finally:
            sys.setprofile(None)
            gc.enable()
        assert engine.optimizer.steps == [WARM + STEPS]
    # All that is done for a layer is counted, whichever thread it runs in.
    for each in ("UpdatePipeline.send", "LayerUpdate.apply", "PassGuide.enter_forward"):
        assert found[each] == STEPS * blocks
    return found


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for kernels is left out, and so are steps that are measured."""
    monkeypatch.setattr(GroupedAdam, "launch", no)
    monkeypatch.setattr(square_sums, "sum_of_squares", one)
    monkeypatch.setattr(SolveSchedule, "measures_next", no)


def no(*_arguments: object, **_named: object) -> bool:
    return False


def one(_gradient: torch.Tensor) -> float:
    return 1.0


def test_calls_of_a_layer_and_of_a_step() -> None:
    few, many = (calls_of_a_step(blocks).total() / STEPS for blocks in (4, 20))
    a_layer = (many - few) / 16
    assert a_layer <= A_LAYER
    assert few - 4 * a_layer <= A_STEP


def test_calls_do_not_depend_on_the_parameters_of_a_layer() -> None:
    few, many = (calls_of_a_step(4, parameters) for parameters in (3, 9))
    assert few == many
