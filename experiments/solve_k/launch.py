"""Starts measuring processes, and keeps what one had measured before it broke. No torch here."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from experiments.offload_step import records
from experiments.offload_step.launch import environment, run_process, status_of, tail
from experiments.offload_step.records import Job, Json
from experiments.solve_k.recorder import METRICS, RUNNING


def outcome(code: int | None, result: Json | None, lines: list[str]) -> str:
    """How a measuring process ended; its result says so, unless it was broken off."""
    told = result if result is not None and result["status"] != RUNNING else None
    return status_of(code, told, lines)


def run_job(job: Job, folder: Path, limit: float) -> Json:
    """Measure one entry in its own process; never raises for what happens there.

    Args:
        job: what to measure.
        folder: for the process's files, which stay: job, log, result, metrics.
        limit: seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job_path, result_path = folder / "job.json", folder / "result.json"
    log = folder / "log"
    job.entry.options["limit_seconds"] = limit
    records.write_json(job_path, job.to_json())
    for old in (result_path, folder / METRICS):
        old.unlink(missing_ok=True)
    module = "experiments.solve_k.worker"
    begin = time.monotonic()
    command = [sys.executable, "-m", module, str(job_path), str(result_path)]
    code = run_process(command, environment(job), log, limit)
    result = records.read_json(result_path) if result_path.exists() else None
    lines = tail(log)
    status = outcome(code, result, lines)
    return {
        "status": status,
        "exit_status": code,
        "limit_seconds": limit,
        "wall_seconds": time.monotonic() - begin,
        "log": [] if code == 0 and status == records.OK else lines,
        "result": result,
    }
