"""A process that is lost ends, whatever its thread does; each case is a process of its own."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.timeout(120)

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
