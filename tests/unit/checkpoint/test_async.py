"""Saves beside training: what is written is what a synchronous save of the same step writes."""

from __future__ import annotations

import logging
import os
import textwrap
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import environment
from support.resume import Run, assert_same, engine_of, micro_batch, snapshot, train
from support.scripts import run_script

from hytrain.checkpoint import async_save, file_writers
from hytrain.checkpoint import snapshot as snapshots
from hytrain.checkpoint.snapshot import LayerSnapshot
from hytrain.checkpoint.universal import MODEL_STATES_OF_ZERO3
from hytrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("process_group")

TESTS = Path(__file__).resolve().parents[2]
RUNS = [
    Run(asynchronous=True),
    Run(asynchronous=True, gpu_fraction=0.0, accumulation=2, groups=True, schedule="torch"),
    Run(asynchronous=True, bf16=False, gpu_fraction=1.0, clipping=0.0),
    Run(asynchronous=True, clipping=0.0, check_overflow=False),
    Run(asynchronous=True, stage=3, gpu_fraction=0.3),
]


def _contents(tag: Path) -> dict[str, Any]:
    """All that a checkpoint's files hold, by path."""
    return {
        path.relative_to(tag).as_posix(): torch.load(path, weights_only=False)
        for path in tag.rglob("*.pt")
    }


def _assert_equal(actual: Any, expected: Any, where: str) -> None:
    assert type(actual) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert actual.dtype == expected.dtype, where
        assert torch.equal(actual, expected), where
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), where
        for key, value in expected.items():
            _assert_equal(actual[key], value, f"{where} {key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), where
        for index, value in enumerate(expected):
            _assert_equal(actual[index], value, f"{where} {index}")
    else:
        assert actual == expected, where


def _assert_same_files(actual: Path, expected: Path) -> None:
    ours, theirs = _contents(actual), _contents(expected)
    for contents in (ours, theirs):
        for name in ("mp_rank_00_model_states.pt", MODEL_STATES_OF_ZERO3):
            contents[name].pop("ds_config")
            contents[name].pop("hytrain")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        _assert_equal(ours[name], value, name)


def _reference(run: Run, folder: Path, steps: int, more: int) -> Any:
    """A synchronous save after ``steps``, and the state after ``more``."""
    with engine_of(replace(run, asynchronous=False)) as engine:
        train(engine, 0, steps)
        engine.save_checkpoint(folder / "sync", client_state={"note": [1]})
        train(engine, steps, more)
        return snapshot(engine)


@pytest.mark.parametrize(
    ("run", "room"),
    [
        *((run, None) for run in RUNS[1:4]),
        (RUNS[0], 40_000),
        *(
            pytest.param(*case, marks=pytest.mark.parity_full)
            for case in ((RUNS[0], None), (RUNS[4], None), (RUNS[0], 0), (RUNS[3], 0))
        ),
    ],
    ids=str,
)
def test_it_is_that_of_a_synchronous_save(
    run: Run, room: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, more = 3 * run.accumulation, 7 * run.accumulation
    end = _reference(run, tmp_path, steps, more)
    if room is not None:
        monkeypatch.setattr(async_save, "free_room", lambda share: room)
    with environment("HYTRAIN_DELAYS", "1:3000"), engine_of(run) as engine:
        train(engine, 0, steps)
        engine.save_checkpoint(tmp_path / "async", client_state={"note": [1]})
        train(engine, steps, more)
        engine.wait_for_checkpoint()
        assert_same(snapshot(engine), end)
    _assert_same_files(tmp_path / "async/global_step3", tmp_path / "sync/global_step3")


@pytest.mark.parametrize("room", [30_000, 10**9], ids=["a part of it", "all"])
@pytest.mark.parametrize("run", [RUNS[2], RUNS[0]], ids=str)
def test_copies_on_the_device(
    run: Run, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What stands for the GPU has room here: no layer of it is copied to the host."""
    end = _reference(run, tmp_path, 3, 7)
    monkeypatch.setattr(snapshots, "spare_gpu_bytes", lambda device: room)
    on_host: list[LayerSnapshot] = []
    copy = LayerSnapshot.copy

    def noted(self: LayerSnapshot) -> None:
        on_host.append(self)
        copy(self)

    monkeypatch.setattr(LayerSnapshot, "copy", noted)
    with environment("HYTRAIN_DELAYS", "7:3000"), engine_of(run) as engine:
        train(engine, 0, 3)
        engine.save_checkpoint(tmp_path / "async", client_state={"note": [1]})
        train(engine, 3, 7)
        engine.wait_for_checkpoint()
        assert_same(snapshot(engine), end)
    left = [layer for layer in on_host if not layer.is_on_host]
    assert bool(left) == (room < 10**9)
    _assert_same_files(tmp_path / "async/global_step3", tmp_path / "sync/global_step3")


@pytest.mark.gpu
@pytest.mark.parametrize("k", [0.3, 1.0])
def test_copies_on_a_gpu_are_given_back(k: float, tmp_path: Path) -> None:
    run = replace(RUN, gpu_fraction=k)
    end = _reference(run, tmp_path, 2, 6)
    with engine_of(run) as engine:
        train(engine, 0, 2)
        for number in range(3):
            before = torch.cuda.memory_reserved()
            engine.save_checkpoint(tmp_path / "async", tag="t", client_state={"note": [1]})
            if number == 0:
                engine.wait_for_checkpoint()
                _assert_same_files(tmp_path / "async/t", tmp_path / "sync/global_step2")
            else:
                train(engine, 2 * number, 2 * number + 2)
                engine.wait_for_checkpoint()
            assert torch.cuda.memory_reserved() <= before + (2 << 20)
        assert_same(snapshot(engine), end)


class _Gate:
    """Holds the thread that saves at a place of a function's beginning."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        original = getattr(owner, name)

        def wait(*arguments: Any, **named: Any) -> Any:
            self.reached.set()
            assert self.open.wait(60)
            return original(*arguments, **named)

        patch.setattr(owner, name, wait)


RUN = Run(asynchronous=True, gpu_fraction=0.3)


@pytest.mark.parametrize("on_device", [False, True])
def test_training_goes_on_while_files_are_written(
    on_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(RUN, gpu_fraction=1.0) if on_device else RUN
    end = _reference(run, tmp_path, 2, 6)
    if on_device:
        monkeypatch.setattr(snapshots, "spare_gpu_bytes", lambda device: 10**9)
    with engine_of(run) as engine:
        train(engine, 0, 2)
        gate = _Gate(monkeypatch, file_writers, "begin_file")
        engine.save_checkpoint(tmp_path / "async", client_state={"note": [1]})
        assert gate.reached.wait(30)
        train(engine, 2, 6)
        assert not (tmp_path / "async/latest").exists()
        gate.open.set()
        engine.wait_for_checkpoint()
        assert_same(snapshot(engine), end)
    _assert_same_files(tmp_path / "async/global_step2", tmp_path / "sync/global_step2")


@pytest.mark.parametrize("what", ["train", "load", "set", "leave", "flush"])
def test_what_changes_state_waits_for_the_copy(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.utils import safe_set_full_fp32_param

    _reference(RUN, tmp_path, 2, 2)
    with engine_of(RUN) as engine:
        train(engine, 0, 2)
        monkeypatch.setattr(snapshots, "spare_gpu_bytes", lambda device: 0)  # copied to the host
        gate = _Gate(monkeypatch, LayerSnapshot, "copy")
        engine.save_checkpoint(tmp_path / "async", client_state={"note": [1]})
        assert gate.reached.wait(30)
        threading.Timer(0.7, gate.open.set).start()
        if what == "train":
            train(engine, 2, 5)
        elif what == "load":
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        elif what == "set":
            parameter = engine.module.norm.weight
            safe_set_full_fp32_param(
                parameter, torch.full_like(parameter, 3.0, dtype=torch.float32)
            )
        elif what == "leave":
            engine.set_gpu_fraction(1.0)
            train(engine, 2, 3)
            engine.fp32_state_dict()
        else:
            train(engine, 2, 3)
            engine.fp32_state_dict()
        assert gate.open.is_set()
        engine.wait_for_checkpoint()
    _assert_same_files(tmp_path / "async/global_step2", tmp_path / "sync/global_step2")


def test_a_second_save_waits_and_both_are_there(tmp_path: Path) -> None:
    with environment("HYTRAIN_DELAYS", "3:4000"), engine_of(RUN) as engine:
        states = []
        for step in range(3):
            train(engine, step, step + 1)
            engine.save_checkpoint(tmp_path)
            states.append(snapshot(engine))
    with engine_of(Run().another()) as engine:
        for step, state in enumerate(states):
            engine.load_checkpoint(tmp_path, tag=f"global_step{step + 1}")
            assert_same(snapshot(engine), state)


@pytest.mark.parametrize("where", ["step", "save", "wait", "load"])
def test_a_failure_is_raised_and_training_can_go_on(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = _reference(RUN, tmp_path, 2, 6)
    with engine_of(RUN) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path / "async", tag="t")
        engine.wait_for_checkpoint()
        train(engine, 1, 2)
        with monkeypatch.context() as patch:
            patch.setattr(file_writers, "begin_file", _full)
            engine.save_checkpoint(tmp_path / "async", tag="t")
            engine._saver._ended.wait()
        done = 2 if where != "step" else 3

        def notice() -> None:
            if where == "step":
                train(engine, 2, 3)
            elif where == "save":
                engine.save_checkpoint(tmp_path / "async", tag="t")
            elif where == "load":
                engine.load_checkpoint(tmp_path / "async", tag="t")
            else:
                engine.wait_for_checkpoint()

        with pytest.raises(CheckpointError, match=r"No space left.*latest.* is unchanged"):
            notice()
        train(engine, done, 6)
        assert_same(snapshot(engine), end)
        engine.save_checkpoint(tmp_path / "async", tag="t")
        engine.load_checkpoint(tmp_path / "async")
        assert_same(snapshot(engine), end)
    assert not list((tmp_path / "async").glob("hytrain-*"))


def _full(path: Path, stored: object) -> Any:
    raise OSError(28, "No space left on device")


def test_destroy_waits(tmp_path: Path) -> None:
    with environment("HYTRAIN_DELAYS", "5:20000"), engine_of(RUN) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
    assert (tmp_path / "latest").read_text() == "global_step2"
    assert "hytrain-save" not in {thread.name for thread in threading.enumerate()}
    with engine_of(Run().another()) as engine:
        engine.load_checkpoint(tmp_path)
        assert_same(snapshot(engine), saved)


_SAVES_LAST = f"""
    import sys
    sys.path.insert(0, {str(TESTS)!r})
    from support.engines import join_process_group
    from support.resume import Run, engine_of, train
    join_process_group()
    context = engine_of(Run(asynchronous=True))  # kept: it would destroy the engine
    engine = context.__enter__()
    train(engine, 0, 2)
    engine.save_checkpoint(sys.argv[1])
"""


def test_a_script_may_end_with_it(tmp_path: Path) -> None:
    """Nothing waits, and nothing is destroyed; the save copies and writes in threads of its own."""
    script = textwrap.dedent(_SAVES_LAST)
    ended = run_script(script, str(tmp_path), is_finalized=True, HYTRAIN_DELAYS="1:20000")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "failed" not in ended.stderr
    assert (tmp_path / "latest").read_text() == "global_step2"
    with engine_of(Run()) as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.global_steps == 2


def test_between_backward_and_step(tmp_path: Path) -> None:
    with engine_of(RUN) as engine:
        train(engine, 0, 2)
        saved = snapshot(engine)
        engine.backward(engine(micro_batch(2).to(engine.device)))
        engine.save_checkpoint(tmp_path)
        engine.step()
        engine.wait_for_checkpoint()
        end = snapshot(engine)
        calls = engine.module.calls.item()
    with engine_of(RUN) as engine:
        train(engine, 0, 3)
        assert_same(snapshot(engine), end)
        assert engine.module.calls.item() == calls
    with engine_of(Run().another()) as engine:
        engine.load_checkpoint(tmp_path)
        assert_same_states(snapshot(engine).state, saved.state)


def test_a_frozen_weight_that_changes_meanwhile_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(RUN) as engine:
        train(engine, 0, 1)
        gate = _Gate(monkeypatch, file_writers, "begin_file")
        engine.save_checkpoint(tmp_path)
        assert gate.reached.wait(30)
        with torch.no_grad():
            engine.module.frozen.weight.mul_(2)
        gate.open.set()
        with pytest.raises(CheckpointError, match=r"'frozen\.weight', which is not trained"):
            engine.wait_for_checkpoint()
    assert not os.listdir(tmp_path)


def test_no_room_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_save, "free_room", lambda share: 0)
    with engine_of(RUN) as engine, caplog.at_level(logging.WARNING, "hytrain"):
        for step in range(3):
            train(engine, step, step + 1)
            engine.save_checkpoint(tmp_path)
    assert sum("has no room for a copy" in r.getMessage() for r in caplog.records) == 1
