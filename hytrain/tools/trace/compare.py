"""Two runs beside each other, in words and a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from hytrain.formats.text_table import align
from hytrain.tools.trace import accounts
from hytrain.tools.trace.analysis import Analysis
from hytrain.tools.trace.words import percent

_WORTH: Final = 0.005


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of the mean step of A and of B."""

    name: str
    before: float
    after: float

    @property
    def difference(self) -> float:
        """What B takes more."""
        return self.after - self.before


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of the slowest ranks of two runs."""

    sentences: tuple[str, ...]
    step: Row
    parts: tuple[Row, ...]
    """Of the step: their differences sum to its."""
    activities: tuple[tuple[str, float, float], ...]
    """Activity, hidden share in A and in B; -1 where it has none."""


def compare(before: Analysis, after: Analysis) -> Comparison:
    """A run and another, of the same work."""
    one, other = before.mean_parts(before.slowest), after.mean_parts(after.slowest)
    parts = tuple(
        Row(part, one[part], other[part]) for part in accounts.PARTS if one[part] or other[part]
    )
    step = Row("step", before.step_seconds(before.slowest), after.step_seconds(after.slowest))
    activities = tuple(
        (activity, _hidden(before, activity), _hidden(after, activity))
        for activity in accounts.ACTIVITIES[2:]
        if max(_hidden(before, activity), _hidden(after, activity)) >= 0.0
    )
    words = (_step_words(step, before, after), _part_words(step, parts))
    return Comparison(words, step, parts, activities)


def _hidden(analysis: Analysis, activity: str) -> float:
    rows = [one.activities.get(activity) for one in analysis.steps[analysis.slowest]]
    total = sum(row.total for row in rows if row is not None)
    return sum(row.hidden for row in rows if row is not None) / total if total else -1.0


def _busy(analysis: Analysis) -> float:
    parts = analysis.mean_parts(analysis.slowest)
    busy = sum(parts[part] for part in accounts.COMPUTE_PARTS)
    return busy / analysis.step_seconds(analysis.slowest)


def _step_words(step: Row, before: Analysis, after: Analysis) -> str:
    share = step.difference / step.before
    change = "as long as" if abs(share) < _WORTH else None
    change = change or f"{percent(abs(share))} {'longer' if share > 0 else 'shorter'} than"
    times = f"{step.after * 1e3:.2f} beside {step.before * 1e3:.2f} ms"
    busy = f"its GPU computes {percent(_busy(after))} of it, A's {percent(_busy(before))}"
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


def compare_text(comparison: Comparison) -> str:
    """To be folded to a terminal's width."""
    rows = [("part, ms a step", "A", "B", "B - A")]
    for row in (*comparison.parts, comparison.step):
        one, other = f"{row.before * 1e3:.2f}", f"{row.after * 1e3:.2f}"
        rows.append((row.name, one, other, f"{row.difference * 1e3:+.2f}"))
    hidden = [("hidden under the GPU's compute", "A", "B")]
    for name, one, other in comparison.activities:
        hidden.append((name, _share(one), _share(other)))
    blocks = ["\n".join(comparison.sentences), "\n".join(align(rows)), "\n".join(align(hidden))]
    return "\n\n".join(blocks)


def _share(share: float) -> str:
    return "none" if share < 0.0 else percent(share)


def compare_json(comparison: Comparison) -> dict[str, Any]:
    """The same as JSON, in seconds a step."""

    def row(one: Row) -> dict[str, float]:
        return {"a": one.before, "b": one.after, "difference": one.difference}

    return {
        "sentences": list(comparison.sentences),
        "step": row(comparison.step),
        "parts": {one.name: row(one) for one in comparison.parts},
        "hidden_share": {
            name: {"a": None if a < 0.0 else a, "b": None if b < 0.0 else b}
            for name, a, b in comparison.activities
        },
    }
