"""Draws traces as one HTML file that needs no network and no server.

``viewer.html`` has the page and its script, which draws. The file holds the bars as columns in one
block of bytes, gzipped and in base64.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hytrain.errors import ConfigError
from hytrain.tools.trace import step_times
from hytrain.tools.trace.analysis import Analysis
from hytrain.tools.trace.lanes import COLOURS, LEGEND, Row, legend_of_cause, rows_of
from hytrain.tools.trace.spans import RankTrace

_TEMPLATE: Final = Path(__file__).with_name("viewer.html")
_MOST_RANKS: Final = 8
_MOST_NAMES: Final = 3
_LEAST_GAIN: Final = 0.001
"""Smallest gain of a change that is shown: the last digit of its number."""
_COLUMNS: Final = (
    *(("begin", "<f8"), ("end", "<f8"), ("name", "<u4"), ("detail", "<u4"), ("bytes", "<f4")),
    *(("layer", "<i4"), ("step", "<i4"), ("colour", "u1"), ("hidden", "u1")),
)


def _add(block: bytearray, column: NDArray[Any], kind: str) -> list[Any]:
    """Appends a column to the block; returns its place: [offset, number of elements, kind]."""
    place = [len(block), len(column), kind.lstrip("<")]
    block += np.ascontiguousarray(column, np.dtype(kind)).tobytes()
    block += b"\0" * (-len(block) % 8)  # typed arrays of the page begin at whole elements
    return place


def write_page(
    path: Path, runs: Sequence[tuple[str, Analysis]], verdict: Sequence[tuple[str, str, str]]
) -> None:
    """Writes the page.

    Args:
        path: the file; replaced.
        runs: (title, run); several are drawn below each other, aligned at their median steps.
        verdict: rows at the top: what they are about, a number (or nothing), a sentence.

    Raises:
        ConfigError: the file cannot be written.
    """
    block, names = bytearray(), {"": 0}
    title = " | ".join(title for title, _ in runs if title) or _files(runs[0][1])
    content: dict[str, Any] = {
        "title": title,
        "verdict": list(verdict),
        "legend": [[runs[-1][1].named(name), COLOURS[name]] for name in LEGEND],
        "runs": [_run(title, run, block, names) for title, run in runs],
    }
    content["names"] = list(names)
    # "</script" would end the script element, and "<!--" hide its end.
    text = json.dumps(content, separators=(",", ":")).replace("<", "\\u003c")
    packed = base64.b64encode(gzip.compress(block, 3)).decode()
    page = _TEMPLATE.read_text(encoding="utf-8")
    parts = {"title": html.escape(title), "content": text, "block": packed}
    # In one pass: what is filled in may itself look like a placeholder.
    page = re.sub(r"\{\{(title|content|block)\}\}", lambda found: parts[found[1]], page)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path} ({error.strerror}): give --html another") from error


def _run(title: str, run: Analysis, block: bytearray, names: dict[str, int]) -> dict[str, Any]:
    begin = min(rank.steps[0].begin for rank in run.ranks)
    end = max(rank.steps[-1].end for rank in run.ranks)
    steps = next(rank for rank in run.ranks if rank.rank == run.slowest).steps
    by_length = sorted(steps, key=lambda step: (step.length, step.number))
    middle = by_length[(len(steps) - 1) // 2]
    # The step of median length is shown first; pictures of two runs have their zero at its begin.
    zero = middle.begin
    shown = _shown(run)
    return {
        "title": title,
        "begin": begin - zero,
        "end": end - zero,
        "middle": middle.length,
        "slowest": f"rank {run.slowest}" + ", the slowest" * (len(run.ranks) > 1),
        "ranks_left_out": len(run.ranks) - len(shown),
        "fixes": [[fix.name, fix.gain, fix.words] for fix in run.fixes if fix.gain >= _LEAST_GAIN],
        "steps": [
            [step.number, step.begin - zero, step.end - zero]
            for step in {step.number: step for rank in shown for step in rank.steps}.values()
        ],
        "parts": _parts(run),
        "rows": [
            {
                "label": run.named(row.label),
                "rank": rank.rank,
                "columns": _columns(row, zero, block, names),
            }
            for rank in shown
            for row in rows_of(rank, run.steps[rank.rank], begin, end)
        ],
    }


def _files(run: Analysis) -> str:
    names = [f"{rank.path.name} (rank {rank.rank})" for rank in run.ranks]
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _shown(run: Analysis) -> list[RankTrace]:
    """The ranks that a page shows: all, or the first ones and the slowest."""
    if len(run.ranks) <= _MOST_RANKS:
        return list(run.ranks)
    first = [rank for rank in run.ranks if rank.rank != run.slowest][: _MOST_RANKS - 1]
    slowest = next(rank for rank in run.ranks if rank.rank == run.slowest)
    return sorted([*first, slowest], key=lambda rank: rank.rank)


def _parts(run: Analysis) -> list[list[Any]]:
    """The parts of the slowest rank's mean step: [part, share, colour, seconds]."""
    step, found = run.step_seconds(run.slowest), run.mean_parts(run.slowest)
    parts: list[list[Any]] = []
    for part, seconds in found.items():
        if seconds > 0.0:
            legend = part if part in step_times.COMPUTE_PARTS else legend_of_cause(part)
            parts.append([run.named(part), seconds / step, LEGEND.index(legend), seconds])
    return parts


def _columns(row: Row, zero: int, block: bytearray, names: dict[str, int]) -> dict[str, list[Any]]:
    """Adds a row's columns to the block and its names to ``names``; returns the columns' places."""
    bars = row.bars

    def numbers(values: NDArray[np.object_]) -> NDArray[np.uint32]:
        return np.array([names.setdefault(one, len(names)) for one in values], np.uint32)

    values = {
        "begin": bars.begin - zero,
        "end": bars.end - zero,
        "name": numbers(bars.name),
        "detail": numbers(bars.detail),
        "bytes": bars.size,
        "layer": bars.layer,
        "step": bars.step,
        "colour": row.colour,
        "hidden": row.hidden,
    }
    return {name: _add(block, values[name], kind) for name, kind in _COLUMNS}
