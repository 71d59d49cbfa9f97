"""Starts DeepSpeed's launcher, once for every host of a hostfile, all on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from support.ports import free_port
from support.processes import fresh_environment

SECONDS = 200
"""Most of a launch."""
REPOSITORY = Path(__file__).resolve().parents[2]


def launch(slots: Sequence[int], folder: Path, *arguments: str) -> None:
    """Starts one launcher a host and waits for all."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"host{n} slots={count}\n" for n, count in enumerate(slots)))
    python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = fresh_environment(OMP_NUM_THREADS="1", PYTHONPATH=python_path)
    together = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    logs = [(folder / f"host{n}.log").open("w+") for n in range(len(slots))]
    launchers = [
        subprocess.Popen(
            [*runner, "--no_ssh", "--node_rank", str(n), *together, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for n, log in enumerate(logs)
    ]
    deadline = time.monotonic() + SECONDS
    try:
        for number, launcher in enumerate(launchers):
            code = launcher.wait(timeout=max(1.0, deadline - time.monotonic()))
            logs[number].seek(0)
            assert code == 0, logs[number].read()[-4000:]
    finally:
        for launcher, log in zip(launchers, logs, strict=True):
            launcher.terminate()  # it ends its ranks
            launcher.wait(timeout=40)
            log.close()
