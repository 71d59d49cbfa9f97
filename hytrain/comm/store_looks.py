"""Looks at the ranks' store, one at a time, in a thread that may wait for ever."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from hytrain.comm.daemon_executor import DaemonExecutor, Ended
from hytrain.comm.rank_status import News, StatusStore

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 10.0
"""For which a look at the store waits before another one is made, by a connection of its own: when
the network is there again, what was sent before may be sent once more only after a minute."""


class StoreLooks:
    """The looks of one rank; of its watching thread, which never waits for one."""

    def __init__(self, status: StatusStore, *, by_network: bool, ended: Callable[[], None]) -> None:
        """
        Args:
            status: whose calls may take for ever.
            by_network: whether one that does not answer may be on another host.
            ended: called in the thread of a look that has ended.
        """
        self._status = status
        self._by_network = by_network
        self._ended = ended
        self._lane = self._new_lane()
        self._looking: tuple[Ended, Callable[[float, News], None]] | None = None
        self._unanswered_since: float | None = None
        self.began = -math.inf
        """When the last one did."""
        self.lost_since: float | None = None
        """Since when the store cannot be reached."""

    def _new_lane(self) -> DaemonExecutor:
        return DaemonExecutor("hytrain-store", then=self._ended)

    def silent(self, now: float) -> float:
        """Seconds for which another host has not answered."""
        return now - (self._unanswered_since or now) if self._by_network else 0.0

    @property
    def is_looking(self) -> bool:
        """Whether one is under way."""
        return self._looking is not None

    def begin(
        self,
        now: float,
        look: Callable[[StatusStore], News],
        take: Callable[[float, News], None],
    ) -> None:
        """Begins one. ``take``: called with what it has found, and when, by :meth:`end`."""
        status = self._status
        self.began = now
        self._unanswered_since = self._unanswered_since or now
        self._looking = self._lane.submit(lambda: look(status)), take

    def end(self, now: float) -> bool:
        """Takes what a look has found; False where none has ended."""
        if self._looking is None:
            return False
        ended, take = self._looking
        if not ended.is_set():
            if min(self.silent(now), now - self.began) > RECONNECT_SECONDS:
                self._reconnect()
            return False
        self._looking = None
        try:
            news = ended.result()
        except Exception as error:
            logger.debug("the store: %s", error)
            if self.silent(now) < RECONNECT_SECONDS:  # else the network may be down
                self.lost_since = self.lost_since or now
        else:
            self.lost_since = self._unanswered_since = None
            take(now, news)
        return True

    def _reconnect(self) -> None:
        self._status, self._looking = self._status.again(), None
        self._lane.close()  # its thread ends when its call returns, if ever
        self._lane = self._new_lane()

    def close(self, seconds: float) -> None:
        """Ends the thread; one that does not end within seconds is left alone."""
        self._lane.close(seconds if self.lost_since is None else 0.0)
