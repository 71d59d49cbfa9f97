"""Of two jobs that save under one tag the second is told, and neither takes the other's files."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from support.resume import Run, assert_same, engine_of, snapshot, train

from hytrain.checkpoint import writer
from hytrain.checkpoint.commit import TagLock, begin_save
from hytrain.errors import CheckpointError

HOLD = """
import sys, time
from pathlib import Path
from hytrain.checkpoint.commit import begin_save
saving, lock = begin_save(Path(sys.argv[1]))
(saving / "begun").write_text("")
print("held", flush=True)
time.sleep(100)
"""


def _save(engine: Any, folder: Path) -> None:
    engine.save_checkpoint(folder, tag="last")
    engine.wait_for_checkpoint()


def test_another_job_is_named_until_it_ends(tmp_path: Path, process_group: None) -> None:
    folder = tmp_path / "checkpoints" / "last"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with engine_of(Run()) as engine, engine_of(Run(asynchronous=True)) as beside:
            for one in (engine, beside):
                with pytest.raises(CheckpointError, match=rf"process {other.pid} on .*each job"):
                    _save(one, folder.parent)
            assert len(list(folder.parent.glob("hytrain-saving-last-*/begun"))) == 1
            # Under another tag it may save, and leaves what is at work, however old it is.
            for path in folder.parent.glob("hytrain-saving-last-*"):
                os.utime(path, (0, 0))
            engine.save_checkpoint(folder.parent, tag="other")
            assert len(list(folder.parent.glob("hytrain-saving-last-*/begun"))) == 1
            other.send_signal(signal.SIGKILL)
            other.wait()
            train(engine, 0, 1)
            engine.save_checkpoint(folder.parent, tag="last")
            saved = snapshot(engine)
            train(engine, 1, 2)
            engine.load_checkpoint(folder.parent)
            assert_same(snapshot(engine), saved)
        assert not list(folder.parent.glob("hytrain-*-*"))
    finally:
        other.kill()
        other.wait()


def test_a_save_of_the_same_process_is_told_too(
    tmp_path: Path, process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    original = writer.finish_save

    def wait(*arguments: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        original(*arguments)

    monkeypatch.setattr(writer, "finish_save", wait)
    with engine_of(Run(asynchronous=True)) as one, engine_of(Run()) as other:
        one.save_checkpoint(tmp_path, tag="last")
        assert begun.wait(60)
        with pytest.raises(CheckpointError, match="another job is saving under the tag 'last'"):
            other.save_checkpoint(tmp_path, tag="last")
        go_on.set()
        one.wait_for_checkpoint()
        other.save_checkpoint(tmp_path, tag="last")


def test_locks_of_killed_jobs_are_taken_and_tidied(tmp_path: Path) -> None:
    for tag in ("killed", "other"):
        (tmp_path / f"hytrain-lock-{tag}").write_text("process 1 on here")
    _, lock = begin_save(tmp_path / "killed")
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on "):
        begin_save(tmp_path / "killed")
    assert (tmp_path / "hytrain-lock-killed").exists()
    assert not (tmp_path / "hytrain-lock-other").exists()
    # One that is removed while another waits for it is not taken for the new one.
    lock.release()
    TagLock(tmp_path / "killed").release()
    assert not list(tmp_path.glob("hytrain-lock-*"))


def test_a_link_and_what_it_leads_to_are_one_tag(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "real").mkdir()
    (tmp_path / "last").symlink_to(tmp_path / "disk" / "real")
    _, lock = begin_save(tmp_path / "last")
    with pytest.raises(CheckpointError, match="another job"):
        begin_save(tmp_path / "disk" / "real")
    lock.release()


def test_without_locks_it_saves_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        begin_save(tmp_path / "last")
