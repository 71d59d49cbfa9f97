"""Whether a process is there, by the kernel's own account."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hytrain.comm.local_processes import WatchedProcess, are_of_one_host, this_process, watched_by

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    script = "import time\nprint('here', flush=True)\ntime.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    yield process
    process.kill()
    process.wait()


def test_ranks_of_one_host_watch_each_other() -> None:
    here = this_process()
    assert str(os.getpid()) in str(here)
    elsewhere = replace(here, machine="another one")
    assert are_of_one_host([here, here])
    assert not are_of_one_host([here, elsewhere])
    assert not are_of_one_host([replace(here, machine="")] * 2), "nobody can watch there"
    assert list(watched_by(1, [here, here, elsewhere, here])) == [0, 3]
    assert not watched_by(0, [replace(here, machine="")] * 2)
    assert not watched_by(0, [])


def test_a_stopped_process_is_there_and_a_killed_one_is_not(
    child: subprocess.Popen[str],
) -> None:
    there = WatchedProcess(child.pid)
    assert not there.is_gone()
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert not there.is_gone()
    child.kill()
    deadline = time.monotonic() + 30
    while not there.is_gone() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert there.is_gone()
    assert Path(f"/proc/{child.pid}").exists(), "nobody has waited for it yet"
    child.wait()
    assert WatchedProcess(child.pid).is_gone(), "also for who comes late"


def test_a_process_that_gives_back_its_memory_is_gone(
    child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = WatchedProcess(child.pid)
    fields = ["R", "1", "1", "1", "0", "-1", str(0x400004), "0"]
    stat = f"{child.pid} (a) name) {' '.join(fields)}"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: stat)
    assert there.is_gone()
    fields[6] = "4194560"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: f"1 (a) {' '.join(fields)}")
    assert not WatchedProcess(child.pid).is_gone()
