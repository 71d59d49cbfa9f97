"""The engine's decisions about k, on their way to the metrics file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Decision(Protocol):
    """What ``HyTrainEngine.placement_decisions()`` lists, as far as it is used here."""

    @property
    def measured_seconds(self) -> float | None:
        """The step as it turned out to be; None until it has been measured."""
        ...

    def metrics_record(self) -> dict[str, Any]:
        """One line of a metrics file."""
        ...


# Returns this rank's decisions, oldest first, the given number left out at the beginning.
DecisionsReader = Callable[[int], Sequence[Decision]]


def no_decisions(since: int) -> Sequence[Decision]:
    """Read nothing: DeepSpeed's engine decides nothing."""
    del since
    return ()


class DecisionLog:
    """Takes each decision of this rank once it is made, and again once its step is measured.

    Only the newest decision can still be measured, so that a decision's last record always
    comes before the next decision's first one, the order that ``hytrain explain`` reads.
    """

    def __init__(self, read: DecisionsReader) -> None:
        self._read = read
        self._num_taken = 0
        self._is_measured = False  # the last one taken

    def skip_history(self) -> None:
        """Leave out what the resumed run decided; its last one is this run's own first."""
        self._num_taken = max(0, len(self._read(0)) - 1)
        self._is_measured = True

    def take(self) -> list[dict[str, Any]]:
        """Return the records that are new since the last call."""
        first = max(0, self._num_taken - 1)
        records: list[dict[str, Any]] = []
        for number, decision in enumerate(self._read(first), start=first + 1):
            is_measured = decision.measured_seconds is not None
            if number > self._num_taken or (is_measured and not self._is_measured):
                records.append(decision.metrics_record())
            self._num_taken = max(self._num_taken, number)
            self._is_measured = is_measured
        return records


def gather_records(records: list[dict[str, Any]], rank: int) -> list[dict[str, Any]]:
    """Collect the records of all ranks but 0 on rank 0, each with its "rank"; a collective."""
    named = [{"rank": rank, **record} for record in records] if rank else []
    gathered: list[list[dict[str, Any]] | None] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, named)
    if rank:
        return []
    return [record for part in gathered for record in part or []]
