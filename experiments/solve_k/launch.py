"""Starts measuring processes, and keeps what one had measured before it broke. No torch here."""

from __future__ import annotations

from pathlib import Path

from experiments.common import records
from experiments.common.processes import run_worker, status_of
from experiments.common.records import Job, Json
from experiments.solve_k.recorder import METRICS, RUNNING


def outcome(code: int | None, result: Json | None, lines: list[str]) -> str:
    """How a measuring process ended; its result says so, unless the process was ended early."""
    known = result if result is not None and result["status"] != RUNNING else None
    return status_of(code, known, lines)


def run_job(job: Job, folder: Path, limit: float) -> Json:
    """Measure one entry in its own process; never raises for what happens there.

    Args:
        job: what to measure.
        folder: for the process's files, which stay: job, log, result, metrics.
        limit: seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job.entry.options["limit_seconds"] = limit
    (folder / METRICS).unlink(missing_ok=True)
    ended = run_worker("experiments.solve_k.worker", job, folder, limit)
    status = outcome(ended.code, ended.result, ended.lines)
    return {
        "status": status,
        "exit_status": ended.code,
        "limit_seconds": limit,
        "wall_seconds": ended.wall_seconds,
        "log": [] if ended.code == 0 and status == records.OK else ended.lines,
        "result": ended.result,
    }
