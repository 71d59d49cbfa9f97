"""Whether processes are there, and how they end when another one has failed."""

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

pytestmark = pytest.mark.timeout(120)


# -- whether a process is there, by the kernel's own account -----------------------------------


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


# -- a process that is lost ends, whatever its thread does -------------------------------------

SCRIPT = """
import sys, threading, time
from hytrain.errors import RankFailedError
from hytrain.comm import process_exit as ending
ending.RAISE_SECONDS, ending.STUCK_SECONDS, ending.EXIT_SECONDS = 0.5, 2.0, 2.0
own = ending.Ending()
failure = RankFailedError("rank 1 was killed")
def watch():
    time.sleep(0.1)
    own.require(failure)
    while True: own.turn(); time.sleep(0.05)
threading.Thread(target=watch, daemon=True).start()
{}
"""
TOLD_IN_TIME = """
limits = ending.RAISE_SECONDS, ending.STUCK_SECONDS
ending.RAISE_SECONDS = ending.STUCK_SECONDS = 60.0  # on a busy machine too
while own._failure is None: time.sleep(0.01)
own.told()
ending.RAISE_SECONDS, ending.STUCK_SECONDS = limits
"""


def run(body: str) -> tuple[int, str, float]:
    """Exit code, what was said, and seconds from then on."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format("print('begin', flush=True)\n" + body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begin\n"
    begin = time.monotonic()
    text = process.stdout.read()  # communicate() would miss what was read beside the line
    return process.wait(timeout=60), text, time.monotonic() - begin


def test_a_thread_that_computes_gets_the_exception_where_it_is() -> None:
    body = "def compute():\n    while True: sum(range(100))\n"
    code, text, _ = run(body + "try:\n    compute()\nfinally:\n    print('tidied up')")
    assert code == 1
    assert "tidied up" in text
    assert "in compute" in text
    assert "hytrain.errors.RankFailedError: rank 1 was killed" in text


def test_the_exception_is_of_the_kind_that_can_be_caught_and_comes_once() -> None:
    body = (
        "try:\n    while True: time.sleep(0.01)\n"
        "except RankFailedError as error:\n    print('caught', error)\n"
        "for _ in range(300): time.sleep(0.01)\nprint('went on')\nsys.exit(5)"
    )
    code, text, _ = run(body)
    assert code == 5
    assert "caught rank 1 was killed\nwent on" in text


def test_a_thread_that_cannot_be_reached_is_ended_with_its_process() -> None:
    body = "lock = threading.Lock(); lock.acquire()\ndef stuck():\n    lock.acquire()\nstuck()"
    code, text, seconds = run(body)
    assert code == 1
    assert "in stuck" in text
    assert "hytrain.errors.RankFailedError: rank 1 was killed" in text
    assert seconds < 45.0


def test_who_has_raised_it_itself_is_left_alone() -> None:
    body = "time.sleep(3.0); print('ended'); sys.exit(0)"
    assert run(TOLD_IN_TIME + body)[:2] == (0, "ended\n")


def test_who_raises_it_while_it_is_about_to_be_brought_about_gets_it_once() -> None:
    body = (
        "about, was_told = threading.Event(), threading.Event()\n"
        "def look(stack):\n    about.set(); was_told.wait(); return False\n"
        "ending.is_in_torch_distributed = look\n"
        "about.wait()\n"  # the watch has seen that nothing was told
        "try:\n    own.told(); was_told.set(); time.sleep(1.0); print('not again')\n"
        "except RankFailedError: print('raised again')"
    )
    assert run(body)[:2] == (0, "not again\n")


def test_tidying_up_that_waits_again_is_ended() -> None:
    body = (
        "import contextlib, io\n"
        "def destroy():\n    with contextlib.redirect_stderr(io.StringIO()): time.sleep(60)\n"
        "destroy()"
    )
    code, text, seconds = run(TOLD_IN_TIME + body)
    assert code == 1
    assert "on its way out" in text
    assert seconds < 45.0


@pytest.mark.parametrize("handler", ["lambda: print('handled')", "lambda: time.sleep(60)"])
def test_the_interpreters_own_end_is_left_out(handler: str) -> None:
    body = (
        "import atexit; own.told()\n"
        f"atexit.register({handler})\n"
        "class Late:\n    def __del__(self): print('taken down')\n"
        "late = Late(); late.own = late\n"
        f"ending.EXIT_SECONDS = {30.0 if 'handled' in handler else 2.0}\n"
        "ending.exit_with(7)"
    )
    code, text, seconds = run(body)
    assert "taken down" not in text
    assert seconds < 45.0
    if "handled" in handler:
        assert (code, text) == (7, "handled\n")
    else:
        assert code == 1
        assert "Timeout" in text
