"""A claim with its measurement and limit, and what is read from a part's records. Plain data."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable

from experiments.common import records
from experiments.common.records import Json

REFERENCE = "forward_backward"
"""Label and system of forward and backward only: the limit that the others are compared with."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One claim: what was measured, and the limit."""

    claim: str
    value: float | None
    """None: not measured."""
    limit: float | None
    """None: a number to report, with nothing to reach."""
    at_least: bool
    part: str = ""
    ceiling: float | None = None
    """Of a ratio to another system: what a step without any update would reach there."""

    @property
    def verdict(self) -> str:
        """reached, missed (also: a limit that no update at all could reach), reported or not
        measured."""
        if self.value is None:
            return "not measured"
        if self.limit is None:
            return "reported"
        good = self.value >= self.limit if self.at_least else self.value <= self.limit
        if not good and self.ceiling is not None and self.ceiling < self.limit:
            return "missed: above the ceiling"
        return "reached" if good else "missed"


def measured(part: Json, label: str) -> list[Json]:
    """The results of a label's repeats in a part."""
    return [
        record["result"]
        for record in part["records"]
        if record["status"] == records.OK and record["entry"]["label"] == label
    ]


def step_seconds(part: Json, label: str) -> float | None:
    """The median over a label's repeats; None where none was measured."""
    seconds = [result["step_seconds"] for result in measured(part, label)]
    return statistics.median(seconds) if seconds else None


def time_ratio(above: str, below: str) -> Callable[[Json], float | None]:
    """How many times longer `above` takes than `below`."""

    def of_part(part: Json) -> float | None:
        a, b = step_seconds(part, above), step_seconds(part, below)
        return None if a is None or b is None else a / b

    return of_part


def host_bytes(result: Json) -> int:
    """Host bytes of the measured steps: the process's, or what the machine's use grew by,
    whichever is more, since page-locked memory may show in only one of them."""
    return max(result["host"]["steps_rss_bytes"], result["host"]["steps_machine_bytes"])
