"""hytrain: DeepSpeed with the optimizer state in host memory, updated while backward runs."""

from __future__ import annotations

from hytrain.api import initialize
from hytrain.config import HyTrainConfig
from hytrain.engine import HyTrainEngine
from hytrain.version import __version__

__all__ = ["HyTrainConfig", "HyTrainEngine", "__version__", "initialize"]
