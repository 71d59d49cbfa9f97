"""Compares two runs, in words and a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hytrain.formats.text_table import align
from hytrain.tools.trace import step_times
from hytrain.tools.trace.analysis import Analysis
from hytrain.tools.trace.report_text import change_number, change_words, percent

_WORTH: Final = 0.005


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of a part in the mean step of A and of B."""

    name: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """The seconds that B takes more."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of the slowest ranks of two runs."""

    sentences: tuple[str, ...]
    step: Row
    parts: tuple[Row, ...]
    """Parts of the step; their differences sum to the step's."""
    hidden: Mapping[str, tuple[float | None, float | None]]
    """Activity -> its hidden share in A and in B; None if the run does not have it."""


def compare(before: Analysis, after: Analysis) -> Comparison:
    """Compares two runs of the same work."""
    one, other = before.mean_parts(before.slowest), after.mean_parts(after.slowest)
    parts = tuple(
        Row(after.named(part), one[part], other[part])
        for part in step_times.PARTS
        if one[part] or other[part]
    )
    step = Row("step", before.step_seconds(before.slowest), after.step_seconds(after.slowest))
    shares = {
        after.named(activity): (_hidden(before, activity), _hidden(after, activity))
        for activity in step_times.ACTIVITIES[2:]
    }
    hidden = {activity: pair for activity, pair in shares.items() if pair != (None, None)}
    words = (_step_words(step, before, after), _part_words(step, parts))
    return Comparison(words, step, parts, hidden)


def _hidden(analysis: Analysis, activity: str) -> float | None:
    found = step_times.overlap(analysis.steps[analysis.slowest], activity)
    return found.hidden / found.total if found.total else None


def _step_words(step: Row, before: Analysis, after: Analysis) -> str:
    share = step.difference / step.before
    change = "as long as" if abs(share) < _WORTH else None
    change = change or f"{percent(abs(share))} {'longer' if share > 0 else 'shorter'} than"
    times = f"{step.after * 1e3:.2f} beside {step.before * 1e3:.2f} ms"
    shares = [percent(run.busy_share(run.slowest)) for run in (after, before)]
    busy = after.named(f"its GPU computes {shares[0]} of it, A's {shares[1]}")
    return f"A step of B is {change} one of A ({times}); {busy}."


def _part_words(step: Row, parts: tuple[Row, ...]) -> str:
    worth = [row for row in parts if abs(row.difference) >= _WORTH * step.before]
    if not worth:
        return "No part of it differs by more than 0.5 % of a step."
    named = [
        f"{row.name} {row.difference * 1e3:+.2f} ms"
        for row in sorted(worth, key=lambda row: -abs(row.difference))[:5]
    ]
    return f"What differs: {', '.join(named)}."


def compare_verdict(found: Comparison, after: Analysis) -> list[tuple[str, str, str]]:
    """The sentences with a name and a number each, for a page, and what to try next."""
    change = f"{found.step.difference / found.step.before * 100:+.1f} %"
    step, parts = found.sentences
    return [
        ("B beside A", change, step),
        ("difference", "", parts),
        ("do this to B", change_number(after), change_words(after)),
    ]


def compare_text(comparison: Comparison) -> str:
    """The comparison as text, not yet folded to a terminal's width."""
    rows = [("part, ms a step", "A", "B", "B - A")]
    for row in (*comparison.parts, comparison.step):
        one, other = f"{row.before * 1e3:.2f}", f"{row.after * 1e3:.2f}"
        rows.append((row.name, one, other, f"{row.difference * 1e3:+.2f}"))
    hidden: list[tuple[str, ...]] = [("hidden under compute", "A", "B")]
    for name, pair in comparison.hidden.items():
        hidden.append((name, *("none" if share is None else percent(share) for share in pair)))
    blocks = ["\n".join(comparison.sentences), "\n".join(align(rows)), "\n".join(align(hidden))]
    return "\n\n".join(blocks)
