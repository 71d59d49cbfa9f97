"""The measuring process: one system, one result file.

    python -m experiments.offload_step.worker JOB.json RESULT.json

The result is written before the system is closed, so that a system which cannot be closed is
measured all the same.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
import traceback
from pathlib import Path

import torch

from experiments.common import records
from experiments.common.memory import gpu_memory, host_memory
from experiments.common.model import build_batches, build_model
from experiments.common.processes import end
from experiments.common.records import Job, Json
from experiments.common.sizes import model_flops, size_of
from experiments.common.systems import load
from experiments.common.threads import choose_threads
from experiments.common.timing import Stepper, Timing, measure, synchronize, warm_up


def busy_share(timing: Timing) -> float | None:
    """Share of the measured time in which the CPU worker updated; None without a worker."""
    rows = [row for row in timing.observations if "update_seconds" in row]
    if not rows:
        return None
    per_step = sum(row["update_seconds"] for row in rows) / len(rows)
    return per_step / (timing.total_seconds / (len(timing.window_seconds) * timing.steps))


def run_job(job: Job, result_path: Path) -> None:
    """Build, warm up, measure, write the result, close."""
    workload = job.workload
    size = size_of(workload.model)
    before = host_memory()
    begin = time.perf_counter()
    make_model = functools.partial(build_model, workload)
    system = load(job.entry.system)(make_model, job)
    synchronize(workload.device)
    build_seconds = time.perf_counter() - begin
    print(f"built in {build_seconds:.1f} s", flush=True)
    stepper = Stepper(system, build_batches(workload), workload.device)
    warmup_seconds = warm_up(stepper, job.measurement)
    threads = choose_threads(stepper)
    timing = measure(stepper, job.measurement, warmup_seconds)
    after = host_memory()
    result: Json = {
        "status": records.OK,
        "num_parameters": size.num_parameters,
        "step_seconds": timing.step_seconds,
        "tflops": model_flops(size, workload.batch, workload.seq) / timing.step_seconds / 1e12,
        "timing": dataclasses.asdict(timing),
        "worker_busy_share": busy_share(timing),
        "threads": threads,
        "gpu": gpu_memory(workload.device),
        "host": {
            "before": dataclasses.asdict(before),
            "after": dataclasses.asdict(after),
            "steps_rss_bytes": timing.host_rss_bytes,
            "steps_machine_bytes": timing.host_machine_used_bytes - before.machine_used_bytes,
        },
        "summary": system.summary(),
        "build_seconds": build_seconds,
        "close_seconds": None,
    }
    records.write_json(result_path, result)
    print(f"{timing.step_seconds:.4f} s a step", flush=True)
    begin = time.perf_counter()
    system.close()
    records.write_json(result_path, {**result, "close_seconds": time.perf_counter() - begin})


def main(arguments: list[str]) -> int:
    """Returns the exit status; the result file says more."""
    job_path, result_path = Path(arguments[0]), Path(arguments[1])
    job = Job.from_json(records.read_json(job_path))
    try:
        run_job(job, result_path)
    except torch.OutOfMemoryError:
        traceback.print_exc()
        if not result_path.exists():
            records.write_json(result_path, {"status": records.OUT_OF_MEMORY})
        return 1
    except Exception:
        # The process boundary: the parent needs the log and the status, whatever went wrong.
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    end(main(sys.argv[1:]))
