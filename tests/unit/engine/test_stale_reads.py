"""Weights that the user's code reads, after a step or outside their module, are the newest."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.comparisons import assert_same_bits
from support.covering import everyday
from support.engines import built, device, environment, make_config
from support.models import Block, Mlp, loss_of, make_batch, make_model
from support.shadow import Shadow
from torch import nn
from torch.optim.swa_utils import AveragedModel
from training import FRACTIONS, backward, make_steps

from hytrain.errors import GradientOrderError

# -- weights that the user's code reads right after a step are the new ones --------------------

Weights = dict[str, torch.Tensor]
Read = Callable[[nn.Module], Weights]


def _each(function: Callable[[torch.Tensor], torch.Tensor]) -> Read:
    return lambda model: {n: function(p).detach() for n, p in model.named_parameters()}


def _lerp(model: nn.Module) -> Weights:
    """As timm's ModelEmaV3 and others: all parameters in one call."""
    names = [name for name, _ in model.named_parameters()]
    average = [torch.zeros_like(p) for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_lerp_(average, list(model.parameters()), 1.0)
    return dict(zip(names, average, strict=True))


def _averaged(model: nn.Module) -> Weights:
    average = AveragedModel(model, avg_fn=lambda _mean, new, _count: new)
    average.update_parameters(model)
    average.update_parameters(model)
    return {n.removeprefix("module."): p.data for n, p in average.named_parameters()}


def _copied(model: nn.Module) -> Weights:
    twin = copy.deepcopy(model)
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    return {n: p.detach() for n, p in twin.named_parameters()}


def _pickled(model: nn.Module) -> Weights:
    file = io.BytesIO()
    torch.save({n: p for n, p in model.named_parameters()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert all(type(p) is nn.Parameter for p in loaded.values())
    return {n: p.detach() for n, p in loaded.items()}


def _indexed(model: nn.Module) -> Weights:
    return {n: torch.stack(list(p)).detach() for n, p in model.named_parameters()}


def _vector(model: nn.Module) -> Weights:
    flat, found = nn.utils.parameters_to_vector(model.parameters()).detach(), Weights()
    for name, parameter in model.named_parameters():
        found[name], flat = (
            flat[: parameter.numel()].view(parameter.shape),
            flat[parameter.numel() :],
        )
    return found


READS: dict[str, Read] = {
    "data": _each(lambda p: p.data.clone()),
    "detach": _each(lambda p: p.detach().clone()),
    "arithmetic": _each(lambda p: p * 1),
    "numpy": _each(lambda p: torch.from_numpy(p.detach().float().cpu().numpy().copy()).to(p.dtype)),
    "parameter": _each(lambda p: nn.Parameter(p).data.clone()),
    "copy into": _each(lambda p: torch.empty_like(p).copy_(p)),
    "list": _each(lambda p: torch.tensor(p.tolist()).to(p.dtype)),
    "address": lambda model: {
        name: (p.data_ptr(), torch.ops.aten.clone(p))[1].detach()
        for name, p in model.named_parameters()
    },
    "state_dict": lambda model: {n: t.clone() for n, t in model.state_dict().items()},
    "foreach": _lerp,
    "average": _averaged,
    "deepcopy": _copied,
    "pickle": _pickled,
    "iteration": _indexed,
    "vector": _vector,
}


def _assert_current(shadow: Shadow, found: Weights) -> None:
    """They are the serial loop's, as they are read."""
    for state, shard in zip(shadow.states, shadow.shards, strict=True):
        for slot in state.layout.slots:
            expected = shard.p[slot.offset : slot.offset + slot.numel]
            weights = found[slot.name].flatten()
            assert_same_bits(slot.name, weights, expected.to(weights.dtype))


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
@pytest.mark.parametrize("read", READS)
def test_after_a_step(read: str, gpu_fraction: float) -> None:
    # Every step is clipped: all layers are updated again after the decision.
    config = make_config(gpu_fraction=gpu_fraction, clipping=1e-2, stage=1 + len(read) % 2)
    with environment("HYTRAIN_DELAYS", "3:3000"), built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        for number in range(4):
            backward(engine, number)
            shadow.step()
            found = READS[read](engine.module)
            assert all(type(p) is nn.Parameter for p in engine.module.parameters())
            _assert_current(shadow, found)
        shadow.check()


def test_one_weight_waits_for_its_layer_alone() -> None:
    config = make_config(clipping=1e-2)
    with environment("HYTRAIN_DELAYS", "3:3000"), built(make_model("mlp"), config) as engine:
        states = engine.optimizer.layer_states
        for number in range(3):
            backward(engine, number)
            engine.step()
            assert not any(state.update.waited for state in states)
            engine.module.get_parameter("blocks.2.up.bias").detach()
            assert [state.update.waited for state in states] == [index == 3 for index in range(6)]


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_loops_that_read_no_weights_wait_for_nothing(gpu_fraction: float) -> None:
    config, where = make_config(gpu_fraction=gpu_fraction, clipping=1e-2), device().type
    with environment("HYTRAIN_DELAYS", "3:3000"), built(make_model("mlp"), config) as engine:
        for number in range(3):
            backward(engine, number)
            engine.step()
            engine.module.zero_grad()
            engine.zero_grad()
            for name, p in engine.module.named_parameters():
                assert p.requires_grad
                assert p.grad is None
                assert (p.dtype, p.device.type, p.dim()) == (torch.bfloat16, where, len(p.shape))
                assert p.numel() == len(p) * (p.shape[1] if p.dim() == 2 else 1)
                assert p.is_floating_point()
                assert isinstance(p, nn.Parameter)
                assert hash(p) == id(p)
                assert torch.empty_like(p).shape == p.size()
                assert p.requires_grad_(True) is p
                assert name
            assert not any(state.update.waited for state in engine.optimizer.layer_states)


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_between_backward_and_step(gpu_fraction: float) -> None:
    """What is read is as of the last step, and the step is made as if nobody had read."""
    config = make_config(gpu_fraction=gpu_fraction, clipping=1e-2)
    with environment("HYTRAIN_DELAYS", "3:1000"), built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        for number in range(4):
            backward(engine, number)
            found = {n: p.data.clone() for n, p in engine.module.named_parameters()}
            _assert_current(shadow, found)
            shadow.step()
        shadow.check()


@pytest.mark.parametrize("is_direct", [False, True])
def test_in_a_backward_that_updates_the_layer(is_direct: bool) -> None:
    """A hook that runs after a layer's last gradient reads what is being overwritten.

    The update is taken back, where it can be.
    """
    model = make_model("mlp")
    with built(model, make_config(direct=is_direct)) as engine:
        seen: list[float] = []
        model.embed.register_full_backward_hook(
            lambda *_: seen.append(float(model.embed.weight[0, 0]))
        )
        make_steps(engine, range(2))
        assert len(seen) == 2  # its own gradients come after that
        armed = [True]

        def read_above(*_arguments: Any) -> None:
            if armed[0]:
                read.append(model.head.weight.detach().clone())

        read: list[torch.Tensor] = []
        model.embed.register_full_backward_hook(read_above)
        if is_direct:
            with pytest.raises(GradientOrderError, match=r"the update of layer 'after blocks\.3'"):
                backward(engine, 3)
            return
        engine.synchronize()
        before = model.head.weight.detach().clone()
        backward(engine, 3)
        assert_same_bits("the head's weight", read[0], before)
        armed[0] = False
        engine.step()
        backward(engine, 4)
        engine.step()


class LeftOut(Mlp):
    """Reads a block's weight in its end; the block itself may be left out."""

    left_out = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for index, block in enumerate(self.blocks):
            if index != 2 or not self.left_out:
                x = block(x)
        weight = self.get_parameter("blocks.2.up.weight")
        return self.head(nn.functional.linear(x, weight)[:, :32]).float().pow(2).mean()


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_a_block_that_is_left_out_and_read(gpu_fraction: float) -> None:
    """It was used in the last forward, so that nothing but the read itself can wait for it."""
    ends: list[Any] = []
    for overlap in (False, True):
        torch.manual_seed(0)
        config = make_config(
            gpu_fraction=gpu_fraction, clipping=1e-2, offload={"overlap_forward": overlap}
        )
        with environment("HYTRAIN_DELAYS", "3:3000"), built(LeftOut(), config) as engine:
            losses: list[float] = []
            for number in range(6):
                engine.module.left_out = number % 2 == 1
                loss = loss_of(engine(**make_batch("mlp", number)))
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        ends.append(losses)
    assert ends[0] == ends[1]


def test_nothing_is_left_on_the_parameters() -> None:
    model = make_model("mlp")
    with built(model, make_config()) as engine:
        backward(engine, 0)
        engine.step()
        assert any(type(p) is not nn.Parameter for p in model.parameters())
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("gpu_fraction", FRACTIONS)
def test_the_model_keeps_its_weights(gpu_fraction: float) -> None:
    """After destroy(), with no call before it, they are those of the last step."""
    model = make_model("mlp")
    config = make_config(gpu_fraction=gpu_fraction, clipping=1e-2)
    with environment("HYTRAIN_DELAYS", "3:3000"), built(model, config) as engine:
        shadow = Shadow(engine)
        make_steps(shadow, range(3))
    _assert_current(shadow, {name: p.detach() for name, p in model.named_parameters()})


# -- weights that are read where no module's hook tells of it ----------------------------------

WIDTH, VOCABULARY, STEPS = 32, 500, 5

ReadOutside = Callable[[torch.Tensor, nn.Linear], torch.Tensor]


def _by_function(ids: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    return F.embedding(ids, head.weight)


def _by_index(ids: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    return head.weight[ids]


def _transposed(ids: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    return F.one_hot(ids, VOCABULARY).float() @ head.weight.T.T


def _unpacked(ids: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    return torch.stack([head.weight], dim=0)[0][ids]


class ReadEarly(nn.Module):
    """Reads its head's weight at the beginning, long before the head itself is called."""

    def __init__(self, read: ReadOutside) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.read = read
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(6))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.read(ids, self.head) * 10
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _losses(read: ReadOutside, *, overlap: bool, mode: str) -> list[float]:
    config = make_config(
        bf16=False,
        clipping=1e-3,  # acts in every step: every layer is updated after the backward
        offload={"overlap_forward": overlap, "cpu_threads": 1},
        hytrain={"accumulation": mode},
    )
    losses: list[float] = []
    with built(ReadEarly(read), config) as engine:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(VOCABULARY, (2, 6), generator=generator)
            if mode == "layer_major":
                losses.append(float(engine.train_batch(iter([{"ids": ids}]), len)))
                continue
            loss = engine(ids)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


@pytest.mark.timeout(120)
@everyday(
    {
        "read": (_by_function, _by_index, _transposed, _unpacked),
        "mode": ("micro_batch_major", "layer_major"),
    },
    pairs=False,
)
def test_a_weight_that_is_read_before_its_module_is_called(read: ReadOutside, mode: str) -> None:
    expected = _losses(read, overlap=False, mode=mode)
    with environment("HYTRAIN_DELAYS", "3:3000"):
        assert _losses(read, overlap=True, mode=mode) == expected


@pytest.mark.timeout(120)
def test_what_is_compiled_is_compiled_once() -> None:
    """Watching the first forward leaves no trace in compiled functions."""
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> torch.fx.GraphModule:
        compiled.append(1)
        return graph

    torch._dynamo.reset()
    model = Mlp()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True)
    with built(model, make_config(bf16=False)) as engine:
        for step in range(4):
            engine.backward(engine(**make_batch("mlp", step)))
            engine.step()
    assert sum(compiled) == 1
