"""Compares what all ranks of a group must have in common, on the process group's store.

Not by a collective: if one rank has come somewhere else, two collectives that do not fit would
meet and hang. Each rank leaves a hash; the last one to come compares them for all and leaves what
it has found, so that only one rank reads all others' notes. Values are read only if the hashes
differ, and only those of a few ranks.
"""

from __future__ import annotations

import hashlib
import json
import logging
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from hytrain.errors import RankFailedError

logger = logging.getLogger(__name__)

WARN_SECONDS = 30.0
_LONGEST_PAUSE = 0.2
_LINGER_SECONDS = 5.0
_MOST_LINES = 8
_MOST_RANKS = 4
_MOST_KINDS = 8
"""Kinds of ranks (those with equal facts) whose values every rank reads, at most."""
_MOST_SAMPLES = 64
_MOST_ASKING = 64
"""Ranks that find out which ones have not come, at most; further ranks only count them."""
_started: Counter[str] = Counter()
"""Number of comparisons begun by each group: all its ranks make them in one order."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the ranks of a group differ; the same on all of them.

    Attributes:
        differences: a line for each key that differs, with the values and the ranks that have them.
        other_samples: ranks whose sample is not that of the first rank; only some if they are many.
    """

    differences: Sequence[str]
    other_samples: Sequence[int]


def compare(
    facts: Mapping[str, str], group: dist.ProcessGroup | None, sample: str = ""
) -> Comparison:
    """Compares the ranks' facts; all ranks of the group call it, or :func:`stay_away`.

    Args:
        facts: this rank's values, as text, by key.
        group: None for the default one.
        sample: a text that may differ from rank to rank.

    Raises:
        RankFailedError: a rank has not come within the process group's timeout.
    """
    notes = _Notes(group)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    notes.come(digest, sample)
    outcome = notes.outcome()
    # A rank that stays away leaves no hash, and few facts.
    kinds, away, others = outcome["kinds"], outcome["away"], outcome["others"]
    if len(kinds) == 1:
        return Comparison((), others)
    notes.put("facts", facts)
    words = {int(rank): text for rank, text in kinds.items()}
    values = notes.all("facts", list(words))
    notes.linger()
    keys = dict.fromkeys(key for of_rank in values.values() for key in of_rank)
    if away is not None:
        keys = values[away]
    return Comparison(differences(values, list(keys), words), others)


def stay_away(facts: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """Tells ranks that compare that this one does something else; does not wait for them.

    ``facts``: what it does instead, which they find to differ; they have these keys, too.
    """
    notes = _Notes(group)
    notes.put("facts", facts)
    notes.count("read")
    notes.come(None)


class _Notes:
    """The notes on the store of one comparison."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # torch 2.6 does not take None for the default group here.
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # The declared type lacks some of the store's methods.
        self._store: Any = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        name = hashlib.sha256(repr(self.ranks).encode()).hexdigest()
        self._prefix = f"hytrain/agreement/{name}/{_started[name]}"
        _started[name] += 1

    def put(self, kind: str, value: Any) -> None:
        self._store.set(self._key(kind, dist.get_rank()), json.dumps(value))

    def count(self, kind: str, amount: int = 1) -> int:
        """Adds to a counter of the ranks; returns its sum so far, this amount included."""
        return int(self._store.add(f"{self._prefix}/{kind}", amount))

    def come(self, digest: str | None, sample: str = "") -> None:
        """Leaves the hash of this rank's facts; if it is the last, compares those of all ranks."""
        self.put("hash", [digest, sample, socket.gethostname()])
        if self.count("come") < len(self.ranks):
            return
        found = self._read("hash", self.ranks)
        ranks_of: dict[str | None, list[int]] = {}
        for rank, (theirs, *_) in found.items():
            ranks_of.setdefault(theirs, []).append(rank)
        hosts = {rank: host for rank, (_, _, host) in found.items()}
        sample = found[self.ranks[0]][1]
        away = ranks_of.pop(None, None)
        kinds = [*([] if away is None else [away]), *ranks_of.values()]
        others = [rank for rank, (_, theirs, _) in found.items() if theirs != sample]
        outcome = {
            "kinds": {ranks[0]: _words(ranks, hosts) for ranks in sorted(kinds[:_MOST_KINDS])},
            "away": away and away[0],
            "others": others[:_MOST_SAMPLES],
        }
        self._store.set(f"{self._prefix}/outcome", json.dumps(outcome))

    def outcome(self) -> Any:
        """Waits for what the last rank to come has found, and returns it."""
        self._wait([f"{self._prefix}/outcome"], "hash", self.ranks)
        return json.loads(self._store.get(f"{self._prefix}/outcome"))

    def all(self, kind: str, ranks: Sequence[int]) -> dict[int, Any]:
        """Waits for the notes of some ranks, and returns them by rank."""
        self._wait([self._key(kind, rank) for rank in ranks], kind, ranks)
        return self._read(kind, ranks)

    def _read(self, kind: str, ranks: Sequence[int]) -> dict[int, Any]:
        return {rank: json.loads(self._store.get(self._key(kind, rank))) for rank in ranks}

    def _wait(self, keys: Sequence[str], kind: str, ranks: Sequence[int]) -> None:
        begin, pause, is_told = time.monotonic(), 0.002, False
        # Not by the store's own wait, which holds its connection and cannot warn meanwhile.
        while not self._store.check(keys):
            waited = time.monotonic() - begin
            if waited > (limit := self._store.timeout.total_seconds()):
                raise RankFailedError(
                    f"{self._missing('end', kind, ranks)} not come to hytrain.initialize within "
                    f"{limit:.0f} s, the process group's timeout: see what became of them"
                )
            if waited > WARN_SECONDS and not is_told:
                is_told = True
                logger.warning(
                    "hytrain.initialize has waited for %.0f s: %s not come to it. All ranks must "
                    "build the engine, with the same configuration",
                    waited,
                    self._missing("warning", kind, ranks),
                )
            time.sleep(pause)
            pause = min(2.0 * pause, _LONGEST_PAUSE)

    def linger(self) -> None:
        """Waits, 5 s at most, for the others to read: this process may hold the store, and ends."""
        self.count("read")
        until = time.monotonic() + _LINGER_SECONDS
        with suppress(RuntimeError):  # the store's holder has ended: all have read
            while self.count("read", 0) < len(self.ranks) and time.monotonic() < until:
                time.sleep(0.05)

    def _missing(self, when: str, kind: str, ranks: Sequence[int]) -> str:
        """Words for the ranks that have no note; if very many ranks ask, for their number."""
        if self.count(f"asks at the {when}") > _MOST_ASKING:
            return f"{len(self.ranks) - self.count('come', 0)} of {len(self.ranks)} ranks have"
        missing = self._without(kind, ranks) or ranks[-1:]
        return f"rank {missing[0]} has" if len(missing) == 1 else f"ranks {missing} have"

    def _without(self, kind: str, ranks: Sequence[int]) -> list[int]:
        # By bisection: one request tells of any number of ranks whether all are there.
        if self._store.check([self._key(kind, rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        middle = len(ranks) // 2
        return self._without(kind, ranks[:middle]) + self._without(kind, ranks[middle:])

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{kind}/{rank}"


def _words(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    named = ", ".join(f"rank {rank} (host {hosts[rank]})" for rank in ranks[:_MOST_RANKS])
    return named + (f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else "")


def differences(
    values: Mapping[int, Mapping[str, str]], keys: Sequence[str], words: Mapping[int, str]
) -> list[str]:
    """Returns a line for each key whose values differ.

    Args:
        values: the values of one rank of each kind (ranks with equal values), by key.
        keys: the keys to compare.
        words: for each of these ranks, the words for all ranks of its kind.
    """
    lines: list[str] = []
    for key in keys:
        ranks_of: dict[str, list[str]] = {}
        for rank, facts in values.items():
            ranks_of.setdefault(facts.get(key, "not there"), []).append(words[rank])
        if len(ranks_of) > 1:
            each = (f"{value} on {', '.join(who)}" for value, who in ranks_of.items())
            lines.append(f"{key} is {'; '.join(each)}")
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more differences"]
    return lines
