"""A step is final only in step(): until then its gradients can be taken back and added to."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engines import built, environment, make_config
from support.models import make_model
from support.shadow import Shadow
from training import FRACTIONS, backward, followed, inputs

from hytrain.model.layer_state import LayerState

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("order", "clipping", "delays"),
    [("fbfb", 1e-3, ""), ("fbfb", 100.0, "5:300"), ("ffbb", 1e-3, "5:300"), ("ffbb", 100.0, "")],
)
@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_two_backward_passes_in_a_step_add_up(
    order: str, gpu_fraction: float, clipping: float, delays: str
) -> None:
    """Forward-backward twice, or both forwards first."""
    config = {"gpu_fraction": gpu_fraction, "clipping": clipping}
    with (
        environment("HYTRAIN_DELAYS", delays),
        followed(make_model("mlp"), **config) as run,
    ):
        for number in range(0, 12, 2):
            with run.step(number, number + 1) as batches:
                losses = (run.engine(**batch) for batch in batches)
                for loss in losses if order == "fbfb" else list(losses):
                    run.engine.backward(loss)
            # An ordinary step in between: layers leave early again.
            backward(run.engine, 100 + number)
            run.shadow.step()


def _read_by_eval_forward(engine: Any) -> None:
    with torch.no_grad():
        engine(**inputs(77))


def _read_by_eval_mode(engine: Any) -> None:
    engine.eval()
    engine.train()


def _read_by_module_forward(engine: Any) -> None:
    with torch.no_grad():
        engine.module(**inputs(77))


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
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction, clipping=clipping) as run:
        for number in range(6):
            with run.step(number):
                backward(run.engine, number)
                if number % 3 != 2:
                    read(run.engine)
                    run.shadow.assert_copy_is_current()
                if number == 4:
                    read(run.engine)


@pytest.mark.parametrize("clipping", [1e-3, 100.0])
def test_gradients_leave_the_device_during_backward(clipping: float) -> None:
    """What the worker has fetched is let go before step(), and comes back from the host."""
    with followed(make_model("mlp"), clipping=clipping) as run:
        optimizer = run.engine.optimizer
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
            with run.step(number):
                backward(run.engine, number)
                if number:  # the first backward sends nothing early
                    assert len(alive) == len(run.shadow.states)
                    # The one sent last is let go with the next.
                    assert max(alive) <= 1
                    assert run.sent() == len(run.shadow.states)
                _read_by_eval_forward(run.engine)
                run.shadow.assert_copy_is_current()


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_retained_graph_before_step_and_after(gpu_fraction: float) -> None:
    """Before step() a second backward adds up; after it, torch refuses: the weights are new."""
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction) as run:
        for number in range(3):
            with run.step(number, number):
                loss = run.engine(**inputs(number))
                run.engine.backward(loss, retain_graph=True)
                run.engine.backward(loss, retain_graph=True)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                run.engine.backward(loss)
        run.good_step(9)  # the refused backward left nothing behind


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
            backward(engine, number)
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
                backward(engine, number)
            shadow.step()
        shadow.check()
