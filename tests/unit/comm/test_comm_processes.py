"""Whether a process is there, by the kernel's own account."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace

import pytest

from hytrain.comm import processes
from hytrain.comm.processes import Process, can_look_at, is_gone, this_process

pytestmark = pytest.mark.timeout(60)

SCRIPT = """
import sys, time
def forever():
    while True:
        time.sleep(0.05)
print("here", flush=True)
{}
"""


def start(body: str = "forever()") -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(body)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    return child


def described(child: subprocess.Popen[str]) -> Process:
    fields = processes._fields(processes._PROC / str(child.pid) / "stat")
    return replace(this_process(), pid=child.pid, start=int(fields[processes._START]))


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = start()
    yield process
    process.kill()
    process.wait()


def test_this_process_is_there() -> None:
    here = this_process()
    assert here.pid == os.getpid()
    assert here.start > 0
    assert can_look_at(here, here)
    assert str(os.getpid()) in str(here)
    assert Process(**asdict(here)) == here


def test_another_process_of_the_same_number_is_another_one() -> None:
    here = this_process()
    assert is_gone(replace(here, start=here.start + 1))


def test_a_stopped_process_is_there(child: subprocess.Popen[str]) -> None:
    there = described(child)
    assert not is_gone(there)
    child.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert not is_gone(there)


def test_a_killed_process_is_gone_before_anybody_has_asked_for_its_code(
    child: subprocess.Popen[str],
) -> None:
    there = described(child)
    child.kill()
    deadline = time.monotonic() + 30
    while not is_gone(there) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_gone(there)
    assert (processes._PROC / str(child.pid)).exists(), "nobody has waited for it yet"
    child.wait()
    assert is_gone(there)


def test_a_process_lives_as_long_as_any_of_its_threads() -> None:
    body = (
        "import ctypes, threading; threading.Thread(target=forever).start(); "
        "ctypes.CDLL(None).syscall(60, 0)"  # x86-64's exit: of this thread alone
    )
    process = start(body if os.uname().machine == "x86_64" else "forever()")
    try:
        there = described(process)
        time.sleep(0.5)
        assert not is_gone(there)
    finally:
        process.kill()
        process.wait()
    assert is_gone(there)


@pytest.mark.parametrize("machine", ["", "another one"])
def test_processes_of_other_machines_are_not_looked_at(machine: str) -> None:
    here = this_process()
    assert not can_look_at(replace(here, machine=machine), here)
    assert not can_look_at(here, replace(here, machine=machine))


def test_processes_that_are_hidden_are_not_looked_at() -> None:
    here = this_process()
    assert not can_look_at(replace(here, pid=2**22 + 5), here)
