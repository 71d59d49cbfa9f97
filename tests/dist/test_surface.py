"""What libraries and scripts use of DeepSpeed's surface, most of it in ZeRO-3, on 2 ranks."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_grad
from harness import on_ranks
from rank_shadow import config_for
from support.comparisons import assert_close_states
from support.engines import built, from_all_ranks
from support.models import Mlp, make_batch, make_model
from torch import nn

from hytrain.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.timeout(240)

_LR = 1e-2


def _config(fractions: tuple[float, ...] = (0.7, 0.3), **more: Any) -> dict[str, Any]:
    return config_for(fractions, stage=3, gpu_fraction=0.5, bf16=False, **more)


def _is_there(parameter: nn.Parameter) -> bool:
    """Whether the weights are numbers; what is away is NaN."""
    with torch._C.DisableTorchFunctionSubclass():  # a look at them is no read
        return bool(torch.isfinite(parameter.data).all())


def _check_status(model: nn.Module) -> set[ZeroParamStatus]:
    for name, parameter in model.named_parameters():
        if parameter.ds_status is ZeroParamStatus.AVAILABLE:
            assert _is_there(parameter), name
        elif parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:
            assert not _is_there(parameter), name
    return {parameter.ds_status for parameter in model.parameters()}


@pytest.mark.parametrize("threshold", [0, 100])
@on_ranks(2)
def test_status_is_true(threshold: int) -> None:
    """``ds_status`` in forward, backward and between steps says what the memory holds."""
    config = _config()
    config["zero_optimization"]["stage3_param_persistence_threshold"] = threshold
    seen: list[set[ZeroParamStatus]] = []
    with built(make_model("mlp"), config) as engine:
        model = engine.module

        def look(module: nn.Module, *_arguments: Any) -> None:
            seen.append(_check_status(model))
            for parameter in module.parameters():
                assert parameter.ds_status is ZeroParamStatus.AVAILABLE

        for block in model.blocks:
            block.register_forward_pre_hook(look)
            # Runs before the engine's own, where the block may be on its way still.
            block.register_full_backward_pre_hook(lambda *_: seen.append(_check_status(model)))
        for number in range(3):
            _check_status(model)
            engine.backward(engine(**make_batch("mlp", number)))
            _check_status(model)
            engine.step()
        assert all(len(each) > 1 for each in seen), "some are there and others are not"
        for parameter in model.parameters():
            assert parameter.ds_persist is (parameter.ds_status is ZeroParamStatus.AVAILABLE)
    for parameter in model.parameters():
        assert not [name for name in vars(parameter) if name.startswith("ds_")]


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
def test_shards_make_the_whole(frozen: bool) -> None:
    """``ds_tensor`` of all ranks, one after another, are the parameter."""
    model = make_model("mlp")
    if frozen:
        model.blocks[1].requires_grad_(False)
    with built(model, _config()) as engine:
        engine.backward(engine(**make_batch("mlp", 0)))
        engine.step()
        engine.synchronize()
        for name, parameter in model.named_parameters():
            pieces = from_all_ranks(parameter.ds_tensor.tolist())
            with deepspeed.zero.GatheredParameters(parameter):
                whole = parameter.detach().reshape(-1).tolist()
            assert list(itertools.chain(*pieces)) == whole, name
            assert (
                parameter.ds_tensor.ds_numel
                == parameter.partition_numel()
                == len(pieces[dist.get_rank()])
            )
            assert parameter.ds_shape == parameter.shape
            assert parameter.ds_numel == len(whole)


@on_ranks(2)
def test_contexts_within_contexts() -> None:
    """What an outer context has gathered stays through an inner one, and through a forward."""
    with built(make_model("mlp"), _config()) as engine:
        block = engine.module.blocks[0]
        engine.backward(engine(**make_batch("mlp", 0)))
        engine.step()
        for outer in (
            deepspeed.zero.GatheredParameters(block.up.weight),
            engine.gathered_parameters(),
        ):
            with outer:
                before = block.up.weight.detach().clone()
                with deepspeed.zero.GatheredParameters(block.up.bias):
                    assert torch.isfinite(block.up.bias).all()
                assert torch.equal(block.up.weight, before)
                with torch.no_grad():
                    engine(**make_batch("mlp", 1))
                assert torch.equal(block.up.weight, before)
            _check_status(engine.module)
            assert block.up.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
        assert not engine.optimizer.weights.gatherer.live


@contextlib.contextmanager
def _unwrapped(engine: Any) -> Iterator[nn.Module]:
    """What libraries do for generation: all gathered, and the hooks taken off."""
    with deepspeed.zero.GatheredParameters(list(engine.parameters())):
        offload = engine.optimizer.parameter_offload
        for parameter in offload.module.parameters():
            parameter.ds_active_sub_modules.clear()
        assert not list(offload.module.ds_external_parameters())
        for hook in [*offload.forward_hooks, *offload.backward_hooks]:
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        yield engine.module
        offload._register_deepspeed_module(offload.module)


@on_ranks(2)
def test_hooks_taken_off() -> None:
    """Then ranks call the model differently often; training goes on as if nothing had been."""
    losses: list[list[float]] = []
    for generates in (False, True):
        found = []
        with built(make_model("mlp"), _config()) as engine:
            for number in range(3):
                loss = engine(**make_batch("mlp", number))
                found.append(loss.item())
                engine.backward(loss)
                engine.step()
                if generates:
                    with _unwrapped(engine) as model, torch.no_grad():
                        for _ in range(1 + 2 * dist.get_rank()):
                            assert torch.isfinite(model(**make_batch("mlp", 0)))
            assert engine.optimizer.parameter_offload.forward_hooks
            for hook in engine.optimizer.parameter_offload.forward_hooks:
                hook.remove()
            with pytest.raises(UnsupportedError, match="GatheredParameters"), torch.no_grad():
                engine(**make_batch("mlp", 0))
        losses.append(found)
    assert losses[0] == losses[1]


class _OwnProduct(torch.autograd.Function):
    """x @ w.T that asks the weight in its backward whether it is there, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x.mm(weight[:].t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        with _gathered(weight):
            return grads[0].mm(weight), grads[0].t().mm(x)


def _gathered(weight: Any) -> Any:
    if getattr(weight, "ds_status", None) is None:
        assert type(weight) is nn.Parameter, "the parameter itself, with its attributes"
        return contextlib.nullcontext()  # plain
    if weight.ds_status is ZeroParamStatus.AVAILABLE:
        return contextlib.nullcontext()
    return deepspeed.zero.GatheredParameters([weight])


class FusedHead(Mlp):
    """Its head's weight is used past the head, in a context that gathers it if need be."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for block in self.blocks:
            x = block(x)
        with _gathered(self.head.weight):
            return _OwnProduct.apply(x, self.head.weight).pow(2).mean()


@on_ranks(2)
def test_gathered_in_a_forward() -> None:
    """``GatheredParameters`` in a forward is a use: losses are those of the serial model."""
    torch.manual_seed(0)
    plain = FusedHead()
    torch.manual_seed(0)
    model = FusedHead()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=_LR, weight_decay=0.1)
    with built(model, _config((0.5, 0.5), clipping=0.0)) as engine:
        for number in range(4):
            batch = make_batch("mlp", number)
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            expected = plain(**batch)
            optimizer.zero_grad()
            expected.backward()
            for parameter in plain.parameters():
                if parameter.grad is None:  # the head's bias is in no graph: zeros, as ZeRO has it
                    parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_compiled_as_eager() -> None:
    """``torch.compile`` of a model whose layers are gathered for their uses."""
    losses: list[list[float]] = []
    for is_compiled in (False, True):
        model = torch.compile(make_model("mlp"), backend="aot_eager", disable=not is_compiled)
        found: list[float] = []
        with built(model, _config()) as engine:
            for number in range(4):
                loss = engine(**make_batch("mlp", number))
                found.append(loss.item())
                engine.backward(loss)
                engine.step()
        losses.append(found)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
@on_ranks(2)
def test_coalesced_is_the_sum(stage: int) -> None:
    """Backward passes in a block, and the same without it: one step, bit for bit the same sums."""
    states: list[dict[str, dict[str, torch.Tensor]]] = []
    for is_coalesced in (False, True):
        config = config_for((0.5, 0.5), stage=stage, gpu_fraction=0.5, bf16=False)
        with built(make_model("mlp"), config) as engine:
            for step in range(3):
                block = engine.coalesce_grad_reduction() if is_coalesced else None
                with block or contextlib.nullcontext():
                    for number in range(2):
                        engine.backward(engine(**make_batch("mlp", 4 * step + 2 * number)))
                    if is_coalesced:
                        with pytest.raises(ConfigError, match="behind the block"):
                            engine.step()
                        with (
                            pytest.raises(ConfigError, match="leave one of them"),
                            engine.coalesce_grad_reduction(),
                        ):
                            pass
                gradient = safe_get_full_grad(engine.module.head.weight)
                assert gradient.any()
                engine.step()
                assert engine.global_steps == step + 1
            states.append(engine.fp32_state_dict())
    assert_close_states(*states, rtol=1e-5, atol=1e-7)


class Branching(nn.Module):
    """Each rank takes a branch of its own: without a leaf module each branch is a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(8, 8)
        self.branches = Branches()
        self.head = nn.Linear(8, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.branches(self.embed(inputs))).pow(2).mean()


class Branches(nn.Module):
    """What is given to ``set_z3_leaf_modules``."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.turn = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn += 1
        return torch.tanh(self.experts[(dist.get_rank() + self.turn) % 2](x))


@on_ranks(2)
def test_leaf_modules() -> None:
    """Ranks take different branches of a leaf module: the results are those of stage 1."""
    found: list[dict[str, Any]] = []
    for stage in (1, 3):
        model = Branching()
        deepspeed.utils.set_z3_leaf_modules(model, [Branches])
        config = config_for((0.7, 0.3), stage=stage, gpu_fraction=0.5, bf16=False)
        with built(model, config) as engine:
            assert "branches" in [layer.name for layer in engine.optimizer.weights.layers]
            for number in range(4):
                generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
                engine.backward(engine(torch.randn(2, 8, generator=generator)))
                engine.step()
            found.append(engine.fp32_state_dict())
    assert_close_states(*found, rtol=1e-5, atol=1e-7)
