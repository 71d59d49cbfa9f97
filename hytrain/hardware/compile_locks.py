"""Locks in torch's extension cache, for which a start that compiles waits without a message."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

STALE_SECONDS = 300.0
"""Longer than DeepSpeed's extensions take to compile: the process with such a lock was killed."""


@dataclass(frozen=True, slots=True)
class CompileLock:
    """A file ``lock``, and how many seconds ago it was made."""

    path: Path
    seconds: float

    @property
    def is_stale(self) -> bool:
        """Whether nobody can be compiling under it any more."""
        return self.seconds > STALE_SECONDS


def find_locks(cache: Path | None = None) -> list[CompileLock]:
    """The locks in torch's extension cache, oldest first.

    ``cache``: the cache; None: ``TORCH_EXTENSIONS_DIR``, or torch's default for this user.
    """
    if cache is None:
        root = os.environ.get("XDG_CACHE_HOME", "~/.cache")
        default = str(Path(root).expanduser() / "torch_extensions")
        cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default))
    found: list[CompileLock] = []
    for pattern in ("*/lock", "*/*/lock"):
        for path in cache.glob(pattern):
            try:
                found.append(CompileLock(path, time.time() - path.stat().st_mtime))
            except OSError:  # removed meanwhile
                continue
    return sorted(found, key=lambda lock: -lock.seconds)
