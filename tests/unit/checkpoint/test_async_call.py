"""An asynchronous save's call: what changes behind it is not saved, what it keeps stays true."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resume import Run, engine_of, train

from hytrain.checkpoint import async_save
from hytrain.checkpoint.snapshot import StateSnapshot

pytestmark = pytest.mark.usefixtures("process_group")

RUN = Run(asynchronous=True, gpu_fraction=0.3, schedule="torch")
MODEL = "mp_rank_00_model_states.pt"


def _stored(folder: Path, tag: str) -> dict[str, Any]:
    return torch.load(folder / tag / MODEL, weights_only=False)


def test_what_changes_behind_the_call_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    take = StateSnapshot.take

    def held(self: StateSnapshot, room: int) -> int:
        assert opened.wait(30)
        return take(self, room)

    monkeypatch.setattr(StateSnapshot, "take", held)
    client: dict[str, Any] = {"note": [1], "tensor": torch.ones(3)}
    with engine_of(RUN) as engine:
        train(engine, 0, 2)
        engine.module.register_buffer("shared", engine.module.calls.view(-1))
        engine.save_checkpoint(tmp_path, tag="t", client_state=client)
        calls, rate = int(engine.module.calls), engine.optimizer.param_groups[0]["lr"]
        schedule = engine.lr_scheduler.state_dict()["last_epoch"]
        client["note"].append(2)
        client["tensor"].zero_()
        engine.module.calls.fill_(77)
        engine.optimizer.param_groups[0]["lr"] = 123.0
        engine.lr_scheduler.last_epoch = 99
        torch.manual_seed(5)
        opened.set()
        engine.wait_for_checkpoint()
    stored = _stored(tmp_path, "t")
    assert stored["note"] == [1]
    assert stored["tensor"].tolist() == [1.0] * 3
    assert int(stored["module"]["calls"]) == calls != 77
    assert stored["lr_scheduler"]["last_epoch"] == schedule != 99
    groups = torch.load(tmp_path / "t/zero/optimizer_state.pt", weights_only=False)
    assert groups["param_groups"][0]["lr"] == rate != 123.0
    # Buffers that share memory share it in the file.
    module = stored["module"]
    assert module["shared"].data_ptr() == module["calls"].data_ptr()


def _add(_module: Any, state: dict[str, Any], _prefix: str, _meta: Any) -> None:
    state["extra"] = torch.ones(1)


def _no_room(_share: Any) -> int:
    return 0


@pytest.mark.parametrize("change", ["buffer", "hook"])
def test_what_is_kept_of_a_module_is_made_anew(change: str, tmp_path: Path) -> None:
    """Every kind of change: tests/unit/engine/test_saved_structure.py."""
    with engine_of(RUN) as engine:
        module = engine.module
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag="before")
        if change == "buffer":
            module.register_buffer("more", torch.arange(3))
        else:
            module.register_state_dict_post_hook(_add)
        engine.save_checkpoint(tmp_path, tag="after")
        saver, engine._saver = engine._saver, None
        engine.wait_for_checkpoint()
        saver.wait()
        engine.save_checkpoint(tmp_path, tag="sync")
        engine._saver = saver
        after, sync = _stored(tmp_path, "after"), _stored(tmp_path, "sync")
        before = _stored(tmp_path, "before")
    assert list(after["module"]) == list(sync["module"])
    for key in ("buffer_names", "param_shapes", "shared_params", "frozen_param_shapes"):
        assert after[key] == sync[key], key
    assert len(after["module"]) == len(before["module"]) + 1


def test_what_cannot_be_copied_is_pickled(tmp_path: Path) -> None:
    made = torch.ones(2, requires_grad=True) * 2  # no leaf of a graph: torch refuses to copy it
    with engine_of(RUN) as engine:
        engine.save_checkpoint(tmp_path, tag="t", client_state={"made": made})
        engine.wait_for_checkpoint()
    assert _stored(tmp_path, "t")["made"].tolist() == [2.0, 2.0]


def test_memory_for_copies_is_kept_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = replace(RUN, gpu_fraction=0.0)
    with engine_of(run) as engine:
        saver = engine._saver
        state = sum(layer.state_bytes for layer in engine.optimizer.layer_states)
        assert saver.copy_bytes == state
        bare = engine.optimizer.placement.memory_peaks()["step"].host
        assert engine.memory_peaks()["step"].host == bare + state
        places = {index: copy.data_ptr() for index, (copy, _) in saver._memory.copies.items()}
        for step in range(2):
            train(engine, step, step + 1)
            engine.save_checkpoint(tmp_path, tag="t")
        engine.wait_for_checkpoint()
        assert places == {i: copy.data_ptr() for i, (copy, _) in saver._memory.copies.items()}
        # A layer that has left the host needs none there.
        engine.set_gpu_fraction(1.0)
        train(engine, 2, 3)
        engine.save_checkpoint(tmp_path, tag="t")
        assert saver.copy_bytes == 0
        engine.set_gpu_fraction(0.0)
        train(engine, 3, 4)
        engine.save_checkpoint(tmp_path, tag="t")
        assert saver.copy_bytes == state
        # Somebody else needs the memory.
        monkeypatch.setattr(async_save, "free_room", _no_room)
        engine.wait_for_checkpoint()
        engine.save_checkpoint(tmp_path, tag="t")
        engine.wait_for_checkpoint()
        assert saver.copy_bytes == 0
