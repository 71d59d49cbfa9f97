"""What a rank has said, until the others can know it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from hytrain.comm.failure_messages import Word

_FLUSH_SECONDS = 10.0


class Outbox:
    """The words of one rank that are not on the store yet; any thread may add one.

    Attributes:
        changed: guards everything here, and whatever must happen together with a word. Notified
            when the store was used: flush() waits for it.
        has_ended: whether a final word was said.
        is_flushing: whether flush() waits.
    """

    def __init__(self, rank: int, world_size: int, is_cut_off: Callable[[], bool]) -> None:
        """``is_cut_off``: whether no word will reach the store any more."""
        self.changed = threading.Condition()
        self.has_ended = False
        self.is_flushing = False
        self._rank = rank
        self._world_size = world_size
        self._is_cut_off = is_cut_off
        self._unsent: list[Word] = []
        self._know_end = 0

    def say(self, word: Word) -> None:
        """Adds a word."""
        with self.changed:
            self.has_ended = self.has_ended or word.final
            self._unsent.append(word)

    @property
    def words(self) -> tuple[Word, ...]:
        """The words that are to be sent."""
        return tuple(self._unsent)

    def sent(self, count: int, know_end: int) -> None:
        """Notes that ``count`` words are on the store; ``know_end`` ranks know of rank 0's end."""
        with self.changed:
            del self._unsent[:count]
            self._know_end = know_end

    def used_store(self) -> None:
        """Notes that a look has ended, in vain or not."""
        with self.changed:
            self.is_flushing = self.is_flushing and not self._is_flushed()
            self.changed.notify_all()

    def flush(self, wake: Callable[[], None]) -> None:
        """Returns when the others can know what was said; after 10 s in any case.

        The store may end with this process: then they must have read it. ``wake``: wakes the thread
        that sends.
        """
        with self.changed:
            self.is_flushing = True
            wake()
            self.changed.wait_for(self._is_flushed, _FLUSH_SECONDS)

    def _is_flushed(self) -> bool:
        if self._is_cut_off():
            return True
        is_holder = self._rank == 0 and self.has_ended
        return not self._unsent and (self._know_end >= self._world_size or not is_holder)
