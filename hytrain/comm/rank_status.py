"""What ranks tell each other beside their collectives: notes on the process group's store.

Every rank looks at the store twice a second and finds two counters: of the words that ranks have
said (failure_messages.py), and of requests to publish. A rank that waits for long asks all to
publish which collectives they have issued and where they stand.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hytrain.comm.failure_messages import Word
from hytrain.comm.peers import neighbours_of
from hytrain.testing import faults

_HISTORY = 256
_UNWRITTEN_SECONDS = 2.0
"""After that a word that was announced is not waited for: its rank was killed in between."""
_MOST_WORDS = 16
"""That a rank reads in a look: where all fail, each reads until it knows why, not all that is said.
Rank 0 reads everything, as it may hold the store and counts who knows of its end."""
_MOST_WARNERS = 8
"""Ranks that read where all others stand, of those that wait at one collective."""


class History:
    """A rank's collectives, in their order; the last ones have their names."""

    def __init__(self) -> None:
        self.issued = 0
        self._recent: deque[tuple[int, str]] = deque(maxlen=_HISTORY)

    def add(self, what: str) -> None:
        """One more; ``what`` is the same on all ranks."""
        # Number and name in one append: the watching thread, which takes no lock, must never see a
        # number with another one's name.
        self._recent.append((self.issued, what))
        self.issued += 1

    @property
    def last(self) -> tuple[int, str]:
        """The last one's number, from 0, and name."""
        return self._recent[-1] if self._recent else (-1, "nothing")

    def recent(self) -> list[tuple[int, str]]:
        """The last ones."""
        return list(self._recent)


@dataclass(frozen=True, slots=True)
class News:
    """What a look at the store has found.

    Attributes:
        began: when, of time.monotonic(): what was written before is in here.
        words: those that are new.
        is_behind: there are more, which the next look finds.
        know_end: ranks that know that the first one ends, or have ended themselves.
        histories: of this rank's neighbours, if it has asked.
        standings: of all ranks, if wanted: collectives issued, and the line that they stand at.
    """

    began: float
    words: list[Word]
    is_behind: bool
    know_end: int
    histories: dict[int, list[tuple[int, str]]]
    standings: dict[int, tuple[int, str]]


class StatusStore:
    """The notes. Its calls cannot be interrupted and may take for ever: of a thread of its own."""

    def __init__(self, rank: int, world_size: int, connect: Callable[[], Any], prefix: str) -> None:
        """``connect``: makes a connection of the thread's own. ``prefix``: of keys; the same for
        the ranks of this group, another one for every engine.
        """
        self._rank = rank
        self._world_size = world_size
        self._connect = connect
        self._prefix = prefix
        self._store: Any = None  # torch's, whose type is too general to say what it has
        self._heard = 0
        self._missing_since: float | None = None
        self._asked = 0
        self._knows_end = False

    def again(self) -> StatusStore:
        """The same on a connection of its own, where this one's call does not return."""
        other = copy.copy(self)
        other._store = None
        return other

    def look(
        self,
        say: Sequence[Word],
        history: History,
        place: Callable[[], str],
        *,
        ask: bool = False,
        want_standings: bool = False,
        hears: bool = True,
    ) -> News:
        """Tells and hears everything; to be made again with the same words where it has failed.

        Args:
            say: this rank's new words.
            history: of this rank.
            place: says where its thread stands.
            ask: all ranks to publish; and to read what its neighbours have.
            want_standings: of all ranks, where few have wanted them at this collective.
            hears: False: this rank ends, whatever others say.
        """
        began = time.monotonic()
        try:
            self._store = self._store or self._connect()
            for word in say:
                number = self._add("said", 1)
                faults.point("watch: a word")
                self._put("word", number, asdict(word))
            if self._asked != (asked := self._add("asked", int(ask))):
                self._put("history", self._rank, history.recent())
                self._put("standing", self._rank, (history.issued, place()))
                self._asked = asked
            reads = hears or self._rank == 0
            words, heard = self._new_words() if reads else ([], self._heard)
            know_end = self._tell_end([*say, *words])
            # Two sequences that differ do so between some neighbours: no rank has to read all.
            around = neighbours_of(self._rank, self._world_size) if ask else ()
            histories = {r: list(map(tuple, self._find("history", r) or ())) for r in around}
            warners = self._add(f"warners/{history.issued}", 1) if want_standings else math.inf
            everyone = range(self._world_size) if warners <= _MOST_WARNERS else ()
            standings = {r: self._find("standing", r) or (0, "") for r in everyone}
        except BaseException:
            self._store = None  # the next look makes a new connection
            raise
        self._heard = heard  # not before: else a look that fails behind it would lose the words
        return News(began, words, len(words) == _MOST_WORDS, know_end, histories, standings)

    def _new_words(self) -> tuple[list[Word], int]:
        """And the number of the last one."""
        words, heard = list[Word](), self._heard
        said = self._add("said", 0)
        while heard < said and (len(words) < _MOST_WORDS or self._rank == 0):
            note = self._find("word", heard + 1)
            if note is not None:
                words.append(Word(**note))
            else:
                self._missing_since = self._missing_since or time.monotonic()
                if time.monotonic() - self._missing_since < _UNWRITTEN_SECONDS:
                    break
            self._missing_since = None
            heard += 1
        return words, heard

    def _tell_end(self, words: Sequence[Word]) -> int:
        # The store ends with the process that holds it, the first rank's mostly: that one stays
        # until the others know why it goes, or would take it for killed.
        if any(word.final and word.rank in (0, self._rank) for word in words):
            know_end = self._add("over", int(not self._knows_end))
            self._knows_end = True  # not before: a rank that is never counted is waited for
            return know_end
        return self._add("over", 0) if self._knows_end else 0

    def _add(self, counter: str, amount: int) -> int:
        return int(self._store.add(f"{self._prefix}/{counter}", amount))

    def _put(self, kind: str, number: int, note: Any) -> None:
        self._store.set(f"{self._prefix}/{kind}/{number}", json.dumps(note))

    def _find(self, kind: str, number: int) -> Any:
        key = f"{self._prefix}/{kind}/{number}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None
