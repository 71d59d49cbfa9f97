"""Looks at the ranks' store, one at a time, in a thread that may block forever."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from hytrain.comm.daemon_executor import DaemonExecutor, Ended
from hytrain.comm.rank_status import News, StatusStore

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 10.0
"""How long a look may go unanswered before another one is made on a new connection: once the
network is back, the old connection may send again only after a minute."""


class StoreLooks:
    """One rank's looks at the store; used by its watching thread, which never waits for one."""

    def __init__(self, status: StatusStore, *, by_network: bool, ended: Callable[[], None]) -> None:
        """
        Args:
            status: the store's notes; its calls may block forever.
            by_network: whether a store that does not answer may be on another host.
            ended: called after each look, in the thread that made it.
        """
        self._status = status
        self._by_network = by_network
        self._ended = ended
        self._lane = self._new_lane()
        self._looking: tuple[Ended, Callable[[float, News], None]] | None = None
        self._unanswered_since: float | None = None
        self.began = -math.inf
        """When the last look began."""
        self.lost_since: float | None = None
        """Since when the store cannot be reached; None while it can."""

    def _new_lane(self) -> DaemonExecutor:
        return DaemonExecutor("hytrain-store", then=self._ended)

    def silent(self, now: float) -> float:
        """Seconds for which the store has not answered; 0 if it cannot be on another host."""
        return now - (self._unanswered_since or now) if self._by_network else 0.0

    @property
    def is_looking(self) -> bool:
        """Whether a look is under way."""
        return self._looking is not None

    def begin(
        self,
        now: float,
        look: Callable[[StatusStore], News],
        take: Callable[[float, News], None],
    ) -> None:
        """Begins a look. ``take``: called by :meth:`end` with the time and what was found."""
        status = self._status
        self.began = now
        self._unanswered_since = self._unanswered_since or now
        self._looking = self._lane.submit(lambda: look(status)), take

    def end(self, now: float) -> bool:
        """Takes what a look has found; returns whether one has ended."""
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
        """Ends the thread; if it does not end within ``seconds``, leaves it alone."""
        self._lane.close(seconds if self.lost_since is None else 0.0)
