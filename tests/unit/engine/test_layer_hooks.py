"""One hook a layer instead of one a parameter: the same numbers, and the same errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.engines import built, make_config
from support.models import Mlp, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import UserError, backward, followed, inputs, make_steps

from hytrain.errors import AbortedBackwardError
from hytrain.optimizer.gradients import GradientCollector
from hytrain.optimizer.layer_gradient import LayerGradient

pytestmark = pytest.mark.timeout(60)

WARM = 3
"""Steps after which layers have one hook each."""


class Shifting(Mlp):
    """A weight of the last block is used once more, or autograd's order changes, when told to."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.way = "plain"

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        if self.way == "another order":
            x = x + 0.1 * self._part(x)
        if self.way == "twice, after its layer's last":
            block: Any = self.blocks[3]
            side = nn.functional.linear(torch.ones_like(block.down.weight[0]), block.down.weight)
            loss = side.sum()

            def once_more(_gradient: torch.Tensor) -> None:
                loss.backward()

            x.register_hook(once_more)
        for index, block in enumerate(self.blocks):
            if self.way == "fails" and index == 2:
                x.register_hook(self._raise)
            x = block(x)
        if self.way == "twice, before its layer's last":
            x = x + 0.1 * checkpoint(self._part, x, use_reentrant=True)
        return self.head(x).float().pow(2).mean()

    def _part(self, x: torch.Tensor) -> torch.Tensor:
        block: Any = self.blocks[3]
        return nn.functional.linear(nn.functional.linear(x, block.down.weight.T), block.down.weight)

    @staticmethod
    def _raise(_gradient: torch.Tensor) -> None:
        raise UserError("backward")


def hooks_of(engine: Any) -> list[Any]:
    return engine.optimizer.collector._hooks


def end_of(engine: Any) -> list[torch.Tensor]:
    engine.optimizer.flush()
    engine.synchronize()
    states = [tensor.clone() for x in engine.optimizer.layer_states for tensor in x.state]
    return states + [p.detach().clone() for p in engine.module.parameters()]


def _no_single_hooks(_collector: GradientCollector) -> None:
    """Every parameter keeps a hook."""


def both_ways(monkeypatch: pytest.MonkeyPatch, run: Callable[[Any], None], **config: Any) -> None:
    """The same training, with one hook a layer and without: the same bits."""
    ends: list[list[torch.Tensor]] = []
    for marks in (True, False):
        with monkeypatch.context() as patch:
            if not marks:
                patch.setattr(GradientCollector, "_use_single_hooks", _no_single_hooks)
            with built(Shifting(), make_config(**config)) as engine:
                make_steps(engine, range(WARM))
                assert all(hooks.has_single_hook is marks for hooks in hooks_of(engine))
                run(engine)
                make_steps(engine, range(2))
                ends.append(end_of(engine))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


def test_hooks_that_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last of its parameters tells of a layer; every gradient counts as one that has come."""
    called: list[str] = []
    finish: Any = vars(GradientCollector)["_finish"]

    def counted(collector: Any, layer: LayerGradient) -> None:
        called.append(layer.layout.name)
        finish(collector, layer)

    monkeypatch.setattr(GradientCollector, "_finish", counted)
    with built(Shifting(), make_config()) as engine:
        make_steps(engine, range(WARM))
        handles = [len(hooks._handles) for hooks in hooks_of(engine)]
        assert handles == [1] * len(handles)
        called.clear()
        before = engine.optimizer.collector.num_firings
        backward(engine, 9)
        assert all(state.update.sent for state in engine.optimizer.layer_states)  # all were early
        assert len(called) == len(handles)
        assert engine.optimizer.collector.num_firings - before == len(list(engine.parameters()))
        assert all(p.grad is None for p in engine.module.parameters())
        engine.step()


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
@pytest.mark.parametrize("way", ["plain", "another order", "fails"])
def test_the_same_bits(monkeypatch: pytest.MonkeyPatch, way: str, gpu_fraction: float) -> None:
    def run(engine: Any) -> None:
        for number in range(3):
            engine.module.way = way
            if way == "fails":
                with pytest.raises(UserError):
                    backward(engine, number)
                with pytest.raises(AbortedBackwardError):
                    engine.step()
                engine.module.way = "plain"
            backward(engine, number)
            engine.step()
            engine.module.way = "plain"

    both_ways(monkeypatch, run, gpu_fraction=gpu_fraction)


def test_micro_batches_and_frozen_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(engine: Any) -> None:
        for number in range(6):
            engine.module.blocks[1].up.weight.requires_grad_(number not in (2, 3))
            engine.module.way = "another order" if number == 4 else "plain"
            backward(engine, number)
            engine.step()

    both_ways(monkeypatch, run, accumulation=2, clipping=0.1)


@pytest.mark.parametrize("whole", [True, False])
def test_a_backward_past_the_engine(monkeypatch: pytest.MonkeyPatch, whole: bool) -> None:
    """Of the whole model, or of parameters that have no hook any more."""

    def run(engine: Any) -> None:
        model = engine.module
        for number in range(3):
            loss = loss_of(model(**inputs(number)))
            if whole:
                loss.backward()
            else:
                some = [model.blocks[2].down.weight, model.blocks[2].down.bias, model.head.weight]
                torch.autograd.backward(loss, inputs=some)
            engine.step()

    both_ways(monkeypatch, run)


def test_a_parameter_that_comes_twice_before_its_layers_last_counts_twice() -> None:
    model = Shifting()
    with followed(model) as run:
        plain: Any = run.twin.plain
        for number in range(WARM + 2):
            model.way = plain.way = "twice, before its layer's last" if number == WARM else "plain"
            run.good_step(number)
        assert all(hooks.has_single_hook for hooks in hooks_of(run.engine))


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
def test_a_gradient_after_its_layers_last_takes_the_update_back(gpu_fraction: float) -> None:
    model = Shifting()
    with followed(model, gpu_fraction=gpu_fraction) as run:
        plain: Any = run.twin.plain
        for number in range(WARM + 4):
            late = number in (WARM, WARM + 1)
            model.way = plain.way = "twice, after its layer's last" if late else "plain"
            run.good_step(number)
        assert all(p.grad is None for p in model.parameters())


def test_another_accumulation_dtype_keeps_a_hook_on_each() -> None:
    """Autograd would add up in the weights' dtype."""
    config = make_config(data_types={"grad_accum_dtype": "fp32"})
    with built(Shifting(), config) as engine:
        make_steps(engine, range(WARM))
        assert not any(hooks.has_single_hook for hooks in hooks_of(engine))


def test_layer_by_layer_keeps_a_hook_on_each() -> None:
    with built(Shifting(), make_config()) as engine:
        make_steps(engine, range(WARM))
        step = engine.optimizer.passes.open_step
        with step.layer_by_layer():
            step.begin_backward(reduces=False, micro_batches=2)
        engine.optimizer.collector.begin()
        assert not any(hooks.has_single_hook for hooks in hooks_of(engine))
        engine.optimizer.passes.discard_gradients()
