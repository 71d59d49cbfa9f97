"""What ranks tell each other beside their collectives: notes on the process group's store.

Every rank looks at the store twice a second and finds two counters: of the words that ranks have
said (failure_messages.py), and of requests to publish. A rank that waits long asks all ranks to
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
"""How long a word that was announced is waited for: its rank may have been killed in between."""
_MOST_WORDS = 16
"""Words that a rank reads in a look, at most: if all ranks fail, each reads only until it knows
why. Rank 0 reads everything, as it may hold the store and counts the ranks that know of its end."""
_MOST_WARNERS = 8
"""How many of the ranks that wait at one collective read where all others stand."""


class History:
    """A rank's collectives: their number, and the last ones in order, with their names."""

    def __init__(self) -> None:
        self.issued = 0
        self._recent: deque[tuple[int, str]] = deque(maxlen=_HISTORY)

    def add(self, what: str) -> None:
        """Adds a collective; ``what`` is the same on all ranks."""
        # Number and name in one append: the watching thread, which takes no lock, must never see a
        # number with another collective's name.
        self._recent.append((self.issued, what))
        self.issued += 1

    @property
    def last(self) -> tuple[int, str]:
        """The last collective's number, counted from 0, and name."""
        return self._recent[-1] if self._recent else (-1, "nothing")

    def recent(self) -> list[tuple[int, str]]:
        """The last collectives' numbers and names."""
        return list(self._recent)


@dataclass(frozen=True, slots=True)
class News:
    """What a look at the store has found.

    Attributes:
        began: when the look began (time.monotonic()): what was written before is in here.
        words: the new words.
        is_behind: whether there are more, which the next look finds.
        know_end: number of ranks that know that the first one ends, or have ended themselves.
        histories: collectives of this rank's neighbours, if it has asked.
        standings: if wanted, collectives issued by each rank, and the line at which it stands.
    """

    began: float
    words: list[Word]
    is_behind: bool
    know_end: int
    histories: dict[int, list[tuple[int, str]]]
    standings: dict[int, tuple[int, str]]


class StatusStore:
    """The notes. Calls cannot be interrupted and may block forever: for a thread of their own."""

    def __init__(self, rank: int, world_size: int, connect: Callable[[], Any], prefix: str) -> None:
        """``connect``: opens a connection of the thread's own. ``prefix``: prefix of keys; the same
        on the ranks of this group, another one for every engine.
        """
        self._rank = rank
        self._world_size = world_size
        self._connect = connect
        self._prefix = prefix
        self._store: Any = None  # torch's; its declared type lacks some of its methods
        self._heard = 0
        self._missing_since: float | None = None
        self._asked = 0
        self._knows_end = False

    def again(self) -> StatusStore:
        """Returns a copy that opens a new connection, for when this one's call does not return."""
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
        """Tells and hears everything; if it fails, it must be called again with the same words.

        Args:
            say: this rank's new words.
            history: this rank's collectives.
            place: says where this rank's thread stands.
            ask: whether to ask all ranks to publish, and to read what the neighbours have.
            want_standings: whether to read all ranks' standings, unless many ranks have wanted them
                at this collective.
            hears: whether to read the others' words (rank 0 always does); False: this rank ends,
                whatever they say.
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
        self._heard = heard  # not before: else a look that fails after it would lose the words
        return News(began, words, len(words) == _MOST_WORDS, know_end, histories, standings)

    def _new_words(self) -> tuple[list[Word], int]:
        """Returns the new words, and the number of the last one."""
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
        # The store ends with the process that holds it, mostly the first rank's. It stays until the
        # others know why it ends; otherwise they would take it for killed.
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
