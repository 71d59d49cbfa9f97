"""The native stack of the thread that crashed, for ranks that a signal ended.

faulthandler shows only Python's threads, and another one may have crashed (the update worker's, its
copies', OpenMP's, gloo's).
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

_GDB_SECONDS = 120.0


@contextlib.contextmanager
def keeping_cores() -> Iterator[Callable[[], str]]:
    """Makes processes that start in the block leave a core if a signal ends them.

    The block runs in another current folder: cores go there if the system's pattern for their names
    is a plain one. Without gdb, or with a limit of 0, nothing is kept.

    Yields:
        A function that returns the stacks of the cores so far and removes them; "" without any.
    """
    limits, before = resource.getrlimit(resource.RLIMIT_CORE), Path.cwd()
    gdb = shutil.which("gdb")
    if gdb is None:
        yield lambda: ""
        return
    with tempfile.TemporaryDirectory(prefix="cores") as folder:
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CORE, (limits[1], limits[1]))
        try:
            yield lambda: "".join(_told(gdb, core) for core in sorted(Path(folder).glob("core*")))
        finally:
            resource.setrlimit(resource.RLIMIT_CORE, limits)
            os.chdir(before)


def _told(gdb: str, core: Path) -> str:
    command = [gdb, "-batch", "-nx", "-ex", "bt 40", "-ex", "info threads"]
    try:
        done = subprocess.run(
            [*command, sys.executable, str(core)],
            capture_output=True,
            text=True,
            timeout=_GDB_SECONDS,
            check=False,
            env={**os.environ, "DEBUGINFOD_URLS": ""},  # symbols are not looked for elsewhere
        )
    except subprocess.TimeoutExpired:
        return f"\n{core.name}: gdb takes too long"
    finally:
        core.unlink()
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[New LWP")]
    return "\n".join([f"\n{core.name}:", *lines])
