"""What is said of a failure, and the call sites that are named."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest

from hytrain.comm.call_sites import place_of, stack_of
from hytrain.comm.failure_messages import Word, Words, is_connection_error
from hytrain.errors import OutOfStepError

# -- which of several failures is the first one ------------------------------------------------

GLOO = RuntimeError(
    "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:14528"
)


class DistError(RuntimeError):
    """As torch.distributed's."""


class DistBackendError(DistError):
    """As torch.distributed's."""


def cause(
    *said: Word, gone: dict[int, str] | None = None, number: int | None = None, rank: int = 0
) -> tuple[int | None, str]:
    """What a rank that has heard this finds; (-1, "") for nothing."""
    ears = Words(rank)
    for word in said:
        ears.hear(word)
    about, error = ears.cause(gone or {}, number=number) or (-1, "")
    assert (about is None) is isinstance(error, OutOfStepError)
    return about, str(error)


def error(rank: int, *, final: bool = True) -> Word:
    return Word(rank, "error", f"ValueError: of {rank}", final)


def test_a_process_without_a_word_was_killed() -> None:
    number, text = cause(gone={1: "process 7 on host a", 2: "process 9"})
    assert number == 1
    assert text.startswith("rank 1 was killed or has crashed (process 7 on host a); so was rank 2")
    assert "out of memory" in text


def test_an_error_of_its_own_comes_before_processes_that_a_launcher_ends_for_it() -> None:
    assert cause(error(2), gone={1: "", 2: ""})[0] == 2


def test_what_another_rank_has_found_is_believed_before_what_follows_of_it() -> None:
    found = Word(2, "found", "rank 1 was killed", True, about=1)
    assert cause(error(3), found, gone={2: ""}) == (1, "rank 1 was killed")
    assert cause(found, rank=2, number=9)[0] == -1, "its own word is no news"
    assert cause(Word(2, "apart", "out of step", True)) == (None, "out of step")


def test_a_rank_that_was_given_up_ends_when_it_waits() -> None:
    found = Word(2, "found", "rank 0 has failed: ...", True, about=0)
    assert cause(found, gone={2: ""})[0] == -1
    assert "because of this rank" in cause(found, gone={2: ""}, number=4)[1]


@pytest.mark.parametrize("text", ["", "its process has ended"])
def test_a_rank_that_has_left_is_a_failure_for_those_who_wait_for_it(text: str) -> None:
    left = Word(1, "left", text, True, issued=7)
    assert cause(left, gone={1: "process 7"})[0] == -1, "this one does its own last things"
    assert cause(left, gone={1: "process 7"}, number=6)[0] == -1, "it has begun that"
    assert cause(left, number=7)[0] == 1
    assert ("has failed" if text else "has closed its engine") in cause(left, number=7)[1]


def test_a_failure_that_could_be_mended_cannot_when_the_process_is_gone() -> None:
    mended = Word(1, "back", "", False)
    assert cause(error(1, final=False))[0] == -1
    assert "ValueError: of 1" in cause(error(1, final=False), gone={1: ""})[1]
    assert cause(error(1, final=False), mended, number=5)[0] == -1
    assert "was killed" in cause(error(1, final=False), mended, gone={1: ""})[1]


def test_last_words_are_not_written_over() -> None:
    assert "of 1" in cause(error(1), Word(1, "left", "", True))[1]


def test_who_will_not_say_any_more_that_it_knows_of_an_end() -> None:
    ears = Words(0)
    for word in (
        Word(1, "left", "", True),
        Word(2, "found", "rank 5 was killed", True, about=5),
        Word(3, "back", "", False),
        Word(6, "found", "rank 2 has failed", True, about=2),
    ):
        ears.hear(word)
    assert ears.silent({1, 3, 4}) == {3, 4, 5}


def chained(*errors: Exception) -> Exception:
    for outer, inner in itertools.pairwise(errors):
        outer.__cause__ = inner
    return errors[0]


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (GLOO, True),
        (DistBackendError("NCCL error: remote process exited"), True),
        (ConnectionResetError("store"), True),
        (chained(ValueError("the save has failed"), GLOO), True),
        (ValueError("connection"), False),
        (RuntimeError("The size of tensor a must match"), False),
        (RuntimeError("gloo: invalid argument"), False),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_errors_that_are_another_ranks_doing(raised: Exception, expected: bool) -> None:
    assert is_connection_error(raised) is expected


# -- where a thread stands is told without touching its frames ---------------------------------


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
