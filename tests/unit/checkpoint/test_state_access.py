"""Weights and state read between steps: the newest ones, and reading changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.resume import Run, assert_same, engine_of, micro_batch, snapshot, train

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5, 1.0])
def test_state_and_weights_are_those_of_the_last_step(gpu_fraction: float) -> None:
    run = Run(gpu_fraction=gpu_fraction)
    with engine_of(run) as engine:
        straight = train(engine, 0, 4)
        expected = snapshot(engine)
    with engine_of(run) as engine:
        names = [name for name, p in engine.module.named_parameters() if p.requires_grad]
        losses: list[float] = []
        for number in range(4):
            losses += train(engine, number, number + 1)
            weights = {k: v.clone() for k, v in engine.module.state_dict().items()}
            state = engine.fp32_state_dict()
            assert sorted(state) == sorted(names)
            for name, tensors in state.items():
                assert all(t.device.type == "cpu" for t in tensors.values())
                assert torch.equal(weights[name].cpu(), tensors["fp32"].bfloat16())
            # What is returned belongs to the caller.
            for tensors in state.values():
                for tensor in tensors.values():
                    tensor.fill_(torch.nan)
        assert losses == straight
        assert_same(snapshot(engine), expected)


def test_read_between_backward_and_step() -> None:
    with engine_of(Run()) as engine:
        train(engine, 0, 3)
        expected = snapshot(engine)
    with engine_of(Run()) as engine:
        train(engine, 0, 2)
        before = snapshot(engine)
        engine.backward(engine(micro_batch(2).to(engine.device)))
        between = snapshot(engine)
        assert between.state.keys() == before.state.keys()
        for name, tensors in before.state.items():
            for kind, tensor in tensors.items():
                assert torch.equal(between.state[name][kind], tensor)
        engine.step()
        assert_same(snapshot(engine), expected)


def test_no_file_is_left_open(tmp_path: Path) -> None:
    with engine_of(Run()) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
    held = [path for path in _mapped_files() if str(tmp_path) in path and "zero/" in path]
    assert not held


def _mapped_files() -> set[str]:
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return {line.split(maxsplit=5)[5].strip() for line in maps if line.count(" ") > 5}
