"""The environment of processes that tests start, and the number of this process's threads."""

from __future__ import annotations

import os
from pathlib import Path

# A test process may be a rank itself; what it starts is not that rank, and its port is taken.
_OF_A_RANK = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "LOCAL_SIZE",
    "CROSS_RANK",
    "CROSS_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def fresh_environment(**variables: str) -> dict[str, str]:
    """Returns this process's environment without a rank's, for the CPU, with ``variables``."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    return {**kept, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", **variables}


_PF_EXITING = 0x4  # Linux, include/linux/sched.h
_FLAGS = 6  # field 9 of /proc/*/stat (proc_pid_stat(5)), counted from behind the name


def num_threads() -> int:
    """Counts threads of this process that have not ended, including those unknown to Python.

    A joined thread may still be listed: the kernel wakes the joining thread (at exit_mm) before it
    takes the ended one out of the list. The latter is then marked as exiting, which tells it from a
    thread that somebody forgot to end.
    """
    number = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            stat = (task / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # out of the list by now
        flags = int(stat.rpartition(")")[2].split()[_FLAGS])
        number += not flags & _PF_EXITING
    return number
