"""What a result was measured on."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

from experiments.common.processes import REPOSITORY
from experiments.common.records import Json
from experiments.common.threads import usable_cores

PACKAGES = ("torch", "deepspeed", "transformers", "hytrain")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The repository's commit; None where it is not a git checkout."""
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def _gpu_name() -> str:
    """Asked of the driver's tool: torch would open a context here and keep it for the whole part,
    beside the systems that are measured in other processes."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown GPU"
    lines = done.stdout.splitlines()
    return lines[0].strip() if lines else "unknown GPU"


def describe(device: str) -> Json:
    """Machine, versions and date."""
    gpu = _gpu_name() if device == "cuda" else None
    return {
        "gpu": gpu,
        "cpu": _cpu_model(),
        "cores": usable_cores(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda if gpu else None,
        "versions": {package: _version(package) for package in PACKAGES},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
