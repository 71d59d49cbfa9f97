"""A thread that sees which ranks' processes are gone, and through which the ranks' watches talk.

Of a rank on this machine the kernel tells (processes.py), of others their connections (peers.py).
The thread never uses the store: that may be what is gone, and its calls then take long.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hytrain.comm import processes
from hytrain.comm.failure_messages import Word, Words
from hytrain.comm.peers import Address, Peers, can_share_loopback, neighbours_of
from hytrain.comm.processes import Process
from hytrain.comm.rank_status import StatusStore

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.5
CONFIRM_SECONDS = 0.4
"""A process is gone for so long at least before it is said: its last words are still on the way."""
UNREACHABLE_SECONDS = 60.0
"""After that a host that does not answer is given up, by ranks that wait for it."""
_STATE_SECONDS = 2.0
_GREETING_SECONDS = 120.0
"""How long ranks wait at most for each other's addresses; they come as the engines are built."""


class ProcessMonitor:
    """Sees what becomes of the other ranks of a group."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        here: Process,
        status: StatusStore,
        words: Words,
        *,
        state: Callable[[], tuple[int, str]],
        notice: Callable[[], None],
    ) -> None:
        """Starts the threads; one of them ends when all ranks have greeted each other.

        Args:
            rank: this rank.
            world_size: ranks of the group.
            here: this process, as the others see it.
            status: the store, for the beginning.
            words: where the others' are noted.
            state: number and name of this rank's last collective.
            notice: called every turn, and when something was said.
        """
        self._rank = rank
        self._world_size = world_size
        self._here = here
        self._status = status
        self._words = words
        self._state = state
        self._notice = notice
        self._closed = threading.Event()
        self._processes: dict[int, Process] = {}
        self._visible: set[int] = set()
        self._gone_since: dict[int, float] = {}
        self._gone: dict[int, str] = {}
        self._stated_at = 0.0
        neighbours = neighbours_of(rank, world_size)
        self._peers = Peers(rank, neighbours, self._all_words)
        self._neighbours = neighbours
        status.put("process", asdict(here))
        # Two threads: to exchange addresses takes up to minutes, for which the other one must not
        # stop looking at processes. Both start last: they use everything above.
        self._greeter = threading.Thread(target=self._greet, name="hytrain-greeter", daemon=True)
        self._greeter.start()
        self._thread = threading.Thread(target=self._run, name="hytrain-monitor", daemon=True)
        self._thread.start()

    # -- for others ----------------------------------------------------------------------------

    def say(self, word: Word) -> None:
        """Tells the neighbours, who pass it on."""
        self._peers.send({"word": asdict(word)})

    def gone(self) -> dict[int, str]:
        """The ranks whose processes are gone, whatever they said, and what is known of them."""
        return dict(self._gone)

    def gone_for(self, rank: int) -> float:
        """Seconds since a rank's process is known to be gone."""
        return time.monotonic() - self._gone_since.get(rank, time.monotonic())

    def hears(self, rank: int) -> bool:
        """Whether a rank's words have come here by themselves: it needs no store for them."""
        return self._peers.was_connected(rank)

    def hears_all(self) -> bool:
        """Whether all neighbours' words come here, and this rank's to them."""
        return all(self._peers.was_connected(rank) for rank in self._neighbours)

    def unreachable(self) -> dict[int, str]:
        """Ranks on hosts that have not answered for long."""
        return {
            rank: f"{self._describe(rank)}, has not answered for {seconds:.0f} s"
            for rank in self._neighbours
            if (seconds := self._peers.unreachable_for(rank)) > UNREACHABLE_SECONDS
        }

    def lost_hosts(self) -> dict[int, str]:
        """Ranks on hosts that do not answer now."""
        return {
            rank: f"rank {rank} ({self._name(rank)}) nothing has been heard for "
            f"{self._peers.silent_for(rank):.0f} s, and its host does not answer"
            for rank in self._neighbours
            if self._peers.unreachable_for(rank) > 0.0
        }

    def unheard(self, text: str) -> dict[int, str]:
        """Ranks whose watches have never answered; those at an address in the text, if there are.

        Args:
            text: of an error, which may have the address of the other side.
        """
        ranks = [rank for rank in self._neighbours if not self.hears(rank)]
        there = [rank for rank in ranks if self._peers.is_at_address_in(rank, text)]
        return {rank: f"rank {rank} ({self._name(rank)})" for rank in there or ranks}

    def close(self) -> None:
        """Ends the threads and the connections; what was said still arrives."""
        self._closed.set()
        self._peers.close()
        # The notice of a turn calls into the watch, which the caller takes down next. With a limit,
        # as a thread may be connecting. A thread cannot join itself.
        for thread in (self._thread, self._greeter):
            if thread is not threading.current_thread():
                thread.join(timeout=2.0)

    # -- beginning -----------------------------------------------------------------------------

    def _greet(self) -> None:
        try:
            self._learn_processes()
            # close() ends the look before all processes are known. Ranks that were not found count
            # as other hosts' here: this one would listen on all interfaces.
            if self._closed.is_set():
                return
            everywhere = [self._here, *self._processes.values()]
            is_one_host = len(everywhere) == self._world_size and can_share_loopback(everywhere)
            self._status.put("address", asdict(self._peers.listen(is_one_host=is_one_host)))
            self._learn_addresses()
            for other in self._neighbours:
                # One of the two connects. Who was not reached at once may be busy.
                if other < self._rank and not any(self._tries(other) for _ in range(3)):
                    logger.info("rank %d cannot be reached, but over the store", other)
        except Exception as error:
            if not self._closed.is_set():
                logger.info("the ranks' watches have only the store to talk: %s", error)

    def _tries(self, other: int) -> bool:
        return self._closed.is_set() or self._peers.connect(other) or self._closed.wait(1.0)

    def _learn_processes(self) -> None:
        def learn(rank: int, packed: dict[str, Any]) -> None:
            process = Process(**packed)
            if processes.can_look_at(process, self._here):
                self._visible.add(rank)
            self._processes[rank] = process

        others = [rank for rank in range(self._world_size) if rank != self._rank]
        self._learn("process", others, learn)

    def _learn_addresses(self) -> None:
        self._learn(
            "address",
            self._neighbours,
            lambda rank, packed: self._peers.know(rank, Address.unpacked(packed)),
        )

    def _learn(
        self, kind: str, ranks: list[int], learn: Callable[[int, dict[str, Any]], None]
    ) -> None:
        missing, deadline = set(ranks), time.monotonic() + _GREETING_SECONDS
        while missing and time.monotonic() < deadline and not self._closed.is_set():
            for rank in sorted(missing):
                packed = self._status.find(kind, rank)
                if packed is not None:
                    learn(rank, packed)
                    missing.discard(rank)
            if missing:
                self._closed.wait(0.2)

    # -- every turn ----------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed.wait(TURN_SECONDS):
            # Words before processes: who has said why it goes was there when it said so.
            with suppress(Exception):
                self._peers.turn(self._hear)
            with suppress(Exception):
                self._look_at_processes()
            with suppress(Exception):
                self._tell_state()
            self._notice()

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        del rank  # it may have been passed on
        packed = message.get("word")
        if packed is None:
            return
        word = Word(**packed)
        if self._words.hear(word):
            self.say(word)
            self._notice()

    def _all_words(self) -> list[dict[str, Any]]:
        return [{"word": asdict(word)} for word in self._words.all()]

    def _tell_state(self) -> None:
        now = time.monotonic()
        if now - self._stated_at > _STATE_SECONDS:
            self._stated_at = now
            self._peers.send({"state": list(self._state())}, may_drop=True)

    def _look_at_processes(self) -> None:
        now = time.monotonic()
        # Of others than neighbours words may come late: their own neighbours see them go.
        for rank in self._neighbours:
            if rank in self._gone or rank not in self._processes:
                continue
            if rank in self._visible:
                is_gone = processes.is_gone(self._processes[rank])
            else:
                is_gone = self._peers.is_refused(rank)
            if not is_gone:
                self._gone_since.pop(rank, None)
            elif now - self._gone_since.setdefault(rank, now) > CONFIRM_SECONDS:
                self._gone[rank] = self._describe(rank)

    def _name(self, rank: int) -> str:
        return str(self._processes[rank]) if rank in self._processes else f"rank {rank}"

    def _describe(self, rank: int) -> str:
        where = self._name(rank)
        state = self._peers.state_of(rank)
        if not state:
            return where
        number, what = state
        return f"{where}; about two seconds before, it was at its collective {number + 1}, {what}"
