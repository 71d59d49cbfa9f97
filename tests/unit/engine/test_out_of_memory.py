"""The user's own forward runs out of device memory: the engine says so and frees memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import Mlp
from support.shadow import Shadow, Twin
from training import backward, inputs

SOLVE: Any = "solve"


class Hungry(Mlp):
    """Finds no memory when told so."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.fails = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(inputs)


def test_k_goes_down_and_the_step_can_be_repeated() -> None:
    model = Hungry()
    with built(model, make_config(gpu_fraction=SOLVE, clipping=0.5, bf16=False)) as engine:
        shadow = Shadow(engine)
        for number in range(2):
            backward(engine, number)
            shadow.step()
        engine.set_gpu_fraction(1.0)
        engine.set_gpu_fraction("solve")
        engine.optimizer.placement.controller._settled = -100  # no decision of its own meanwhile
        backward(engine, 2)
        shadow.step()
        layers = len(engine.optimizer.layer_states)
        assert engine.optimizer.pipeline.num_gpu_layers == layers
        model.fails = True
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 2.00 GiB") as raised:
            engine(**inputs(3))
        assert "gpu_memory_reserve_bytes" in str(raised.value)
        assert f"Now {layers - 1} layers are left there" in str(raised.value)
        assert engine.optimizer.pipeline.num_gpu_layers == layers - 1
        assert engine.placement_decisions()[-1].gpu_layers_target == layers - 1
        # Nothing of what has left is still held on the device.
        assert not engine.optimizer.pipeline.mover._moves
        model.fails = False
        for number in range(3, 6):
            backward(engine, number)
            shadow.step()
        assert engine.optimizer.pipeline.num_gpu_layers <= layers - 1
        shadow.check()


def test_a_fixed_k_stays_and_the_error_says_what_to_change() -> None:
    model = Hungry()
    with built(model, make_config(gpu_fraction=0.5)) as engine:
        before = engine.optimizer.pipeline.num_gpu_layers
        model.fails = True
        with pytest.raises(torch.OutOfMemoryError, match=r'smaller "hytrain.gpu_fraction"'):
            engine(**inputs(0))
        assert engine.optimizer.pipeline.num_gpu_layers == before


def test_nothing_moves_while_a_step_is_under_way() -> None:
    model = Hungry()
    with built(model, make_config(gpu_fraction=SOLVE, clipping=0.5, bf16=False)) as engine:
        shadow = Shadow(engine)
        engine.set_gpu_fraction(1.0)
        engine.set_gpu_fraction("solve")
        backward(engine, 0)
        before = engine.optimizer.pipeline.num_gpu_layers
        model.fails = True
        with pytest.raises(torch.OutOfMemoryError, match=r"frees memory"):
            engine(**inputs(1))
        assert engine.optimizer.pipeline.num_gpu_layers == before
        model.fails = False
        backward(engine, 0)
        shadow.step()
        shadow.check()


def test_the_forward_of_a_later_micro_batch_can_be_repeated() -> None:
    """By hand: what the micro-batches before have left stays, though layers have moved."""
    model = Hungry()
    twin = Twin(model)
    config = make_config(gpu_fraction=SOLVE, clipping=0.5, bf16=False, accumulation=2)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        engine.set_gpu_fraction(1.0)
        engine.set_gpu_fraction("solve")
        for number in range(3):
            expected = twin.gradients(engine, [inputs(2 * number), inputs(2 * number + 1)], 0.5)
            before = engine.optimizer.pipeline.num_gpu_layers
            backward(engine, 2 * number)
            engine.step()
            model.fails = True
            with pytest.raises(torch.OutOfMemoryError, match="repeat this micro-batch's forward"):
                backward(engine, 2 * number + 1)
            assert engine.optimizer.pipeline.num_gpu_layers < before
            model.fails = False
            backward(engine, 2 * number + 1)
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()
