"""Gradients taken over one by one, all at once, or joined: it changes no result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.engines import built, device, make_config
from support.gradient_ways import taking_gradients
from support.models import HIDDEN, make_model
from support.precision import fp16_on_a_cpu
from torch import nn
from training import backward, inputs

from hytrain.kernels.gradient_copy import GradientCopier
from hytrain.optimizer import layer_gradient
from hytrain.optimizer.layer_gradient import LayerGradient

pytestmark = pytest.mark.timeout(60)

# An engine is on the GPU where there is one: these are among its tests, too.
ON_BOTH = pytest.mark.parametrize("where", ["", pytest.param("gpu", marks=pytest.mark.gpu)])
STEPS = 6
CONFIGS: dict[str, dict[str, Any]] = {
    "clipped": {"clipping": 0.1},
    "k half": {"clipping": 0.1, "gpu_fraction": 0.5},
    "accumulated": {"clipping": 0.1, "accumulation": 2},
    "fp32 sums": {"clipping": 0.1, "data_types": {"grad_accum_dtype": "fp32"}},
    "not clipped": {"clipping": 0.0},
    "committed at once": {"clipping": 0.0, "checks": False},
    "fp16": {"bf16": False, "fp16": {"enabled": True, "initial_scale_power": 4}, "clipping": 0.1},
}


def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gradients that each call took over."""
    found: list[int] = []
    for name in ("copy_together", "add_together"):
        real = getattr(layer_gradient, name)

        def counted(destinations: Any, sources: Any, real: Any = real) -> None:
            found.append(len(sources))
            real(destinations, sources)

        monkeypatch.setattr(layer_gradient, name, counted)
    return found


def test_a_layer_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = launches(monkeypatch)
    model = make_model("mlp")
    with built(model, make_config(gpu_fraction=1.0)) as engine:
        engine(**inputs(0))  # the first forward; nothing is taken over
        backward(engine, 0)
        engine.step()
        sizes = [len(state.layout.slots) for state in engine.optimizer.layer_states]
        assert max(sizes) > 1
        assert sorted(taken) == sorted(size for size in sizes if size > 1)


SIZES = {"even": (48, 16), "odd": (37, 3)}
"""Of some parameters: multiples of 16, as one launch for all of a layer needs, or not."""


class Many(nn.Module):
    """Many small parameters, a strided gradient, a scale that some steps leave out."""

    def __init__(self, sizes: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(ManyBlock(*SIZES[sizes]) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = inputs.to(self.blocks[0].turned)
        for block in self.blocks:
            x = block(x)
        return x.float().pow(2).mean()


class ManyBlock(nn.Module):
    """17 parameters: more than one launch takes."""

    def __init__(self, inner: int, scaled: int) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, inner)
        self.down = nn.Linear(inner, HIDDEN)
        self.turned = nn.Parameter(0.1 * torch.randn(HIDDEN, HIDDEN))
        self.scales = nn.ParameterList(torch.ones(HIDDEN) for _ in range(11))
        self.left_out = nn.Parameter(torch.ones(scaled))
        self.uses_all = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x))) + x @ self.turned.t()
        for scale in self.scales:
            x = x * scale
        return x * self.left_out.mean() if self.uses_all else x


class End(NamedTuple):
    """What a training leaves; layers copied at once, and those of them in one launch for all."""

    norms: list[float]
    tensors: list[torch.Tensor]
    calls: int
    launched: int


def train(
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    config: dict[str, Any],
    before: Callable[[Any, int], None] | None = None,
    sizes: str = "odd",
) -> End:
    """Some steps in which gradients are taken over in this way."""
    calls: list[int] = []
    launched: list[bool] = []
    triton_copy_all = GradientCopier.triton_copy_all
    copy_all = GradientCopier.copy_all

    def counted(copier: GradientCopier, some: Any, layer: torch.Tensor) -> None:
        calls.append(len(some))
        copy_all(copier, some, layer)

    def noted(copier: GradientCopier, some: Any, layer: torch.Tensor) -> bool:
        launched.append(triton_copy_all(copier, some, layer))
        return launched[-1]

    with monkeypatch.context() as patch, taking_gradients(how), fp16_on_a_cpu():
        patch.setattr(GradientCopier, "copy_all", counted)
        patch.setattr(GradientCopier, "triton_copy_all", noted)
        checks = config.get("checks", True)
        loaded = make_config(**{key: value for key, value in config.items() if key != "checks"})
        loaded["bf16"]["check_grad_overflow"] = checks
        with built(Many(sizes), loaded) as engine:
            norms: list[float] = []
            for number in range(STEPS * config.get("accumulation", 1)):
                if before is not None:
                    before(engine, number)
                backward(engine, number)
                engine.step()
                # None waits from one micro-batch to the next: memory would hold it twice.
                assert not any(layer.waiting for layer in engine.optimizer.collector.layers)
                norms.append(float(engine.get_global_grad_norm() or 0.0))
            engine.optimizer.flush()
            engine.synchronize()
            states = [t.clone() for x in engine.optimizer.layer_states for t in x.state]
            weights = [p.detach().clone() for p in engine.module.parameters()]
            return End(norms, states + weights, len(calls), launched.count(True))


def assert_same(one: End, other: End) -> None:
    assert one.norms == other.norms
    assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))


@ON_BOTH
@pytest.mark.parametrize("case", CONFIGS)
@pytest.mark.parametrize("sizes", SIZES)
def test_the_same_bits(monkeypatch: pytest.MonkeyPatch, sizes: str, case: str, where: str) -> None:
    """Joined gradients' squares are added in another order: their norm is close."""
    each = train(monkeypatch, "one by one", CONFIGS[case], sizes=sizes)
    at_once = train(monkeypatch, "all at once", CONFIGS[case], sizes=sizes)
    joined = train(monkeypatch, "joined", CONFIGS[case], sizes=sizes)
    is_launched = device().type == "cuda" and sizes == "even"
    assert at_once.launched == (at_once.calls if is_launched else 0)
    assert each.calls == joined.calls == 0
    # Where updates are committed as gradients come, nobody waits for the norm.
    assert (at_once.calls > 0) is (case != "committed at once")
    assert_same(at_once, each)
    assert joined.norms == pytest.approx(each.norms, rel=1e-5)
    for one, other in zip(joined.tensors, each.tensors, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-5)


@ON_BOTH
def test_a_parameter_that_some_steps_leave_out(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The squares are not what was copied then, and are taken anew."""

    def leave_out(engine: Any, number: int) -> None:
        for block in engine.module.blocks:
            block.uses_all = number not in (2, 4)

    ends = [
        train(monkeypatch, how, CONFIGS["clipped"], leave_out)
        for how in ("one by one", "all at once")
    ]
    assert 0 < ends[1].calls < 4 * STEPS
    assert_same(ends[1], ends[0])


@ON_BOTH
def test_squares_are_those_of_what_was_copied(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The norm is made of them, without another read."""
    found: list[bool] = []
    squares: Any = vars(LayerGradient)["squares"].fget

    def seen(layer: LayerGradient) -> torch.Tensor | None:
        sums = squares(layer)
        found.append(sums is not None)
        if sums is not None:
            assert layer.unreduced_grad is not None
            expected = float(layer.unreduced_grad.double().pow(2).sum())
            assert float(sums.sum()) == pytest.approx(expected, rel=1e-9)
        return sums

    monkeypatch.setattr(LayerGradient, "squares", property(seen))
    train(monkeypatch, "all at once", CONFIGS["clipped"])
    assert len(found) >= 4 * STEPS
    assert all(found)
