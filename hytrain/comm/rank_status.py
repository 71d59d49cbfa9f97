"""What ranks tell each other beside their collectives: notes on the process group's store.

A note is what a rank has said (``words``), or the collectives that it has issued and where it
stands (``history``); at start each leaves which process it is (``process``) and where it listens
(``address``). The mark ``trouble`` asks all ranks to look, and to publish their histories.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Protocol

from hytrain.comm.call_sites import Standing
from hytrain.comm.failure_messages import Word

_HISTORY = 1024

_numbers = itertools.count()
"""All ranks make their status stores in one order, engine by engine: the numbers are the same."""


class Store(Protocol):
    """What is needed of torch.distributed's stores."""

    def set(self, key: str, value: str, /) -> None:
        """Sets a key."""
        ...

    def get(self, key: str, /) -> bytes:
        """A key's value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are set."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Unsets a key."""
        ...


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

    def packed(self) -> dict[str, Any]:
        """For the store: every name once."""
        recent = list(self._recent)
        names = sorted({what for _, what in recent})
        number_of = {name: number for number, name in enumerate(names)}
        return {
            "first": recent[0][0] if recent else 0,
            "names": names,
            "recent": [number_of[what] for _, what in recent],
        }


def by_number(packed: dict[str, Any]) -> dict[int, str]:
    """What a rank's collectives were, by their number."""
    names = packed["names"]
    return dict(enumerate((names[number] for number in packed["recent"]), packed["first"]))


class StatusStore:
    """One rank's view of the ranks' notes; may be used by several threads."""

    def __init__(
        self, rank: int, world_size: int, connect: Callable[[], Store], *, group: str
    ) -> None:
        """
        Args:
            rank: this rank.
            world_size: ranks of the group.
            connect: makes a connection of the caller's own to the store that the ranks share.
            group: the same for the ranks of this group, and another for those of others.
        """
        self._rank = rank
        self._world_size = world_size
        self._connect = connect
        self._prefix = f"hytrain/watch/{group}/{next(_numbers)}"
        # Several threads use it: a check and what follows from it must be one piece, and
        # reconnect() must not replace the connection in between.
        self._lock = threading.Lock()
        self._store = connect()
        self._trouble_since: float | None = None
        self._published = 0

    def reconnect(self) -> None:
        """A new connection, where one can be had. May take long: the store may be gone."""
        with suppress(Exception):
            store = self._connect()  # without the lock: it may take long, and others must go on
            with self._lock:
                self._store = store

    def ask(self) -> None:
        """Asks all ranks to look and to publish."""
        with self._lock:
            self._store.set(f"{self._prefix}/trouble", "1")

    def is_asked(self, *, forget_after: float) -> bool:
        """Whether a rank has asked.

        Args:
            forget_after: seconds; a rank that is still in trouble then asks again.
        """
        key = f"{self._prefix}/trouble"
        with self._lock:
            if not self._store.check([key]):
                self._trouble_since = None
                return False
            now = time.monotonic()
            if self._trouble_since is None:
                self._trouble_since = now
            elif now - self._trouble_since > forget_after:
                self._store.delete_key(key)
        return True

    def publish(self, history: History, standing: Standing | None, waited: float) -> None:
        """Tells what this rank has issued, where its thread stands, and how long it has waited."""
        stands = None if standing is None else asdict(standing)
        self._published += 1
        now = {"serial": self._published, "standing": stands, "waited": waited}
        self.put("history", {**history.packed(), **now})

    def say(self, words: Sequence[Word]) -> None:
        """Tells of failures here: everything that this rank has said."""
        self.put("words", [asdict(word) for word in words])

    def words(self) -> list[Word]:
        """What all ranks have said."""
        return [Word(**each) for said in self._read("words").values() for each in said]

    def histories(self) -> dict[int, dict[str, Any]]:
        """What each rank has issued when it published last."""
        return self._read("history")

    def put(self, kind: str, value: Any) -> None:
        """This rank's note of a kind."""
        with self._lock:
            self._store.set(f"{self._prefix}/{kind}/{self._rank}", json.dumps(value))

    def find(self, kind: str, rank: int) -> Any:
        """A rank's note of a kind; None: it has left none."""
        key = f"{self._prefix}/{kind}/{rank}"
        with self._lock:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _read(self, kind: str) -> dict[int, Any]:
        found = {rank: self.find(kind, rank) for rank in range(self._world_size)}
        return {rank: note for rank, note in found.items() if note is not None}
