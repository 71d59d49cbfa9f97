"""What happens while layers are on their way: checkpoints, the end, faults."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.comparisons import assert_same_bits
from support.engines import built, environment, make_config
from support.models import make_model
from support.processes import num_threads
from support.resume import Run, assert_same, assert_same_state, engine_of, snapshot, train
from support.shadow import Shadow
from training import backward, inputs, make_steps

from hytrain import _C
from hytrain.errors import EngineClosedError, WorkerError
from hytrain.model.layer_state import LayerState

pytestmark = pytest.mark.timeout(60)

SLOW = ("HYTRAIN_DELAYS", "4:700")


@pytest.mark.parametrize("number", [0.0, 1.0])
def test_saved_and_loaded_while_layers_move(tmp_path: Path, number: float) -> None:
    run = Run(gpu_fraction=1.0 - number)
    with environment(*SLOW), engine_of(run) as engine:
        train(engine, 0, 3)
        engine.set_gpu_fraction(number)
        engine.save_checkpoint(str(tmp_path))
        saved = snapshot(engine)
        losses = train(engine, 3, 6)
        end = snapshot(engine)
    with environment(*SLOW), engine_of(run.another()) as engine:
        train(engine, 10, 12)
        engine.set_gpu_fraction(number)
        engine.load_checkpoint(str(tmp_path))
        assert_same(snapshot(engine), saved)
        engine.set_gpu_fraction(0.5)
        assert train(engine, 3, 6) == losses
        assert_same(snapshot(engine), end)


def test_the_first_layers_that_come_to_the_host_have_buffers() -> None:
    """The worker may wake for slots, and see a move before it has taken its buffers over."""
    config = make_config(gpu_fraction=1.0)
    for seed in range(8):
        with environment("HYTRAIN_DELAYS", f"{seed}:3000"), built(make_model("mlp"), config) as one:
            make_steps(one, range(1))
            before = snapshot(one)
            one.set_gpu_fraction(0.0)
            assert_same_state(snapshot(one), before)


def test_a_state_dict_right_after_a_move() -> None:
    run = Run(gpu_fraction=0.5)
    with environment(*SLOW), engine_of(run) as engine:
        train(engine, 0, 3)
        before = snapshot(engine)
        for fraction in (0.0, 1.0, 0.5, 1.0):
            engine.set_gpu_fraction(fraction)
            assert_same_state(snapshot(engine), before)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_the_engine_is_destroyed_while_layers_move(fraction: float) -> None:
    with built(make_model("mlp"), make_config()) as engine:
        backward(engine, 0)  # threads that torch keeps are there from here on
        engine.step()
    before = num_threads()
    with (
        environment(*SLOW),
        built(make_model("mlp"), make_config(gpu_fraction=1.0 - fraction)) as engine,
    ):
        backward(engine, 0)
        engine.step()
        engine.set_gpu_fraction(fraction)
        arenas = engine.optimizer.pipeline.cpu.pinned._arenas
    assert num_threads() == before
    assert all(arena._mapping is None for arena in arenas)
    with pytest.raises(EngineClosedError):
        engine.set_gpu_fraction(0.5)


@pytest.mark.parametrize("fraction", [0.0, 1.0])
def test_a_fault_in_a_move_is_raised_with_the_layers_name(fraction: float) -> None:
    with built(make_model("mlp"), make_config(gpu_fraction=1.0 - fraction)) as engine:
        make_steps(engine, range(2))
        engine.synchronize()
        engine.optimizer.pipeline.cpu.worker.fail_at(3)
        name = engine.optimizer.layer_states[3].name

        def go_on() -> None:
            engine.set_gpu_fraction(fraction)
            make_steps(engine, range(3))

        with pytest.raises(WorkerError, match=f"at layer '{name}': injected fault"):
            go_on()


def test_a_fault_before_a_move_is_raised_by_it() -> None:
    """The move asks the worker for room before it queues anything."""
    with built(make_model("mlp"), make_config(gpu_fraction=1.0)) as engine:
        backward(engine, 0)
        engine.step()
        engine.set_gpu_fraction(0.5)
        engine.synchronize()
        worker = engine.optimizer.pipeline.cpu.worker
        worker.fail_at(0)
        worker.submit(0, _C.Pass.commit)
        with pytest.raises(WorkerError, match="injected fault"):
            worker.wait_all()
        with pytest.raises(WorkerError, match="injected fault"):
            engine.set_gpu_fraction(0.0)


def test_weights_are_read_while_their_state_moves() -> None:
    """A move touches no training copy: no forward waits for one."""
    with environment(*SLOW), built(make_model("mlp"), make_config()) as engine:
        shadow = Shadow(engine)
        for number in range(6):
            backward(engine, number)
            shadow.step()
            engine.set_gpu_fraction(1.0 - number % 2)
            with torch.no_grad():
                engine(**inputs(7))
            shadow.assert_copy_is_current()
        shadow.check()


def test_a_second_engine_is_not_touched() -> None:
    config = make_config(gpu_fraction=0.5, clipping=0.1)
    with (
        environment("HYTRAIN_DELAYS", "3:200"),
        built(make_model("mlp", seed=1), config) as one,
        built(make_model("mlp", seed=2), config) as two,
    ):
        shadows = [Shadow(one), Shadow(two)]
        for number in range(8):
            for engine, shadow in zip((one, two), shadows, strict=True):
                backward(engine, number)
                shadow.step()
            (one, two)[number % 2].set_gpu_fraction(number % 3 / 2)
        for shadow in shadows:
            shadow.check()


@pytest.mark.parametrize("clipping", [0.02, 100.0])
def test_every_block_is_entered_with_its_newest_weights(clipping: float) -> None:
    model = make_model("mlp")
    config = make_config(clipping=clipping)
    with environment("HYTRAIN_DELAYS", "2:600"), built(model, config) as engine:
        shadow = Shadow(engine)
        entered = 0

        def check(state: LayerState) -> None:
            nonlocal entered
            entered += 1
            for start, weights in state.storage.shard_slices(state.begin, state.end):
                at = start - state.begin
                expected = shadow.shards[state.index].p[at : at + weights.numel()]
                assert_same_bits(state.name, weights.clone(), expected.to(weights.dtype))

        for state in shadow.states:
            if state.layout.block is not None:
                state.layout.block.register_forward_pre_hook(lambda *_rest, s=state: check(s))
        for number in range(12):
            backward(engine, number)
            shadow.step()
            engine.set_gpu_fraction((1.0, 0.0, 0.5)[number % 3])
        shadow.check()
        assert entered == 12 * 4


def test_waits_are_counted_to_who_made_the_weights() -> None:
    with built(make_model("mlp"), make_config()) as engine:
        timer = engine.optimizer.passes.timer
        waits: list[bool] = []
        begins = timer.wait_begins

        def record(index: int, *, on_cpu: bool) -> None:
            waits.append(on_cpu)
            begins(index, on_cpu=on_cpu)

        timer.wait_begins = record
        seen: list[set[bool]] = []
        for number in range(5):
            backward(engine, number)
            seen.append(set(waits))
            waits.clear()
            engine.step()
            if number in (1, 3):
                engine.set_gpu_fraction(1.0 if number == 1 else 0.0)
        # In the first forward after a move the weights still are those that the old side made.
        assert seen == [set(), {True}, {True}, {False}, {False}]
