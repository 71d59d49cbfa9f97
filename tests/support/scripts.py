"""Scripts that run in a process of their own, without importing everything again.

Of a short run of the training script six seconds of seven are imports. The process is forked from
the one that tests/dist/harness.py keeps. A test of the process itself (its start, its imports, its
end) starts a fresh one.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

from harness import process_context

from support.processes import fresh_environment


def run_script(
    script: Path, *argv: str, timeout: float = 120.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """As ``python SCRIPT ARGV...``, on the CPU with one thread, and with ``variables``.

    Raises:
        subprocess.TimeoutExpired: it had not ended after ``timeout`` seconds, and was killed.
    """
    with tempfile.TemporaryDirectory() as name:
        outputs = [Path(name) / "stdout", Path(name) / "stderr"]
        environment = fresh_environment(OMP_NUM_THREADS="1", **variables)
        process = process_context().Process(
            target=_become, args=(str(script), argv, environment, [str(path) for path in outputs])
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
    runpy.run_path(script, run_name="__main__")
