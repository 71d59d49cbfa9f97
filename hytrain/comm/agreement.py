"""What all ranks of a group must have alike, compared on the process group's store.

On the store, and not by a collective: where one rank has come somewhere else, two collectives that
do not fit would meet, and hang. Each rank leaves a hash; values only where the hashes differ.
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
_started: Counter[str] = Counter()
"""Comparisons of each group: all its ranks make them in one order."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the ranks of a group do not have alike; the same on all of them.

    Attributes:
        differences: a line for each key, with the values and who has them.
        other_samples: ranks whose sample is not that of the first one.
    """

    differences: Sequence[str]
    other_samples: Sequence[int]


def compare(
    facts: Mapping[str, str], group: dist.ProcessGroup | None, sample: str = ""
) -> Comparison:
    """Compares the ranks' facts; all ranks of the group call it, or :func:`stay_away`.

    Args:
        facts: of this rank: the text of each value by its key.
        group: None for the default one.
        sample: something that may differ.

    Raises:
        RankFailedError: a rank has not come within the process group's timeout.
    """
    notes = _Notes(group)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    notes.put("facts' hash", [digest, sample, socket.gethostname()])
    found = notes.all("facts' hash", notes.ranks)
    first = found[notes.ranks[0]]
    others = [rank for rank, (_, theirs, _) in found.items() if theirs != first[1]]
    ranks_of: dict[str | None, list[int]] = {}
    for rank, (theirs, *_) in found.items():
        ranks_of.setdefault(theirs, []).append(rank)
    if len(ranks_of) == 1:
        return Comparison((), others)
    notes.put("facts", facts)
    values = notes.all("facts", [ranks[0] for ranks in ranks_of.values()])
    notes.linger()
    # Who stays away has no hash, and few facts.
    away = ranks_of.get(None)
    keys = dict.fromkeys(key for of_rank in values.values() for key in of_rank)
    if away is not None:
        keys = values[away[0]]
    hosts = {rank: host for rank, (_, _, host) in found.items()}
    words = {ranks[0]: _words(ranks, hosts) for ranks in ranks_of.values()}
    return Comparison(differences(values, list(keys), words), others)


def stay_away(facts: Mapping[str, str], group: dist.ProcessGroup | None) -> None:
    """This rank goes another way and does not wait; ranks that compare get an error.

    Args:
        facts: where it goes; others have these keys, too.
        group: None for the default one.
    """
    notes = _Notes(group)
    for kind, value in (("facts", facts), ("read", True)):
        notes.put(kind, value)
    notes.put("facts' hash", [None, "", socket.gethostname()])


class _Notes:
    """The notes of one comparison."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        # Which torch 2.6 does not take None for.
        self.ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        # Its type is too general to say what it has.
        self._store: Any = distributed_c10d._get_default_store()  # pyright: ignore[reportPrivateUsage]
        name = hashlib.sha256(repr(self.ranks).encode()).hexdigest()
        self._prefix = f"hytrain/agreement/{name}/{_started[name]}"
        _started[name] += 1

    def put(self, kind: str, value: Any) -> None:
        self._store.set(self._key(kind, dist.get_rank()), json.dumps(value))

    def all(self, kind: str, ranks: Sequence[int]) -> dict[int, Any]:
        """The notes of some ranks; waits for them."""
        keys = [self._key(kind, rank) for rank in ranks]
        begin, pause, is_told = time.monotonic(), 0.002, False
        # Not the store's own wait, which holds its connection and says nothing meanwhile.
        while not self._store.check(keys):
            waited = time.monotonic() - begin
            if waited > (limit := self._store.timeout.total_seconds()):
                raise RankFailedError(
                    f"{self._missing(kind, ranks)} not come to hytrain.initialize within "
                    f"{limit:.0f} s, the process group's timeout: see what became of them"
                )
            if waited > WARN_SECONDS and not is_told:
                is_told = True
                logger.warning(
                    "hytrain.initialize has waited for %.0f s: %s not come to it. All ranks must "
                    "build the engine, with the same configuration",
                    waited,
                    self._missing(kind, ranks),
                )
            time.sleep(pause)
            pause = min(2.0 * pause, _LONGEST_PAUSE)
        texts = map(self._store.get, keys)
        return {rank: json.loads(text) for rank, text in zip(ranks, texts, strict=True)}

    def linger(self) -> None:
        """Until the others have read, for a while: this process may hold the store, and ends."""
        self.put("read", True)
        keys = [self._key("read", rank) for rank in self.ranks]
        until = time.monotonic() + _LINGER_SECONDS
        with suppress(RuntimeError):  # the store's holder has ended: all have read
            while not self._store.check(keys) and time.monotonic() < until:
                time.sleep(0.01)

    def _missing(self, kind: str, ranks: Sequence[int]) -> str:
        missing = [rank for rank in ranks if not self._store.check([self._key(kind, rank)])]
        return f"ranks {missing} have" if len(missing) != 1 else f"rank {missing[0]} has"

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._prefix}/{kind}/{rank}"


def _words(ranks: Sequence[int], hosts: Mapping[int, str]) -> str:
    named = ", ".join(f"rank {rank} (host {hosts[rank]})" for rank in ranks[:_MOST_RANKS])
    return named + (f" and {len(ranks) - _MOST_RANKS} more" if len(ranks) > _MOST_RANKS else "")


def differences(
    values: Mapping[int, Mapping[str, str]], keys: Sequence[str], words: Mapping[int, str]
) -> list[str]:
    """A line for each key that differs.

    Args:
        values: of one rank of each kind.
        keys: to be compared.
        words: which ranks are of its kind.
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
