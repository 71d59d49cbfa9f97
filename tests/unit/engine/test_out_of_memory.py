"""The user's own forward runs out of device memory: the engine says so and frees memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import built, environment, make_config
from support.models import Mlp
from support.shadow import Shadow
from training import backward, followed, inputs, make_steps

from hytrain.errors import AbortedBackwardError
from hytrain.offload import update_pipeline

SOLVE: Any = "solve"


class Hungry(Mlp):
    """Finds no memory when told so."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.fails = False
        self.fails_in_backward = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if self.fails_in_backward:
            # Behind the last layers' gradients, which have been sent by then.
            inputs = inputs.requires_grad_()
            inputs.register_hook(self._fail)
        return super().forward(inputs)

    @staticmethod
    def _fail(_gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")


def fail_in_backward(engine: Any, model: Hungry, number: int, match: str) -> str:
    model.fails_in_backward = True
    with pytest.raises(torch.OutOfMemoryError, match=match) as raised:
        backward(engine, number)
    model.fails_in_backward = False
    return str(raised.value)


def test_k_goes_down_and_the_step_can_be_repeated() -> None:
    model = Hungry()
    with built(model, make_config(gpu_fraction=SOLVE, clipping=0.5, bf16=False)) as engine:
        shadow = Shadow(engine)
        make_steps(shadow, range(2))
        engine.set_gpu_fraction(1.0)
        engine.set_gpu_fraction("solve")
        # No decision of its own meanwhile.
        engine.optimizer.placement.controller.moves._settled_steps = -100
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
        make_steps(shadow, range(3, 6))
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
    with followed(model, gpu_fraction=SOLVE, accumulation=2) as run:
        engine = run.engine
        engine.set_gpu_fraction(1.0)
        engine.set_gpu_fraction("solve")
        for number in range(3):
            before = engine.optimizer.pipeline.num_gpu_layers
            with run.step(2 * number, 2 * number + 1, scale=0.5):
                backward(engine, 2 * number)
                engine.step()
                model.fails = True
                with pytest.raises(torch.OutOfMemoryError, match="repeat this micro-batch's forw"):
                    backward(engine, 2 * number + 1)
                assert engine.optimizer.pipeline.num_gpu_layers < before
                model.fails = False
                backward(engine, 2 * number + 1)


@pytest.mark.parametrize("delays", ["", "5:2000"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_after_a_backward_the_step_can_be_repeated(
    monkeypatch: pytest.MonkeyPatch, accumulation: int, delays: str
) -> None:
    """What was sent of it is taken back without memory of the device, which has none."""
    model = Hungry()
    with (
        environment("HYTRAIN_DELAYS", delays),
        followed(model, gpu_fraction=SOLVE, accumulation=accumulation) as run,
    ):
        engine = run.engine
        engine.set_gpu_fraction(0.8)
        engine.set_gpu_fraction("solve")
        for number in range(3):
            before = engine.optimizer.pipeline.num_gpu_layers
            for micro in range(accumulation):
                is_last = micro == accumulation - 1
                if is_last:
                    with monkeypatch.context() as patch:
                        patch.setattr(update_pipeline, "torch", NoMemory)
                        text = fail_in_backward(engine, model, 90, r"Tried to allocate 3.00 GiB")
                else:
                    backward(engine, 80 + micro)
                    engine.step()
            assert "An allocation that fails in backward cannot be undone" in text
            assert "repeat the step from the forward of its first micro-batch" in text
            assert engine.optimizer.pipeline.num_gpu_layers < before
            numbers = [accumulation * number + micro for micro in range(accumulation)]
            with run.step(*numbers, scale=1.0 / accumulation):
                for micro in numbers:
                    backward(engine, micro)
                    if micro != numbers[-1]:
                        engine.step()


class NoMemory:
    """In the place of torch, for code that must not ask for memory."""

    Tensor = torch.Tensor

    @staticmethod
    def empty(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


def test_nothing_moves_after_a_backward_whose_updates_are_committed() -> None:
    model = Hungry()
    with built(model, make_config(gpu_fraction=SOLVE, direct=True)) as engine:
        backward(engine, 0)
        engine.step()
        before = engine.optimizer.pipeline.num_gpu_layers
        text = fail_in_backward(engine, model, 1, r"Tried to allocate 3.00 GiB")
        assert "Now" not in text
        assert engine.optimizer.pipeline.num_gpu_layers == before
        with pytest.raises(AbortedBackwardError, match="Load a checkpoint"):
            backward(engine, 2)


def test_a_gradient_for_which_there_is_no_memory_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is as if nobody had asked: a second backward can be begun again later."""
    model = Hungry()
    with followed(model) as run:
        for number in range(3):
            with run.step(2 * number, 2 * number + 1):
                backward(run.engine, 2 * number)
                # Begun, so that they cannot be cancelled.
                run.engine.optimizer.pipeline.cpu.wait_all()
                with monkeypatch.context() as patch:
                    patch.setattr(update_pipeline, "torch", NoMemory)
                    with pytest.raises(torch.OutOfMemoryError):
                        backward(run.engine, 2 * number + 1)
                backward(run.engine, 2 * number + 1)
