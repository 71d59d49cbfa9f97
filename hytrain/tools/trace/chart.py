"""One step as a PNG, for papers and pages: what runs when, and what the GPU waits for."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from hytrain.tools.pictures import picture
from hytrain.tools.trace.analysis import Analysis
from hytrain.tools.trace.lanes import IDLE, Row, rows_of, with_levels
from hytrain.tools.trace.palette import COLOURS, DARK, LEGEND, LIGHT, Theme
from hytrain.tools.trace.viewer import middle_step

_LEFT_OUT: Final = ("Python", "host", "data loading", "host waits", "waits of forward")
_MARGIN: Final = 0.06
_WIDTH: Final = 12.0
_CHARACTER: Final = 0.006
"""Width of a character of a cause's words, as a share of the longest step's picture."""
_LEAST_EDGED: Final = 0.004
"""Share of the picture that a bar needs for edges."""
_LEAST_LABEL: Final = 0.025
"""Share of the picture that a bar needs for words."""


def draw_steps(
    path: Path, runs: Sequence[tuple[str, Analysis]], words: Sequence[str], *, dark: bool = False
) -> None:
    """Writes the middle step of each run's slowest rank, below each other, on one time axis.

    Args:
        path: the file; replaced.
        runs: (title, run).
        words: sentences above.
        dark: a dark background.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    theme = DARK if dark else LIGHT
    drawn = [(title, run, _rows(run)) for title, run in runs]
    longest = max(_middle(run).length for _, run in runs) * 1e-6
    heights = [len(rows) + 1.0 for _, _, rows in drawn]
    lines = [line for sentence in words for line in textwrap.wrap(sentence, 130)]
    size = (_WIDTH, 0.36 * sum(heights) + 0.22 * len(lines) + 1.3)
    with picture(path, size, flag="--png", without="leave --png out") as figure:
        figure.set_facecolor(theme.background)
        figure.suptitle("\n".join(lines), fontsize=9.5, x=0.01, ha="left", color=theme.text)
        grid: Any = figure.subplots(
            len(runs), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axes, (title, run, rows) in zip(grid[:, 0], drawn, strict=True):
            _draw(axes, title, run, rows, longest, theme)
        grid[-1, 0].set_xlabel("ms since the step's begin", color=theme.text)
        _draw_legend(figure, [row for _, _, rows in drawn for row in rows], theme)


def _middle(run: Analysis) -> Any:
    return middle_step(next(one for one in run.ranks if one.rank == run.slowest).steps)


def _rows(run: Analysis) -> list[Row]:
    step = _middle(run)
    margin = round(step.length * _MARGIN)
    begin, end = step.begin - margin, step.end + margin
    rank = next(one for one in run.ranks if one.rank == run.slowest)
    rows = rows_of(rank, run.steps[rank.rank], begin, end)
    is_left_out = [any(row.label.startswith(name) for name in _LEFT_OUT) for row in rows]
    kept = [row for row, left_out in zip(rows, is_left_out, strict=True) if not left_out]
    shown = [_cut(row, begin, end) for row in kept or rows]
    return [with_levels(row, begin, end) for row in shown if len(row.bars)]


def _cut(row: Row, begin: int, end: int) -> Row:
    chosen = (row.bars.end > begin) & (row.bars.begin < end)
    bars = row.bars.select(chosen)
    bars = bars.with_columns(begin=np.maximum(bars.begin, begin), end=np.minimum(bars.end, end))
    return Row(row.label, bars, row.colour[chosen], row.hidden[chosen])


def _draw(
    axes: Any, title: str, run: Analysis, rows: Sequence[Row], longest: float, theme: Theme
) -> None:
    step = _middle(run)
    for number, row in enumerate(rows):
        _draw_row(axes, row, number, step, longest, theme)
    for one in run.steps[run.slowest]:
        at = (one.step.end - step.begin) * 1e-6
        if -_MARGIN * longest <= at <= (1 + _MARGIN) * longest:
            axes.axvline(at, color=theme.text, linestyle="--", linewidth=1)
            words = f"step {one.step.number} ends"
            axes.text(at, -0.62, words, fontsize=8, ha="right", va="bottom", color=theme.text)
    axes.set_ylim(len(rows) - 0.4, -1.2)
    axes.set_xlim(-0.03 * longest, (1 + _MARGIN) * longest)
    axes.set_yticks(range(len(rows)), labels=[row.label for row in rows], color=theme.text)
    ranks = f", rank {run.slowest}" if len(run.ranks) > 1 else ""
    title = f"{title or next(iter(run.ranks)).path.name}{ranks}, step {step.number}"
    axes.set_title(title, fontsize=10, loc="left", color=theme.text)
    axes.set_facecolor(theme.background)
    axes.tick_params(colors=theme.text, length=0)
    axes.grid(axis="x", color=theme.grid, linewidth=0.7)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _draw_row(axes: Any, row: Row, number: int, step: Any, longest: float, theme: Theme) -> None:
    begins = (row.bars.begin - step.begin) * 1e-6
    lengths = (row.bars.end - row.bars.begin) * 1e-6
    if row.levels:
        begins, lengths, colours, alphas = _bins(row, step)
    else:
        colours, alphas = row.colour, None
    # A narrow bar's edges would hide it: many of them beside a longer run would look empty.
    widths = np.where(lengths > _LEAST_EDGED * longest, 0.0 if row.levels else 0.4, 0.0)
    for one in np.unique(colours):
        chosen = colours == one
        spans = list(zip(begins[chosen], lengths[chosen], strict=True))
        alpha = None if alphas is None else alphas[chosen]
        axes.broken_barh(
            *(spans, (number - 0.4, 0.8)),
            **{"facecolors": COLOURS[LEGEND[one]], "alpha": alpha},
            **{"edgecolors": theme.background, "linewidths": widths[chosen]},
        )
    if row.label == IDLE:
        _name_causes(axes, row, step, longest, theme)
        return
    if row.levels:
        return
    for begin, length, name, layer in zip(
        begins, lengths, row.bars.name, row.bars.layer, strict=True
    ):
        if length > _LEAST_LABEL * longest:
            text = str(name) if len(str(name)) * 0.0085 * longest < length else ""
            text = text or (str(layer) if layer >= 0 else "")
            axes.text(
                begin + length / 2,
                number,
                text,
                **{"fontsize": 7.5, "color": "white", "ha": "center", "va": "center"},
                clip_on=True,
            )


def _name_causes(axes: Any, row: Row, step: Any, longest: float, theme: Theme) -> None:
    """Words in or beside idle intervals that are long enough: the longest cause of each.

    The longest intervals have theirs first; words that would lie over others are left out.
    """
    bars = row.bars
    firsts = np.flatnonzero(np.concatenate([[True], bars.begin[1:] > bars.end[:-1]]))
    lasts = np.concatenate([firsts[1:], [len(bars)]])
    idle: list[tuple[float, float, str]] = []
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        begin = (int(bars.begin[first]) - step.begin) * 1e-6
        end = (int(bars.end[last - 1]) - step.begin) * 1e-6
        if end <= 0 or end - begin < _LEAST_LABEL / 2 * longest:
            continue
        most = first + int(np.argmax((bars.end - bars.begin)[first:last]))
        layer = f", layer {bars.layer[most]}" if bars.layer[most] >= 0 else ""
        idle.append((begin, end, f"{bars.name[most]}{layer}"))
    taken = [(begin, end) for begin, end, _ in idle]
    for begin, end, words in sorted(idle, key=lambda one: one[0] - one[1]):
        width, gap = len(words) * _CHARACTER * longest, 0.005 * longest
        place, side, colour = (begin + end) / 2, "center", "white"
        if width > end - begin:
            colour = theme.text
            place, side = (begin - gap, "right") if begin > 0.2 * longest else (end + gap, "left")
            left = place - width if side == "right" else place
            if any(low < left + width and left < high for low, high in taken):
                continue
            taken.append((left, left + width))
        axes.text(
            place,
            0,
            words,
            **{"fontsize": 8, "color": colour, "ha": side, "va": "center", "clip_on": True},
        )


def _bins(row: Row, step: Any) -> tuple[Any, Any, Any, Any]:
    """A level's bins as bars."""
    level = row.levels[min(1, len(row.levels) - 1)]
    margin = step.length * _MARGIN
    size = (step.length + 2 * margin) / len(level.covered) * 1e-6
    chosen = np.flatnonzero(level.covered)
    begins = chosen * size - margin * 1e-6
    alphas = 0.15 + 0.85 * level.covered[chosen] / 255
    return begins, np.full(len(chosen), size), level.colour[chosen], alphas


def _draw_legend(figure: Any, rows: Sequence[Row], theme: Theme) -> None:
    from matplotlib.patches import Patch

    used = sorted({int(one) for row in rows for one in np.unique(row.colour)})
    patches = [Patch(color=COLOURS[LEGEND[one]], label=LEGEND[one]) for one in used]
    legend = figure.legend(
        handles=patches, loc="outside lower center", ncols=7, fontsize=8, frameon=False
    )
    for text in legend.get_texts():
        text.set_color(theme.text)
