"""The machine and versions of a result. No torch: it would open a GPU context and keep it."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import os
import platform
import runpy
import subprocess
from pathlib import Path

from experiments.common.records import Json

REPOSITORY = Path(__file__).resolve().parents[2]
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


def _output(*command: str) -> str | None:
    """The first line that a program prints; None if there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return next(iter(done.stdout.splitlines()), "").strip() or None


def _cuda() -> str | None:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py")))["cuda"]


def describe(device: str) -> Json:
    """Machine, versions and date."""
    gpu = None
    if device == "cuda":
        gpu = _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "unknown GPU"
    settings = {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "HYTRAIN_"))}
    return {
        "gpu": gpu,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "cuda": _cuda() if gpu else None,
        "versions": {package: _version(package) for package in PACKAGES},
        "commit": _output("git", "-C", str(REPOSITORY), "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        **({"settings": settings} if settings else {}),
    }
