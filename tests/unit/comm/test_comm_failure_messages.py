"""Which of several failures is the first one."""

from __future__ import annotations

import itertools

import pytest

from hytrain.comm import failure_messages as words
from hytrain.comm.failure_messages import Word, Words, is_connection_error

GLOO = RuntimeError(
    "[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:14528"
)


class DistError(RuntimeError):
    """As torch.distributed's."""


class DistBackendError(DistError):
    """As torch.distributed's."""


def heard(*said: Word, rank: int = 0) -> Words:
    ears = Words(rank)
    for word in said:
        assert ears.hear(word)
    return ears


def error(rank: int, *, final: bool = True, serial: int = 1) -> Word:
    return Word(rank, serial, "error", f"ValueError: of {rank}", final, rank)


def lost(rank: int, serial: int = 1) -> Word:
    return Word(rank, serial, "lost", "RuntimeError: gloo", True, rank)


def test_a_process_without_a_word_comes_before_those_who_lost_it() -> None:
    for said in itertools.permutations([lost(2), lost(3)]):
        number, text = heard(*said).cause({1: "process 7 on host a", 2: ""}, number=5) or (0, "")
        assert number == 1
        assert text.startswith("rank 1 was killed or has crashed (process 7 on host a): its")
        assert "out of memory" in text


def test_a_lost_connection_is_no_cause_before_it_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ears = heard(lost(2))
    assert ears.cause({}, number=5) is None
    monkeypatch.setattr(words, "SECOND_HAND_SECONDS", 0.0)
    number, text = ears.cause({}, number=5) or (0, "")
    assert number == 2
    assert "rank 2 has lost its connection" in text


def test_an_error_of_its_own_comes_before_processes_that_a_launcher_ends_for_it() -> None:
    assert (heard(error(2)).cause({1: "", 2: ""}, number=None) or (0,))[0] == 2


def test_all_that_went_at_once_are_named() -> None:
    number, text = heard().cause({1: "process 7", 3: "process 9"}, number=None) or (0, "")
    assert number == 1
    assert "so was rank 3 (process 9)" in text


def test_what_another_rank_has_found_is_believed() -> None:
    found = Word(2, 1, "found", "rank 1 was killed", True, 1)
    assert heard(found).cause({2: ""}, number=None) == (1, "rank 1 was killed")
    assert heard(found, rank=2).cause({}, number=9) is None, "its own word is no news"


def test_a_rank_that_was_given_up_ends_when_it_waits() -> None:
    ears = heard(Word(2, 1, "found", "rank 0 has failed: ...", True, 0))
    assert ears.cause({2: ""}, number=None) is None
    assert "because of this rank" in (ears.cause({2: ""}, number=4) or (0, ""))[1]


@pytest.mark.parametrize("number", [None, 6, 7])
def test_a_rank_that_has_closed_its_engine_is_no_failure_but_for_what_it_has_not_begun(
    number: int | None,
) -> None:
    ears = heard(Word(1, 1, "left", "", True, 1, issued=7))
    cause = ears.cause({1: "process 7"}, number=number)
    assert (cause is None) is (number != 7)
    if cause is not None:
        assert "rank 1 has closed its engine" in cause[1]


def test_a_script_that_ends_on_one_rank_is_a_failure_for_those_who_wait_for_it() -> None:
    ears = heard(Word(1, 1, "left", "its process has ended", True, 1, issued=7))
    assert ears.cause({1: "process 7"}, number=None) is None, "this one does its own last things"
    assert ears.cause({1: "process 7"}, number=6) is None
    assert "rank 1 has failed" in (ears.cause({}, number=7) or (0, ""))[1]


def test_words_that_overtake_each_other() -> None:
    mended = [error(1, final=False, serial=1), Word(1, 2, "back", "", False, 1)]
    for said in (mended, mended[::-1]):
        ears = heard(*said)
        assert ears.cause({}, number=5) is None
        gone = (ears.cause({1: ""}, number=None) or (0, ""))[1]
        assert "was killed" in gone, "it would be gone without a word now"
    assert not heard(*mended).hear(mended[0]), "passed on by another rank"


def test_a_failure_that_could_be_mended_cannot_when_the_process_is_gone() -> None:
    ears = heard(error(1, final=False))
    assert ears.cause({}, number=None) is None
    assert "ValueError: of 1" in (ears.cause({1: ""}, number=None) or (0, ""))[1]


def test_a_lost_connection_of_its_own_does_not_make_a_rank_patient() -> None:
    ears = heard(error(1, final=False))
    ears.say("lost", "RuntimeError: gloo", final=False)
    assert (ears.cause({}, number=3) or (0,))[0] == 1


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
