"""The measuring process: one entry, one result file.

    python -m experiments.solve_k.worker JOB.json RESULT.json

The result file is written after every stage, so that what was measured outlives what breaks.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

from experiments.common import records
from experiments.common.processes import end
from experiments.common.records import GIB, Job
from experiments.solve_k.recorder import HostMemoryGuard, Recorder


def limit_cores(count: int) -> list[int]:
    """Leaves this process the first `count` of its cores; returns them."""
    cores = sorted(os.sched_getaffinity(0))[:count]
    os.sched_setaffinity(0, cores)
    return cores


def run_job(job: Job, recorder: Recorder, begin: float) -> None:
    """Measures; raises what the plan raises."""
    options = job.entry.options
    if options.get("cores"):
        # Before torch is imported: it and OpenMP size their thread pools by what they may use.
        recorder.put(cores=limit_cores(options["cores"]))
    guard = HostMemoryGuard(recorder, options["host_floor_gib"] * GIB)
    guard.start()
    # Imported only now, for the reason above.
    from experiments.solve_k.bench import Bench
    from experiments.solve_k.plans import run

    try:
        run(Bench(job, recorder, begin))
    finally:
        guard.stop()
        recorder.put(host_available_least_bytes=guard.least_bytes)
    recorder.put(status=records.OK, seconds=time.monotonic() - begin)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether GPU memory was not enough; torch is imported by then, or it was something else."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(error, torch.OutOfMemoryError)


def main(arguments: list[str], begin: float) -> int:
    """Returns the exit status; the result file says more."""
    job_path, result_path = Path(arguments[0]), Path(arguments[1])
    job = Job.from_json(records.read_json(job_path))
    recorder = Recorder(result_path)
    try:
        run_job(job, recorder, begin)
    except Exception as error:
        # The process boundary: the parent needs the log and the status, whatever went wrong.
        traceback.print_exc()
        status = records.OUT_OF_MEMORY if is_out_of_memory(error) else records.FAILED
        recorder.put(status=status, error=f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    end(main(sys.argv[1:], time.monotonic()))
