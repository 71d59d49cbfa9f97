"""What DeepSpeed sees of hytrain: the engine, the optimizer, all use of DeepSpeed's internals.

Raises:
    UnsupportedError: on import, before internals are looked up: the installed DeepSpeed has others.
"""

from __future__ import annotations

import importlib.metadata

from hytrain.errors import UnsupportedError
from hytrain.version import DEEPSPEED, has_deepspeed_internals


def _check_version() -> None:
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return  # sources on the path
    if not has_deepspeed_internals(version):
        raise UnsupportedError(
            f"DeepSpeed {version} is installed, which has other internals than those that this "
            f"release of hytrain works with: pip install '{DEEPSPEED}'"
        )


_check_version()
