"""When things happen layer by layer, and the pinned memory that it takes."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from layer_major_models import WithBlocks
from layer_major_runs import mlp_batch, rows
from support.engines import built, make_config
from support.models import Block, Mlp, make_batch, make_model

from hytrain.kernels.host_memory import PAGE
from hytrain.layer_major.activations import HostSlots

# -- when things happen ------------------------------------------------------------------------

MICRO_BATCHES = 3


def batches(step: int) -> Iterator[dict[str, torch.Tensor]]:
    return iter([mlp_batch(step * MICRO_BATCHES + i) for i in range(MICRO_BATCHES)])


def config(**options: Any) -> dict[str, Any]:
    section = {"accumulation": "layer_major", **options.pop("section", {})}
    return make_config(accumulation=MICRO_BATCHES, bf16=False, hytrain=section, **options)


@pytest.mark.parametrize("activations", ["keep", "offload"])
def test_a_layer_leaves_after_its_own_micro_batches(
    activations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Mlp()
    events: list[tuple[str, int]] = []
    for index, block in enumerate(model.blocks):
        block.up.register_forward_pre_hook(lambda *_, i=index: events.append(("compute", i)))
    section = {"activations": activations}
    with built(model, config(section=section, gpu_fraction=0.5)) as engine:
        pipeline = engine.optimizer.pipeline
        send = pipeline.send

        def record(layer: Any, *arguments: Any) -> None:
            events.append(("send", layer.index))
            send(layer, *arguments)

        monkeypatch.setattr(pipeline, "send", record)
        order = list(range(4))
        for step in range(3):
            events.clear()
            engine.train_batch(batches(step), rows)
            forward = [("compute", i) for i in order for _ in range(MICRO_BATCHES)]
            back: list[tuple[str, int]] = []
            for index in reversed(order):
                back += [("compute", index)] * MICRO_BATCHES + [("send", index + 1)]
            if step:
                assert events == [*forward, ("send", 5), *back, ("send", 0)]
            else:
                # The trial: plain forwards first; nobody knows yet when the head is final.
                plain = [("compute", i) for _ in range(MICRO_BATCHES) for i in order]
                known = [*plain, *forward, *back]
                assert events[: len(known)] == known
                assert sorted(events[len(known) :]) == [("send", 0), ("send", 5)]
        assert engine.batch_training.accumulation.refusal is None


def test_one_micro_batchs_logits_are_alive_at_a_time() -> None:
    model = make_model("llama")
    alive: list[weakref.ref[torch.Tensor]] = []
    most: list[int] = []

    def note(_module: object, _inputs: object, logits: torch.Tensor) -> None:
        most.append(sum(other() is not None for other in alive))
        alive.append(weakref.ref(logits))

    model.lm_head.register_forward_hook(note)
    with built(model, config()) as engine:
        for step in range(2):
            most.clear()
            engine.train_batch(
                iter([make_batch("llama", 3 * step + i) for i in range(MICRO_BATCHES)])
            )
            assert max(most) == 0
            assert len(most) == MICRO_BATCHES * (2 if step == 0 else 1)


class SlowBlock(Block):
    """Takes a while."""

    seconds = 0.002

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


class Slow(WithBlocks):
    block = SlowBlock


def test_measured_times_are_of_all_micro_batches_and_recomputation() -> None:
    torch.manual_seed(0)
    samples: list[Any] = []
    with built(Slow(), config(gpu_fraction=0.5)) as engine:
        estimator = engine.optimizer.placement._estimator
        add = estimator.add_samples

        def keep(new: Any) -> Any:
            new = list(new)
            samples.extend(new)
            return add(new)

        estimator.add_samples = keep
        for step in range(12):
            engine.train_batch(batches(step), rows)
    assert len(samples) > 2
    least = MICRO_BATCHES * SlowBlock.seconds
    for sample in samples:
        assert min(sample.forward[1:5]) >= least
        assert min(sample.backward[1:5]) >= least
        parts = sum(sample.forward) + sum(sample.backward) + sample.between + sample.tail
        assert parts + sample.cpu_wait + sample.gpu_wait <= sample.seconds * 1.01
    # The quickest one's: the machine may be busy with something else in between.
    between = min(sample.between for sample in samples)
    assert between < least, "the micro-batches are not between forward and backward"


def test_k_is_solved_from_such_steps() -> None:
    torch.manual_seed(0)
    solve: Any = "solve"
    with built(Slow(), config(gpu_fraction=solve)) as engine:
        for step in range(12):
            engine.train_batch(batches(step), rows)
        assert engine.batch_training.accumulation.refusal is None
        decisions = engine.placement_decisions()
        assert len(decisions) > 1
        costs = engine.optimizer.placement.costs()
    assert min(layer.backward for layer in costs.layers[1:5]) >= MICRO_BATCHES * SlowBlock.seconds


# -- pinned memory of activations follows the batches ------------------------------------------

KEPT_STEPS = 8


def _step(slots: HostSlots, sizes: list[int]) -> None:
    slots.begin_step()
    taken = [slots.take(size * PAGE) for size in sizes]
    for slot in taken:
        slot.cut([torch.empty(PAGE, dtype=torch.uint8)])[0].fill_(1)
        slots.give_back(slot)


def test_memory_of_a_larger_batch_is_given_back() -> None:
    slots = HostSlots(torch.device("cpu"))
    for _ in range(3):
        _step(slots, [100, 100, 100])
    assert slots.num_bytes == 300 * PAGE
    for _ in range(2 * KEPT_STEPS + 1):
        _step(slots, [10, 10])
    assert slots.num_bytes == 20 * PAGE
    slots.close()


def test_batches_that_alternate_keep_it() -> None:
    slots = HostSlots(torch.device("cpu"))
    _step(slots, [100, 100])
    first = {slot._memory.data_ptr() for slot in slots._free}
    for number in range(4 * KEPT_STEPS):
        _step(slots, [100, 100] if number % 5 == 0 else [10, 10])
        assert slots.num_bytes == 200 * PAGE
    assert {slot._memory.data_ptr() for slot in slots._free} == first
    slots.close()


def test_the_engine_gives_all_of_it_back() -> None:
    with built(Mlp(), config(section={"activations": "offload"})) as engine:
        engine.train_batch(batches(0), rows)
        assert engine.batch_training.host_bytes > 0
        engine.destroy()
        assert engine.batch_training.host_bytes == 0
