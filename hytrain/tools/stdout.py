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


@contextlib.contextmanager
def importing_deepspeed() -> Generator[None]:
    """For a command that does not train: the standard output stays free of what DeepSpeed writes,
    and without a GPU it is told so, and does not warn that it found none."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with stdout_to(2):
        yield
