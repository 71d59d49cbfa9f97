"""What DeepSpeed sees of hytrain: the engine, the optimizer, all use of DeepSpeed's internals.

Raises:
    UnsupportedError: on import, before any of them is looked up: another release has others.
"""

from __future__ import annotations

import importlib.metadata
import re

from hytrain.errors import UnsupportedError

_SUPPORTED = "0.19"


def _check_version() -> None:
    try:
        version = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return  # sources on the path
    if not re.match(rf"{re.escape(_SUPPORTED)}\.\d", version):
        raise UnsupportedError(
            f"DeepSpeed {version} is installed, but this release of hytrain works with "
            f"{_SUPPORTED}.x: pip install 'deepspeed>={_SUPPORTED},<0.20'"
        )


_check_version()
