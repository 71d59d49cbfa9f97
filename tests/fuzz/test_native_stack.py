"""A rank that crashes in a thread that is not Python's reports where."""

from __future__ import annotations

import ctypes
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness import RankError, RankPool

from fuzz.native_stack import keeping_cores

PATTERN = Path("/proc/sys/kernel/core_pattern")


def crash() -> None:
    """Crashes in a thread of the C library."""
    library = ctypes.CDLL(None)
    thread = ctypes.c_ulong()
    # The thread's function reads where its argument points.
    entry = ctypes.cast(library.strlen, ctypes.c_void_p)
    library.pthread_create(ctypes.byref(thread), None, entry, ctypes.c_void_p(16))
    library.pthread_join(thread, None)


def _keeps_cores() -> bool:
    is_plain = PATTERN.is_file() and not PATTERN.read_text().startswith(("|", "/"))
    return is_plain and resource.getrlimit(resource.RLIMIT_CORE)[1] != 0


@pytest.mark.skipif(shutil.which("gdb") is None, reason="needs gdb")
@pytest.mark.skipif(not _keeps_cores(), reason="this system keeps no cores in the current folder")
def test_reports_the_thread_that_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    before: Any = resource.getrlimit(resource.RLIMIT_CORE), Path.cwd()
    with keeping_cores() as stacks:
        assert stacks() == ""
        # Its own environment makes it a new process, not one of a server that started before.
        pool = RankPool(1, {"HYTRAIN_CRASHES": "1"}, with_deepspeed=False)
        try:
            with pytest.raises(RankError, match="exit code -11"):
                pool.run(crash, timeout=60)
        finally:
            pool.close()
        told = stacks()
        assert "strlen" in told
        assert stacks() == ""
    assert (resource.getrlimit(resource.RLIMIT_CORE), Path.cwd()) == before
