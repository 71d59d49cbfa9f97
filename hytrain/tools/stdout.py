"""Keeps what libraries write off file descriptor 1, which may carry our JSON."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Generator


@contextlib.contextmanager
def stdout_to(target: int) -> Generator[None]:
    """Sends everything written to the standard output to another descriptor meanwhile."""
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
    """Keeps the standard output free of what DeepSpeed writes, in a command that does not train.

    Without a GPU, DeepSpeed is told so, and does not warn that it found none.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with stdout_to(2):
        yield
