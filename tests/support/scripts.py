"""Runs scripts in a process of their own, without importing everything again.

Six of the seven seconds of a short run of the training script are imports. The process is forked
from the one that tests/dist/harness.py keeps. A test of the process's start or of its imports
starts a fresh one.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

from harness import process_context

from support.processes import fresh_environment


def run_script(
    script: Path | str,
    *argv: str,
    timeout: float = 120.0,
    is_finalized: bool = False,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a script like ``python SCRIPT ARGV...``, on the CPU with one thread.

    Args:
        script: the file, or its text as a string.
        argv: its arguments.
        timeout: seconds.
        is_finalized: it ends as an interpreter does: exit functions, threads, objects. That takes
            two seconds; otherwise a forked process skips it.
        variables: added to its environment.

    Raises:
        subprocess.TimeoutExpired: it had not ended after ``timeout`` seconds, and was killed.
    """
    with tempfile.TemporaryDirectory() as name:
        outputs = [Path(name) / "stdout", Path(name) / "stderr"]
        environment = fresh_environment(OMP_NUM_THREADS="1", **variables)
        if isinstance(script, str):
            text, script = script, Path(name) / "script.py"
            script.write_text(text)
        process = process_context().Process(
            target=_finalized if is_finalized else _become,
            args=(str(script), argv, environment, [str(path) for path in outputs]),
        )
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([str(script), *argv], timeout)
        texts = [path.read_text(errors="replace") for path in outputs]
        return subprocess.CompletedProcess([str(script), *argv], process.exitcode, *texts)


def _become(
    script: str, argv: tuple[str, ...], environment: dict[str, str], outputs: list[str]
) -> None:
    for descriptor, path in enumerate(outputs, start=1):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).parent))
    # Not by runpy, which drops the script's objects when it ends.
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__file__ = script
    exec(compile(Path(script).read_text(), script, "exec"), vars(module))


def _finalized(*arguments: Any) -> None:
    status = 0
    try:
        _become(*arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    ctypes.pythonapi.Py_Exit(status)
