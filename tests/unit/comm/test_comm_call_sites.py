"""Where a thread stands is told without touching its frames."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hytrain.comm.call_sites import place_of, stack_of


def stand_here(event: threading.Event) -> None:
    event.wait()


def call(function: Callable[[], None]) -> None:
    function()


def test_a_thread_that_waits_is_found_by_its_identity() -> None:
    end = threading.Event()
    threads = [threading.Thread(target=call, args=(lambda: stand_here(end),)) for _ in range(3)]
    for thread in threads:
        thread.start()
    identity = threads[1].ident
    assert identity is not None
    while not (stack := stack_of(identity)) or stack[0].function != "wait":
        pass  # it is on its way there
    names = [each.function for each in stack]
    assert names.index("stand_here") < names.index("<lambda>") < names.index("call")
    assert stack[0].file.endswith("threading.py")
    line = stand_here.__code__.co_firstlineno + 1
    assert place_of(identity) == f"{__file__}:{line} in stand_here"
    end.set()
    for thread in threads:
        thread.join()
    assert (stack_of(identity), place_of(identity)) == ([], "")


def test_a_thread_that_runs_is_seen_in_calls_that_it_makes() -> None:
    end = threading.Event()

    def deeper(left: int) -> None:
        if left:
            deeper(left - 1)

    def run() -> None:
        while not end.is_set():
            deeper(20)

    thread = threading.Thread(target=run)
    thread.start()
    assert thread.ident is not None
    depths: set[int] = set()
    while max(depths, default=0) < 5:
        names = [each.function for each in stack_of(thread.ident)]
        depths.add(names.count("deeper"))
        assert not names or names[-1] == "_bootstrap", names
    end.set()
    thread.join()
