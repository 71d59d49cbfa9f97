"""Measures one entry in its own process. No torch here."""

from __future__ import annotations

from pathlib import Path

from experiments.common import records
from experiments.common.processes import run_worker, status_of
from experiments.common.records import Job, Json


def run_job(job: Job, folder: Path, limit: float) -> Json:
    """Measure one entry in its own process; never raises for what the system does."""
    ended = run_worker("experiments.offload_step.worker", job, folder, limit)
    status = status_of(ended.code, ended.result, ended.lines)
    return {
        "status": status,
        "exit_status": ended.code,
        "limit_seconds": limit,
        "wall_seconds": ended.wall_seconds,
        # A measured system that could not be closed keeps its log, too.
        "log": [] if ended.code == 0 and status == records.OK else ended.lines,
        "result": ended.result if status == records.OK else None,
    }
