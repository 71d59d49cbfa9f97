"""PNGs, drawn by a matplotlib that may not be there."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

from hytrain.errors import ConfigError


@contextlib.contextmanager
def picture(path: Path, size: tuple[float, float], *, flag: str, without: str) -> Generator[Any]:
    """A figure of matplotlib's to draw on, written at the end.

    Args:
        path: the file; replaced.
        size: width and height, in inches.
        flag: that names the file.
        without: what to do to have no picture.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        # Heavy, and not everywhere: here and not at the top of the module.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"the picture needs matplotlib, which cannot be imported ({error}): "
            f"pip install hytrain[train], or {without}"
        ) from error
    figure = Figure(figsize=size, layout="constrained")
    yield figure
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise ConfigError(
            f"cannot write {path} ({error.strerror}): give another file with {flag}, or {without}"
        ) from error
