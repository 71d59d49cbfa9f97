"""Text that fits a terminal: tables with aligned columns, and long lines folded."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Width of a command's output, in characters."""

_GAP = "  "
# Columns of words are not made narrower than this.
_NARROWEST = 8


def align(
    rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,), width: int = WIDTH
) -> list[str]:
    """A table whose first row is its heading.

    If it is too wide, the heading's words are put below each other; then the cells of the columns
    in ``left`` are folded, those of the widest column first. Numbers are never folded, even if the
    table stays too wide.

    Args:
        rows: each with the same number of cells.
        left: the columns that hold words, from 0; the others are aligned to the right.
        width: the most that the table may take, in characters.

    Returns:
        A text for each row; one that was folded has line breaks.
    """
    widths = _widths(rows, left, width)
    return [_row(cells, widths, left, is_heading=number == 0) for number, cells in enumerate(rows)]


def _widths(rows: Sequence[Sequence[str]], left: Sequence[int], width: int) -> list[int]:
    room = width - len(_GAP) * (len(rows[0]) - 1)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(widths) > room:
        words = [max(cell.split(), key=len, default="") for cell in rows[0]]
        widths = [max(map(len, column)) for column in zip(words, *rows[1:], strict=True)]
    while sum(widths) > room:
        widest = max(left, key=widths.__getitem__, default=None)
        if widest is None or widths[widest] <= _NARROWEST:
            break
        widths[widest] -= 1
    return widths


def _row(
    cells: Sequence[str], widths: Sequence[int], left: Sequence[int], *, is_heading: bool
) -> str:
    columns = [
        textwrap.wrap(cell, width) if is_heading or column in left else [cell]
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    height = max(1, *map(len, columns))
    lines: list[str] = []
    for line in range(height):
        parts: list[str] = []
        for column, (texts, width) in enumerate(zip(columns, widths, strict=True)):
            # Headings are aligned to the bottom of their row, other cells to its first line.
            index = line - (height - len(texts) if is_heading else 0)
            text = texts[index] if 0 <= index < len(texts) else ""
            parts.append(text.ljust(width) if column in left else text.rjust(width))
        lines.append(_GAP.join(parts).rstrip())
    return "\n".join(lines)


def fold(text: str, width: int = WIDTH) -> str:
    """Folds lines that are too long at spaces; continuations are indented by two more columns.

    Words (such as paths) are never split, even if a line stays too long.
    """
    lines: list[str] = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + _GAP
        whole = textwrap.TextWrapper(
            width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        # A number keeps its percent sign.
        folded = (part.replace("\0", " ") for part in whole.wrap(line.replace(" %", "\0%")))
        lines += folded if len(line) > width else [line]
    return "\n".join(lines)


def longer_by(share: float) -> str:
    """A duration beside another, in words: "5.3 % shorter".

    >>> longer_by(-0.053)
    '5.3 % shorter'
    """
    return f"{abs(share) * 100:.1f} % {'longer' if share >= 0.0 else 'shorter'}"
