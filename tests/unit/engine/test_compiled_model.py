"""torch.compile in each of its forms: the same results as without, in every ZeRO stage."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.covering import everyday
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

# -- a backend whose graphs return memory that is reused, as CUDA graphs' is --------------------


class ReusedMemory:
    """The backend, and what its graphs have returned in this pass."""

    def __init__(self) -> None:
        self._returned: list[torch.Tensor] = []
        self._in_backward = False
        self.overwritten = 0
        """Tensors that have been overwritten so far."""
        self.backend: Callable[..., Any] = aot_autograd(
            fw_compiler=self._compiler(is_backward=False),
            bw_compiler=self._compiler(is_backward=True),
        )

    def _compiler(self, *, is_backward: bool) -> Callable[..., Any]:
        def compiled(module: torch.fx.GraphModule, _inputs: Sequence[Any]) -> Any:
            def run(*inputs: Any) -> Any:
                if self._in_backward and not is_backward:
                    self._overwrite()
                self._in_backward = is_backward
                outputs = module(*inputs)
                given = {_memory(value) for value in inputs if isinstance(value, torch.Tensor)}
                # Views: autograd copies a gradient that somebody else refers to.
                self._returned += [
                    value.detach()
                    for value in outputs
                    if isinstance(value, torch.Tensor) and _memory(value) not in given
                ]
                return outputs

            return make_boxed_func(run)

        return compiled

    def _overwrite(self) -> None:
        for tensor in self._returned:
            if tensor.is_floating_point():
                # Unnoticed by autograd, as a replay is.
                with torch.autograd._unsafe_preserve_version_counter(tensor), torch.no_grad():
                    tensor.fill_(float("nan"))
        self.overwritten += len(self._returned)
        self._returned.clear()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# -- torch.compile in each of its forms --------------------------------------------------------

States = dict[str, dict[str, torch.Tensor]]


def _blocks(model: Any) -> list[nn.Module]:
    return list(model.model.layers if hasattr(model, "model") else model.blocks)


def _train(
    kind: str,
    form: str | None,
    backend: Any,
    *,
    stage: int = 2,
    steps: int = 3,
    accumulation: int = 2,
    fraction: float = 0.5,
) -> tuple[list[float], States]:
    """Losses of each micro-batch and one of an evaluation; master weights and moments."""
    torch._dynamo.reset()
    model = make_model(kind)
    compiled = model
    if form == "wrapped":
        compiled = torch.compile(model, backend=backend)
    elif form == "in place":
        model.compile(backend=backend)
    elif form == "layers":
        for block in _blocks(model):
            block.compile(backend=backend)
    config = make_config(stage=stage, bf16=False, accumulation=accumulation, gpu_fraction=fraction)
    found: list[float] = []
    with built(compiled, config) as engine:
        if form == "engine":
            engine.compile(backend=backend)
        for number in range(steps * accumulation):
            loss = loss_of(engine(**make_batch(kind, number)))
            engine.backward(loss)
            engine.step()
            found.append(loss.item())
        with torch.no_grad():
            found.append(loss_of(engine(**make_batch(kind, 0))).item())
        states = engine.fp32_state_dict()
    torch._dynamo.reset()
    return found, {name.removeprefix("_orig_mod."): state for name, state in states.items()}


def _assert_same(found: tuple[list[float], States], expected: tuple[list[float], States]) -> None:
    assert found[0] == expected[0]
    assert_same_states(found[1], expected[1])


@pytest.mark.parametrize(
    ("stage", "kind", "form"),
    [
        (1, "mlp", "wrapped"),
        (2, "borrowing", "wrapped"),
        (3, "mlp", "wrapped"),
        pytest.param(2, "llama", "layers", marks=pytest.mark.parity_full),
        (3, "mlp", "layers"),
        (2, "mlp", "in place"),
        pytest.param(2, "llama", "engine", marks=pytest.mark.parity_full),
        (3, "borrowing", "engine"),
    ],
)
def test_compiled_is_as_eager(stage: int, kind: str, form: str) -> None:
    """The toy models read a weight outside of its module: dynamo sees that, too."""
    expected = _train(kind, None, None, stage=stage)
    _assert_same(_train(kind, form, "aot_eager", stage=stage), expected)


@everyday({"kind": ("mlp", "partly_used"), "form": ("layers", "wrapped")}, pairs=False)
def test_memory_of_graphs_is_not_kept(kind: str, form: str) -> None:
    """CUDA graphs overwrite what they returned; gradients must have been taken over by then."""
    memory = ReusedMemory()
    expected = _train(kind, None, None)
    _assert_same(_train(kind, form, memory.backend), expected)
    assert memory.overwritten > 0


def test_layers_share_one_graph() -> None:
    """What hytrain does to modules and parameters makes no layer different from the next one."""
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Any:
        graphs.append(1)
        return module.forward

    _train("mlp", "layers", backend)
    # One with gradients, one in the evaluation.
    assert len(graphs) == 2, graphs


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
def test_placements_have_the_same_bits_under_inductor() -> None:
    """Its kernels round differently from torch's own, but gradients are the same at every k."""
    expected = _train("mlp", None, None, steps=2)
    found = _train("mlp", "layers", "inductor", steps=2)
    assert found[0] == pytest.approx(expected[0], rel=1e-3)
    _assert_same(_train("mlp", "layers", "inductor", steps=2, fraction=1.0), found)
