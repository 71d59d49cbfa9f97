"""Gradients taken over at once, and room for those that wait for the CPU's update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from support.covering import everyday
from support.engines import built, device, environment, make_config
from support.gradient_ways import taking_gradients
from support.models import HIDDEN, make_batch, make_model
from support.precision import fp16_on_a_cpu
from support.shadow import Shadow
from torch import nn
from training import backward, inputs, train_and_compare

from hytrain.kernels.gradient_copy import GradientCopier
from hytrain.model.layer_state import LayerState
from hytrain.offload import gradient_room
from hytrain.offload.cpu_updater import CpuUpdater
from hytrain.optimizer import layer_gradient
from hytrain.optimizer.layer_gradient import LayerGradient
from hytrain.placement.manager import PlacementManager

# -- gradients taken over one by one, all at once, or joined -----------------------------------

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
@everyday({"case": list(CONFIGS), "sizes": list(SIZES)}, pairs=False)
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


# -- gradients that wait on the device for the CPU's update leave backward its memory ----------


class Device:
    """Tells the engines of gradients alone, as if nothing else were on the device.

    Attributes:
        limit: bytes that they may take before the next layer's backward.
        seen: how many have been taken, after each gradient that was sent.
        pipeline: of the last engine.
        activations: bytes that else are taken.
        growth: of these, what a layer's forward takes; None: it is not known.
    """

    growth: int | None = None

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.limit = limit
        self.seen: list[int] = []
        self.pipeline: Any = None
        self.activations = 0
        gradient = PlacementManager.gradient

        def handed_over(manager: PlacementManager, index: int) -> None:
            gradient(manager, index)
            self.seen.append(self.allocated())

        monkeypatch.setattr(PlacementManager, "gradient", handed_over)
        monkeypatch.setattr(PlacementManager, "_watch_room", lambda manager: self._watch(manager))
        monkeypatch.setattr(gradient_room, "allocated_bytes", lambda _: (self.allocated(), 0))

    def allocated(self) -> int:
        gradients = [layer.update.gradient for layer in self.pipeline.layers]
        held = sum(gradient.nbytes for gradient in gradients if gradient is not None)
        return held + self.activations

    def _watch(self, manager: PlacementManager) -> None:
        self.pipeline = manager._pipeline
        room = self.pipeline.room
        room.begin_step(self.limit + room._next_layer, 0, 0, self.growth)


def layer_bytes(kind: str) -> list[int]:
    """Of the gradients of a model's layers, in fp32."""
    with built(make_model(kind), make_config(bf16=False)) as engine:
        return [4 * layer.shard_size for layer in engine.optimizer.pipeline.layers]


@everyday({"gpu_fraction": (0.0, 0.5), "is_late": (False, True), "delays": ("", "4:3000")})
def test_no_more_gradients_wait_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, gpu_fraction: float, is_late: bool, delays: str
) -> None:
    """...and the numbers are those of the serial loop."""
    sizes = layer_bytes("llama")
    on_device = sum(sizes[: round(gpu_fraction * len(sizes))])
    device = Device(monkeypatch, limit=on_device + max(sizes))
    if is_late:
        fetch_when_waited_for(monkeypatch)
    with environment("HYTRAIN_DELAYS", delays):
        train_llama(gpu_fraction)
    assert max(device.seen) <= device.limit
    assert not is_late or device.pipeline.room.num_waits


@everyday({"gpu_fraction": (0.0, 0.5), "is_known": (False, True), "clips": (False, True)})
def test_a_forward_waits_for_gradients_whose_memory_it_needs(
    monkeypatch: pytest.MonkeyPatch, gpu_fraction: float, is_known: bool, clips: bool
) -> None:
    """The worker is far behind, and activations take more than in the last backward, which has left
    the device full of gradients."""
    model, sizes = make_model("llama"), layer_bytes("llama")
    blocks = model.model.layers
    limit = sum(sizes) - 1  # not all gradients have room, or they would not be looked at
    each = limit // len(blocks)
    device, taken = Device(monkeypatch, limit), []
    is_large = False

    def enter(*_: Any) -> None:
        device.activations += each * is_large
        if device.pipeline is not None:
            taken.append(device.allocated())

    config = make_config(
        bf16=False, gpu_fraction=gpu_fraction, clipping=0.5 if clips else 0.0, checks=clips
    )
    with environment("HYTRAIN_DELAYS", "4:4000"), built(model, config) as engine:
        if is_known:
            device.growth = each + engine.optimizer.pipeline.room._next_layer
        for block in blocks:
            block.register_forward_pre_hook(enter)  # behind the engine's, which waits
        shadow = Shadow(engine)
        for number in range(4):
            is_large = number % 2 == 1
            loss = engine(**make_batch("llama", number)).loss
            device.activations = 0
            engine.backward(loss)
            shadow.step()
        shadow.check()
    assert max(taken) <= limit


def fetch_when_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker seems to have fetched no gradient before somebody waits for it."""
    fetched: set[int] = set()
    send, wait = CpuUpdater.send, CpuUpdater.wait_fetched

    def sent(updater: CpuUpdater, layer: LayerState, *arguments: Any, **keywords: Any) -> None:
        fetched.discard(layer.index)
        send(updater, layer, *arguments, **keywords)

    def waited(updater: CpuUpdater) -> None:
        wait(updater)
        real = updater.worker.is_fetched
        fetched.update(i for i, x in updater.unfetched.items() if real(x.worker_index))

    monkeypatch.setattr(CpuUpdater, "send", sent)
    monkeypatch.setattr(CpuUpdater, "wait_fetched", waited)
    monkeypatch.setattr(CpuUpdater, "is_fetched", lambda _, layer: layer.index in fetched)


def train_llama(gpu_fraction: float) -> None:
    config = make_config(bf16=False, gpu_fraction=gpu_fraction, clipping=0.5)
    with built(make_model("llama"), config) as engine:
        shadow = Shadow(engine)
        for number in range(5):
            engine.backward(engine(**make_batch("llama", number)).loss)
            shadow.step()
        shadow.check()


def test_where_only_layers_of_the_device_are_left_nothing_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their gradients stay until the step, whatever the limit."""
    device = Device(monkeypatch, limit=1)
    train_and_compare(make_model("mlp"), gpu_fraction=1.0)
    assert device.seen
    assert not device.pipeline.room.num_waits


def test_nobody_looks_again_where_all_gradients_have_room(monkeypatch: pytest.MonkeyPatch) -> None:
    with built(make_model("mlp"), make_config(bf16=False)) as engine:
        room = engine.optimizer.pipeline.room
        every = sum(4 * layer.shard_size for layer in engine.optimizer.pipeline.layers)
        looks: list[int] = []

        def allocated(_: torch.device) -> tuple[int, int]:
            looks.append(1)
            return 1000, 0

        monkeypatch.setattr(gradient_room, "allocated_bytes", allocated)
        largest = max(layer.layout.size for layer in engine.optimizer.pipeline.layers)
        enough = 1000 + every + 50 + 2 * 4 * largest  # autograd's own, and the copy
        room.begin_step(enough, 20, 30, 0)
        assert not room.is_watching
        room.begin_step(enough - 1, 20, 30, 0)
        assert room.is_watching
        room.stop()
        for number in range(2):
            engine.backward(engine(**make_batch("mlp", number)))
            engine.step()
        assert len(looks) == 2 + 2 * (device().type == "cuda")  # where there is a limit, each step


@pytest.mark.parametrize(("gpu_fraction", "asks"), [(1.0, False), (0.5, True)])
def test_limits_are_asked_for_only_where_gradients_leave_for_the_host(
    monkeypatch: pytest.MonkeyPatch, gpu_fraction: float, asks: bool
) -> None:
    config = make_config(bf16=False, gpu_fraction=gpu_fraction, clipping=0.5)
    with built(make_model("mlp"), config) as engine, monkeypatch.context() as patch:
        manager = engine.optimizer.placement
        limits, asked = replace(manager._limits.at(0), gpu=1), Counter[str]()
        patch.setattr(manager._limits, "at", lambda _step: asked.update(["limits"]) or limits)
        patch.setattr(manager._probe, "_is_cuda", True)
        patch.setattr(gradient_room, "allocated_bytes", lambda _: (1000, 0))
        manager._watch_room()
        assert bool(asked) is engine.optimizer.pipeline.room.is_watching is asks


def test_before_a_step_has_shown_what_backward_takes_half_of_the_free_memory_is_left_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with built(make_model("mlp"), make_config(bf16=False)) as engine:
        layers = engine.optimizer.pipeline.layers
        room = engine.optimizer.pipeline.room
        monkeypatch.setattr(gradient_room, "allocated_bytes", lambda _: (1000, 0))
        every = sum(4 * layer.shard_size for layer in layers)
        beside = 20 + 2 * 4 * max(layer.layout.size for layer in layers)
        enough = 1000 + 2 * (every + beside)
        room.begin_step(enough, 20, None, None)
        assert not room.is_watching
        room.begin_step(enough - 2, 20, None, None)
        assert room.is_watching
        room.begin_step(enough - 2, 20, 0, None)
        assert not room.is_watching
