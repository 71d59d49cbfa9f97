"""The environment of a process that a test starts."""

from __future__ import annotations

import os

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
    """This process's environment without what makes it a rank, on the CPU, with ``variables``."""
    kept = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    return {**kept, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", **variables}
