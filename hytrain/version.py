"""The package's version, in one place that setup can read without importing anything else."""

from __future__ import annotations

__version__ = "0.1.0"
