"""What ranks say when they fail or leave, and which of it is the first cause.

A rank that has failed makes others fail: their connections to it break, or their launcher ends
them. So a rank that fails says so before it goes; one whose process is gone and that has said
nothing was killed or has crashed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from hytrain.errors import OutOfStepError, RankFailedError

Kind = Literal["error", "back", "found", "apart", "left"]
Cause = tuple[int | None, RankFailedError | OutOfStepError]
"""The rank that is the cause (None: no single one), and what to raise for it."""

_CONNECTION_WORDS = ("connection", "timed out", "timeout", "broken pipe", "socket", "read error")
_AGAIN = "Start the job again from a checkpoint"


@dataclass(frozen=True, slots=True)
class Word:
    """A word: a message from one rank to all.

    Attributes:
        kind: "error": it has failed by itself; "back": it has recovered from that; "found": it ends
            because ``about`` has failed; "apart": it ends because the ranks are out of step;
            "left": it has closed its engine and issues no more collectives.
        final: its process, or its part in the job, ends; otherwise it may come back.
        about: the rank that is the cause.
        issued: number of collectives that it has begun.
    """

    rank: int
    kind: Kind
    text: str
    final: bool
    about: int | None = None
    issued: int = 0


def is_connection_error(error: BaseException | None) -> bool:
    """Whether an exception comes from a collective that broke off because of another rank."""
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
    """The last word of each rank; used by the watch's thread only."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._last: dict[int, Word] = {}

    def hear(self, word: Word) -> None:
        """Notes a word; a final one is never replaced."""
        before = self._last.get(word.rank)
        if before is None or not before.final:
            self._last[word.rank] = word

    def silent(self, gone: Iterable[int]) -> set[int]:
        """Ranks that this one or others have found to be gone, and that have not said why."""
        given_up = {
            w.about for w in self._last.values() if w.kind == "found" and w.about is not None
        }
        return {*gone, *given_up} - {word.rank for word in self._last.values() if word.final}

    def has_anyone_left(self) -> bool:
        """Whether a rank has closed its engine: then no rank needs this one for much longer."""
        return any(word.kind == "left" for word in self._last.values())

    def cause(self, gone: Mapping[int, str], *, number: int | None) -> Cause | None:
        """Returns the rank that failed first, as far as can be told; None if none has failed.

        ``gone``: descriptions of the ranks whose processes are gone. ``number``: that of the
        collective that this rank has waited for longer than usual; None: it does not wait.
        """
        own = self._last.get(self._rank)
        others = [word for word in self._last.values() if word.rank != self._rank]
        causes = [_found(word, self._rank, number) for word in others]
        # If all have failed alike, they may all go on: no rank waits for another.
        is_late = number is not None and (own is None or own.kind != "error")
        causes += [
            (word.rank, _has_failed(word))
            for word in others
            if word.kind == "error" and (word.final or is_late or word.rank in gone)
        ]
        causes += [self._killed(gone), *(_left(word, number) for word in others)]
        return next((cause for cause in causes if cause is not None), None)

    def _killed(self, gone: Mapping[int, str]) -> Cause | None:
        silent = [r for r in gone if r not in self._last or self._last[r].kind == "back"]
        if not silent:
            return None
        first, *others = silent
        also = "".join(f"; so was rank {rank} ({gone[rank]})" for rank in others)
        return first, RankFailedError(
            f"rank {first} was killed or has crashed ({gone[first]}){also}: its process is gone "
            "without a word, and the others cannot go on without it. Was the host out of memory, "
            "or did the script call os._exit? See the kernel's log (dmesg) there, and its "
            f"launcher's log for the signal or exit code. {_AGAIN}"
        )


def _found(word: Word, here: int, number: int | None) -> Cause | None:
    if word.kind == "apart":
        return None, OutOfStepError(word.text)
    if word.kind == "found" and word.about != here:
        return word.about, RankFailedError(word.text)
    # It has given this rank up, for whatever reason; this rank may not have noticed.
    if word.kind == "found" and number is not None:
        text = f"rank {word.rank} has ended because of this rank. It says: {word.text}"
        return word.rank, RankFailedError(f"{text}\n{_AGAIN}")
    return None


def _left(word: Word, number: int | None) -> Cause | None:
    # Collectives that it has issued end without it.
    if word.kind != "left" or number is None or word.issued > number:
        return None
    if word.text:
        return word.rank, _has_failed(word)
    return word.rank, RankFailedError(
        f"rank {word.rank} has closed its engine (engine.destroy()) after {word.issued} "
        f"collectives, and this rank waits for it at number {number + 1}: all ranks must "
        "make the same steps"
    )


def _has_failed(word: Word) -> RankFailedError:
    return RankFailedError(
        f"rank {word.rank} has failed, and the others cannot go on without it. "
        f"It says: {word.text}\n{_AGAIN}"
    )
