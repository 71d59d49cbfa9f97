"""The package's version, which setup reads without other imports, and DeepSpeed's releases."""

from __future__ import annotations

import re

__version__ = "0.1.0"
DEEPSPEED = "deepspeed>=0.19.7,<0.20"


def has_deepspeed_internals(version: str) -> bool:
    """Whether a release of DeepSpeed is one that :data:`DEEPSPEED` allows."""
    found = re.match(r"0\.19\.(\d+)", version)
    return found is not None and int(found[1]) >= 7
