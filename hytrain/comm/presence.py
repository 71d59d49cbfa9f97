"""Which ranks' processes are gone, whether they have said why or not."""

from __future__ import annotations

from collections.abc import Sequence

from hytrain.comm.local_processes import Process, watched_by
from hytrain.comm.peers import Peers


class Presence:
    """Presence as one rank sees it: the kernel tells of its own host, connections of others.

    Attributes:
        gone_since: when each process that is gone was first missed.
    """

    def __init__(self, rank: int, processes: Sequence[Process], peers: Peers | None) -> None:
        """
        Args:
            rank: this rank.
            processes: those of all ranks; (): they know of each other through the store only.
            peers: connections to ranks of other hosts, closed by this object; None: one host.
        """
        self._processes = processes
        self._here = watched_by(rank, processes)
        self._peers = peers
        self.gone_since: dict[int, float] = {}

    @property
    def has_other_hosts(self) -> bool:
        """Whether there are connections to ranks of other hosts."""
        return self._peers is not None

    def turn(self, now: float) -> None:
        """Finds out which processes are gone; called twice a second."""
        gone = [rank for rank, process in self._here.items() if process.is_gone()]
        if self._peers is not None:
            self._peers.turn()
            gone += self._peers.refused()
        for rank in gone:
            self.gone_since.setdefault(rank, now)

    def name(self, rank: int) -> str:
        """Returns the words for a rank's process."""
        return str(self._processes[rank]) if self._processes else "its process"

    def unreachable(self) -> dict[int, float]:
        """See :meth:`Peers.unreachable`."""
        return {} if self._peers is None else self._peers.unreachable()

    def suspects(self, text: str) -> tuple[list[int], bool]:
        """Returns ranks of other hosts to which a connection is or may be lost, and whether one of
        them has never answered. ``text``: torch's error, which may name a host's address."""
        if self._peers is None:
            return [], False
        unheard = self._peers.unheard()
        named = self._peers.ranks_at(text) - self._here.keys()
        ranks = sorted(named or unheard or self._peers.unreachable().keys())
        return ranks, not unheard.isdisjoint(ranks)

    def close(self) -> None:
        """Closes handles and connections."""
        for each in (self._peers, *self._here.values()):
            if each is not None:
                each.close()
