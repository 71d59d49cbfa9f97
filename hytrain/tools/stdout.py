"""Keeps file descriptor 1, which may be carrying our JSON, from what libraries write there."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Generator


@contextlib.contextmanager
def stdout_to(target: int) -> Generator[None]:
    """What anybody writes to the standard output goes to another descriptor meanwhile."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(target, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
