"""hytrain: DeepSpeed with the optimizer state in host memory, updated while backward runs.

The public names are imported at first use: importing DeepSpeed takes seconds and writes to stdout,
which neither ``import hytrain`` nor the command line should.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from hytrain.version import __version__

if TYPE_CHECKING:
    from hytrain.api import initialize, register
    from hytrain.config import HyTrainConfig
    from hytrain.engine.engine import HyTrainEngine
    from hytrain.kernels.device_optimizer import DeviceOptimizer, register_optimizer
    from hytrain.optimizer.unequal_batches import UnequalBatchSampler

__all__ = [
    "DeviceOptimizer",
    "HyTrainConfig",
    "HyTrainEngine",
    "UnequalBatchSampler",
    "__version__",
    "initialize",
    "register",
    "register_optimizer",
]

_HOMES = {
    "DeviceOptimizer": "hytrain.kernels.device_optimizer",
    "HyTrainConfig": "hytrain.config",
    "HyTrainEngine": "hytrain.engine.engine",
    "UnequalBatchSampler": "hytrain.optimizer.unequal_batches",
    "initialize": "hytrain.api",
    "register": "hytrain.api",
    "register_optimizer": "hytrain.kernels.device_optimizer",
}


def _find_openmp() -> None:
    """Makes the extension call the OpenMP runtime that torch has loaded.

    The extension is not linked to one, since a second runtime would have threads of its own.
    """
    importlib.import_module("torch")

    if hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    # Some of torch's wheels load a renamed copy that other libraries do not see.
    loaded = re.search(r"/.*/lib(gomp|i?omp)[^/\n]*", Path("/proc/self/maps").read_text())
    ctypes.CDLL(loaded[0] if loaded else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)


def __getattr__(name: str) -> object:
    if name == "_C":  # `from hytrain import _C`, before the extension is loaded
        _find_openmp()
        return importlib.import_module("hytrain._C")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
