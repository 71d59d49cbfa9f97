"""One rank of a launch: the systems, one after another.

    python -m experiments.weak_scaling.worker JOB.json FOLDER

FOLDER/rank<i>.json is written after every system.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.processes import end
from experiments.common.records import Entry, Job, Json, Measurement, Workload
from experiments.common.stages import (
    Clean,
    Known,
    RunStage,
    empty_caches,
    pin,
    rank_process,
)
from experiments.weak_scaling.stages import SYSTEMS

if TYPE_CHECKING:
    from experiments.common.ranks import Ranks


def job_of(stage: Json, device: str) -> Job:
    """offload_step's description of what a stage measures."""
    settings = stage["settings"]
    options: Json = {"accumulation": stage["accumulation"]}
    warmup = settings["warmup"]
    if stage["kind"] == "hytrain":
        options |= {"gpu_fraction": settings["gpu_fraction"], "section": {}}
        # Ranks step together, so that the number of steps until k has settled must be given.
        warmup = settings["settle"] if settings["gpu_fraction"] == "solve" else warmup
    entry = Entry(label=stage["name"], system=SYSTEMS[stage["kind"]], clip=1.0, options=options)
    workload = Workload(
        model=settings["model"], batch=settings["batch"], seq=settings["seq"], device=device
    )
    measurement = Measurement(windows=2, steps=settings["steps"], warmup=warmup)
    return Job(entry=entry, workload=workload, measurement=measurement)


def run_stage(stage: Json, device: str) -> Json:
    """A system's step, timed on this rank."""
    from experiments.common.memory import gpu_memory, host_memory
    from experiments.common.model import build_batches, build_model
    from experiments.common.sizes import model_flops, size_of
    from experiments.common.systems import load
    from experiments.common.timing import Stepper, measure, synchronize

    job = job_of(stage, device)
    accumulation = stage["accumulation"]
    before = host_memory()
    system = load(job.entry.system)(functools.partial(build_model, job.workload), job)
    stepper = Stepper(system, build_batches(job.workload), device)
    for _ in range(job.measurement.warmup * accumulation):
        stepper.step()
    synchronize(device)
    plan = Measurement(
        windows=job.measurement.windows, steps=job.measurement.steps * accumulation, warmup=0
    )
    timing = measure(stepper, plan, [])
    seconds = timing.step_seconds * accumulation
    # Every rank computes this many operations a step.
    flops = accumulation * model_flops(
        size_of(job.workload.model), job.workload.batch, job.workload.seq
    )
    last = timing.observations[-1] if timing.observations else {}
    result: Json = {
        "step_seconds": seconds,
        "window_seconds": [accumulation * each for each in timing.window_seconds],
        "samples": accumulation * job.workload.batch,
        "tflops": flops / seconds / 1e12,
        "gpu": gpu_memory(device),
        "host_bytes": timing.host_rss_bytes,
        "host_machine_bytes": timing.host_machine_used_bytes - before.machine_used_bytes,
        "gpu_fraction": last.get("gpu_fraction"),
        "update_seconds": last.get("update_seconds"),
        "losses": [timing.losses[0], timing.losses[-1]],
        "cores": len(os.sched_getaffinity(0)),
    }
    system.close()
    return result


def prepare(job: Json, ranks: Ranks, folder: Path) -> tuple[RunStage, Clean]:
    """What a stage is run by."""
    del job, folder

    def run(stage: Json, known: Known) -> Json:
        del known
        return run_stage(stage, ranks.device)

    return run, empty_caches


if __name__ == "__main__":
    pin(os.environ["STAGES_CORES"])
    end(rank_process(sys.argv[1:], prepare))
