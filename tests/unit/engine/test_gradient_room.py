"""Gradients that wait on the device for the CPU's update leave backward its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engines import built, environment, make_config
from support.models import make_batch, make_model
from support.shadow import Shadow
from training import train_and_compare

from hytrain.model.layer_state import LayerState
from hytrain.offload import gradient_room
from hytrain.offload.cpu_updater import CpuUpdater
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.placement.manager import PlacementManager


class Device:
    """Tells the engines of gradients alone, as if nothing else were on the device.

    Attributes:
        limit: bytes that they may take before the next layer's backward.
        seen: how many have been taken, after each gradient that was sent.
        pipeline: of the last engine.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
        self.limit = limit
        self.seen: list[int] = []
        self.pipeline: Any = None
        send = UpdatePipeline.send

        def sent(pipeline: UpdatePipeline, *arguments: Any, **keywords: Any) -> None:
            send(pipeline, *arguments, **keywords)
            self.seen.append(self.allocated())

        monkeypatch.setattr(UpdatePipeline, "send", sent)
        monkeypatch.setattr(PlacementManager, "_watch_room", lambda manager: self._watch(manager))
        monkeypatch.setattr(gradient_room, "allocated_bytes", lambda _: (self.allocated(), 0))

    def allocated(self) -> int:
        gradients = [layer.update.gradient for layer in self.pipeline.layers]
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)

    def _watch(self, manager: PlacementManager) -> None:
        self.pipeline = manager._pipeline
        room = self.pipeline.room
        room.begin_step(self.limit + room._next_layer, 0, 0)


def layer_bytes(kind: str) -> list[int]:
    """Of the gradients of a model's layers, in fp32."""
    with built(make_model(kind), make_config(bf16=False)) as engine:
        return [4 * layer.shard_size for layer in engine.optimizer.pipeline.layers]


@pytest.mark.parametrize("delays", ["", "4:3000"])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5])
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
    assert not device.pipeline.room.is_watching  # between steps


def fetch_when_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker seems to have fetched no gradient before somebody waits for it."""
    fetched: set[int] = set()
    send, wait = CpuUpdater.send, CpuUpdater.wait_fetched

    def sent(updater: CpuUpdater, layer: LayerState, *arguments: Any, **keywords: Any) -> None:
        fetched.discard(layer.index)
        send(updater, layer, *arguments, **keywords)

    def waited(updater: CpuUpdater, layer: LayerState) -> None:
        wait(updater, layer)
        fetched.add(layer.index)

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
        room.begin_step(enough, 20, 30)
        assert not room.is_watching
        room.begin_step(enough - 1, 20, 30)
        assert room.is_watching
        room.end_step()
        for number in range(2):
            engine.backward(engine(**make_batch("mlp", number)))
            engine.step()
        assert len(looks) == 2


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
        room.begin_step(enough, 20, None)
        assert not room.is_watching
        room.begin_step(enough - 2, 20, None)
        assert room.is_watching
        room.begin_step(enough - 2, 20, 0)
        assert not room.is_watching
        room.end_step()
