"""hytrain: DeepSpeed with the optimizer state in host memory, updated while backward runs."""

from __future__ import annotations

from hytrain.version import __version__

__all__ = ["__version__"]
