"""A step is final only in step(): until then its gradients can be taken back and added to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engines import built, environment, make_config
from support.models import loss_of, make_batch, make_model
from support.shadow import Shadow, Twin

from hytrain.model.layer_state import LayerState

pytestmark = pytest.mark.timeout(60)

FRACTIONS = [0.0, 0.5, 1.0]


def _loss(engine: Any, number: int) -> torch.Tensor:
    return loss_of(engine(**make_batch("mlp", number)))


def _two_backward_passes(engine: Any, number: int, order: str) -> None:
    """Forward-backward twice, or both forwards first."""
    if order == "fbfb":
        engine.backward(_loss(engine, number))
        engine.backward(_loss(engine, number + 1))
    else:
        losses = [_loss(engine, number), _loss(engine, number + 1)]
        for loss in losses:
            engine.backward(loss)


@pytest.mark.parametrize("delays", ["", "5:300"])
@pytest.mark.parametrize("clipping", [1e-3, 100.0])
@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
@pytest.mark.parametrize("order", ["fbfb", "ffbb"])
def test_two_backward_passes_in_a_step_add_up(
    order: str, gpu_fraction: float, clipping: float, delays: str
) -> None:
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(gpu_fraction=gpu_fraction, bf16=False, clipping=clipping)
    with environment("HYTRAIN_DELAYS", delays), built(model, config) as engine:
        shadow = Shadow(engine)
        for number in range(0, 12, 2):
            expected = twin.gradients(
                engine, [make_batch("mlp", number), make_batch("mlp", number + 1)]
            )
            _two_backward_passes(engine, number, order)
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
            # An ordinary step in between: layers leave early again.
            engine.backward(_loss(engine, 100 + number))
            shadow.step()
        shadow.check()


def _read_by_eval_forward(engine: Any) -> None:
    with torch.no_grad():
        _loss(engine, 77)


def _read_by_eval_mode(engine: Any) -> None:
    engine.eval()
    engine.train()


def _read_by_module_forward(engine: Any) -> None:
    with torch.no_grad():
        engine.module(**make_batch("mlp", 77))


READERS: list[Callable[[Any], Any]] = [
    _read_by_eval_forward,
    _read_by_eval_mode,
    _read_by_module_forward,
    lambda engine: engine.module.state_dict(),
    lambda engine: engine.module_state_dict(),
    lambda engine: engine.synchronize(),
]
READER_NAMES = ["forward", "eval", "module", "state_dict", "module_state_dict", "synchronize"]


@pytest.mark.parametrize("clipping", [0.1, 100.0])
@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
@pytest.mark.parametrize("read", READERS, ids=READER_NAMES)
def test_weights_read_between_backward_and_step_are_the_old_ones(
    read: Callable[[Any], Any], gpu_fraction: float, clipping: float
) -> None:
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(gpu_fraction=gpu_fraction, bf16=False, clipping=clipping)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for number in range(6):
            expected = twin.gradients(engine, [make_batch("mlp", number)])
            engine.backward(_loss(engine, number))
            if number % 3 != 2:
                read(engine)
                shadow.assert_copy_is_current()
            if number == 4:
                read(engine)
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


@pytest.mark.parametrize("clipping", [1e-3, 100.0])
def test_gradients_leave_the_device_during_backward(clipping: float) -> None:
    """What the worker has fetched is let go before step(), and comes back from the host."""
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(gpu_fraction=0.0, bf16=False, clipping=clipping)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        optimizer = engine.optimizer
        observe = optimizer.passes.reducer.on_reduced_gradient
        gradients: list[weakref.ref[torch.Tensor]] = []
        alive: list[int] = []

        def watch(state: LayerState, gradient: torch.Tensor) -> None:
            observe(state, gradient)
            optimizer.pipeline.cpu.wait_all()  # all that were sent before have been fetched
            alive.append(sum(reference() is not None for reference in gradients))
            gradients.append(weakref.ref(gradient))

        optimizer.passes.reducer.on_reduced_gradient = watch
        for number in range(4):
            gradients.clear()
            alive.clear()
            expected = twin.gradients(engine, [make_batch("mlp", number)])
            engine.backward(_loss(engine, number))
            if number:  # the first backward sends nothing early
                assert len(alive) == len(shadow.states)
                # The one sent last is let go with the next.
                assert max(alive) <= 1
                assert all(state.update.sent for state in shadow.states)
            with torch.no_grad():
                _loss(engine, 77)
            shadow.assert_copy_is_current()
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_loss_of_an_evaluation_between_backward_and_step(gpu_fraction: float) -> None:
    model = make_model("mlp")
    config = make_config(gpu_fraction=gpu_fraction, bf16=False)
    with built(model, config) as engine, torch.no_grad():
        for number in range(4):
            before = _loss(engine, 50)
            with torch.enable_grad():
                engine.backward(_loss(engine, number))
            assert torch.equal(_loss(engine, 50), before)
            engine.step()
            assert not torch.equal(_loss(engine, 50), before)


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_state_dict_after_step_holds_the_new_weights(gpu_fraction: float) -> None:
    model = make_model("mlp")
    with (
        environment("HYTRAIN_DELAYS", "3:2000"),
        built(model, make_config(gpu_fraction=gpu_fraction)) as engine,
    ):
        shadow = Shadow(engine)
        for number in range(3):
            engine.backward(_loss(engine, number))
            shadow.step()
            engine.module.state_dict()
            shadow.assert_copy_is_current()


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_retained_graph_before_step_and_after(gpu_fraction: float) -> None:
    """Before step() a second backward adds up; after it, torch refuses: the weights are new."""
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(gpu_fraction=gpu_fraction, bf16=False)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for number in range(3):
            expected = twin.gradients(engine, [make_batch("mlp", number)] * 2)
            loss = _loss(engine, number)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss, retain_graph=True)
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                engine.backward(loss)
        # The refused backward left nothing behind.
        engine.backward(_loss(engine, 9))
        shadow.step()
        shadow.check()


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_steps_without_a_forward_or_a_backward_between(gpu_fraction: float) -> None:
    """step() without a gradient is a step with zeros; two in a row must not overtake."""
    model = make_model("mlp")
    with (
        environment("HYTRAIN_DELAYS", "11:1500"),
        built(model, make_config(gpu_fraction=gpu_fraction, clipping=1e-3)) as engine,
    ):
        shadow = Shadow(engine)
        for number in range(4):
            engine.backward(_loss(engine, number))
            shadow.step()
            shadow.step()
            shadow.step()
            assert all(not g.any() for g in shadow.last.values())
        shadow.check()


def test_a_backward_through_a_part_of_the_model_only() -> None:
    """Layers that no forward waited for still get their step, and in order."""
    model = make_model("mlp")
    config = make_config(gpu_fraction=0.0, clipping=1e-3)
    with environment("HYTRAIN_DELAYS", "13:1500"), built(model, config) as engine:
        shadow = Shadow(engine)
        for number in range(5):
            if number % 2:
                x = torch.randn(2, 32, dtype=torch.bfloat16)
                engine.module.blocks[1](x).float().pow(2).mean().backward()
            else:
                engine.backward(_loss(engine, number))
            shadow.step()
        shadow.check()
