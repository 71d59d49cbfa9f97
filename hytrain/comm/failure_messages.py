"""What ranks say when they fail or leave, and which of it is the first cause.

A rank that has failed makes others fail: their connections to it break, or their launcher ends
them. A rank that reports it must tell the first failure from what follows of it. So a rank that
fails says so before it goes, and says what kind of failure it is; a rank whose process is gone and
that has said nothing was killed or has crashed, and comes before all who only lost a connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["error", "lost", "back", "found", "left"]
SECOND_HAND_SECONDS = 4.0
"""How long a lost connection waits for what is behind it before it is taken for the cause."""

_CONNECTION_WORDS = ("connection", "timed out", "timeout", "broken pipe", "socket", "read error")
_AGAIN = "Start the job again from a checkpoint"


@dataclass(frozen=True, slots=True)
class Word:
    """Something that a rank says, to all.

    Attributes:
        rank: which one.
        serial: counts what it says.
        kind: "error": it has failed of its own; "lost": a collective of its has failed, and it does
            not know why; "back": neither holds any more; "found": it has failed because ``about``
            has; "left": it has closed its engine, and nothing comes any more.
        text: for people.
        final: its process ends; otherwise it may come back.
        about: the rank that is the cause.
        issued: collectives that it has begun.
    """

    rank: int
    serial: int
    kind: Kind
    text: str
    final: bool
    about: int
    issued: int = 0


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an exception is, or comes of, a collective that broke off: another rank's doing."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, ConnectionError):
            return True
        if any(kind.__name__ == "DistError" for kind in type(error).__mro__):
            return True
        text = str(error).lower()
        is_gloo = isinstance(error, RuntimeError) and "gloo" in text
        if is_gloo and any(word in text for word in _CONNECTION_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


class Words:
    """What the ranks have said; used by several threads."""

    def __init__(self, rank: int) -> None:
        """
        Args:
            rank: this one.
        """
        self._rank = rank
        # The training, watching and monitoring threads all add words: without the lock a table
        # could change while another thread iterates over it, or two words get one number.
        self._lock = threading.Lock()
        self._serial = 0
        self._states: dict[int, Word] = {}
        self._found: dict[int, Word] = {}
        self._left: dict[int, Word] = {}
        self._heard_at: dict[tuple[int, int], float] = {}

    def say(
        self, kind: Kind, text: str, *, final: bool, about: int | None = None, issued: int = 0
    ) -> Word:
        """A word of this rank's own."""
        with self._lock:
            self._serial += 1
            serial = self._serial
        about = self._rank if about is None else about
        word = Word(self._rank, serial, kind, text, final, about, issued)
        self.hear(word)
        return word

    def hear(self, word: Word) -> bool:
        """Takes note of a word; whether it was new."""
        with self._lock:
            key = (word.rank, word.serial)
            if key in self._heard_at:
                return False
            self._heard_at[key] = time.monotonic()
            if word.kind in ("found", "left"):
                (self._found if word.kind == "found" else self._left)[word.rank] = word
                return True
            before = self._states.get(word.rank)
            # Words may overtake each other on their way; the last words are not written over.
            if before is None or (before.serial < word.serial and not before.final):
                self._states[word.rank] = word
        return True

    def all(self) -> list[Word]:
        """Everything that holds, of all ranks."""
        with self._lock:
            tables = (self._states, self._found, self._left)
            return [word for table in tables for word in table.values()]

    def own(self) -> list[Word]:
        """This rank's."""
        return [word for word in self.all() if word.rank == self._rank]

    def _has_spoken(self, rank: int) -> bool:
        """Whether a rank has said why its process may be gone."""
        state = self._states.get(rank)
        has_state = state is not None and state.kind != "back"
        return has_state or rank in self._found or rank in self._left

    def has_anyone_left(self) -> bool:
        """Whether a rank has closed its engine: no rank needs this one for long."""
        return bool(self._left)

    def cause(self, gone: Mapping[int, str], *, number: int | None) -> tuple[int, str] | None:
        """The rank that has failed first, as far as can be told, and what to say of it.

        Args:
            gone: descriptions of the ranks whose processes are gone without a word.
            number: of the collective that this rank has waited for, longer than is usual; None: it
                does not wait.
        """
        with self._lock:
            return (
                self._cause_found()
                or self._cause_said(gone, is_late=number is not None)
                or self._cause_gone(gone)
                or self._cause_left(number)
                or self._cause_lost(gone, is_late=number is not None)
            )

    def _cause_found(self) -> tuple[int, str] | None:
        for word in self._found.values():
            if self._rank not in (word.rank, word.about):
                return word.about, word.text
        return None

    def _cause_said(self, gone: Mapping[int, str], *, is_late: bool) -> tuple[int, str] | None:
        # Where all have failed alike they may all go on; no rank waits for another.
        own = self._states.get(self._rank)
        may_come_back = not is_late or (own is not None and own.kind == "error")
        for rank, word in self._states.items():
            holds = word.kind == "error" and rank != self._rank
            if holds and (word.final or rank in gone or not may_come_back):
                return rank, _has_failed(rank, word.text)
        return None

    def _cause_gone(self, gone: Mapping[int, str]) -> tuple[int, str] | None:
        silent = [rank for rank in gone if not self._has_spoken(rank)]
        if not silent:
            return None
        first, *others = silent
        also = "".join(f"; so was rank {rank} ({gone[rank]})" for rank in others)
        return first, (
            f"rank {first} was killed or has crashed ({gone[first]}){also}: its process is gone "
            "without a word, and the others cannot go on without it. Was the host out of memory, "
            "or did the script call os._exit? See the kernel's log (dmesg) there, and its "
            f"launcher's log for the signal or exit code. {_AGAIN}"
        )

    def _cause_left(self, number: int | None) -> tuple[int, str] | None:
        for rank, word in self._left.items():
            # What it has begun comes to its end without it.
            if number is None or rank == self._rank or word.issued > number:
                continue
            if word.text:
                return rank, _has_failed(rank, word.text)
            return rank, (
                f"rank {rank} has closed its engine (engine.destroy()) after {word.issued} "
                f"collectives, and this rank waits for it at number {number + 1}: all ranks must "
                "make the same steps"
            )
        return None

    def _cause_lost(self, gone: Mapping[int, str], *, is_late: bool) -> tuple[int, str] | None:
        now = time.monotonic()
        for rank, word in self._states.items():
            if rank == self._rank or word.kind != "lost":
                continue
            if now - self._heard_at[rank, word.serial] < SECOND_HAND_SECONDS:
                continue
            if word.final or is_late or rank in gone:
                return rank, (
                    f"rank {rank} has lost its connection to another one, which has said nothing "
                    f"and is not known to be gone. It says: {word.text}\n{_AGAIN}"
                )
        for rank, word in self._found.items():
            # It has given this one up, whatever for; this one may not have noticed.
            if rank != self._rank and word.about == self._rank and is_late:
                return rank, (
                    f"rank {rank} has ended because of this rank. It says: {word.text}\n{_AGAIN}"
                )
        return None


def _has_failed(rank: int, text: str) -> str:
    return (
        f"rank {rank} has failed, and the others cannot go on without it. It says: {text}\n{_AGAIN}"
    )
