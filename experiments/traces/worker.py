"""The measuring process: records one run, then times it and its variants in turns.

    python -m experiments.traces.worker JOB.json RESULT.json

hytrain records itself; of another system, and again of hytrain after its recording, torch.profiler
does it, and the share of its steps in which the GPU has a kernel is computed from its own events.
"""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from experiments.common import records, systems
from experiments.common.model import build_batches, build_model
from experiments.common.processes import end
from experiments.common.records import Job, Json
from experiments.common.timing import Stepper, synchronize
from experiments.traces.cases import RECORDED

PLAIN_STEPS = 10
"""After the recording, so that hytrain writes its file and says what recording cost."""


def _profiled(stepper: Stepper, folder: Path) -> Json:
    """Steps under torch.profiler: its file, and the GPU's busy share from its events."""
    activities = [ProfilerActivity.CPU]
    if stepper.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=0, warmup=1, active=RECORDED, repeat=1)
    with profile(activities=activities, schedule=plan) as profiler:
        for _ in range(1 + RECORDED):
            stepper.step()
            profiler.step()
        synchronize(stepper.device)
    path = folder / "torch_profiler.json"
    profiler.export_chrome_trace(str(path))
    return {"file": str(path), "busy": _busy(profiler)}


def _busy(profiler: Any) -> float | None:
    """The union of kernels within the profiler's steps, over the time of these steps."""
    events = list(profiler.events())
    steps = [e for e in events if e.name.startswith("ProfilerStep")]
    on_host = [e for e in steps if e.device_type == torch.autograd.DeviceType.CPU]
    begin = min(e.time_range.start for e in on_host)
    stop = max(e.time_range.end for e in on_host)
    kernels = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA
        and not e.name.startswith(("Memcpy", "Memset", "ProfilerStep"))
        and not e.is_user_annotation
    )
    if not kernels:
        return None
    covered, reached = 0.0, begin
    for first, last in kernels:
        first, last = max(first, reached), min(last, stop)
        if last > first:
            covered += last - first
            reached = last
    return covered / (stop - begin)


def _timed(stepper: Stepper, steps: int) -> float:
    """Seconds a step."""
    synchronize(stepper.device)
    begin = time.perf_counter()
    for _ in range(steps):
        stepper.step()
    synchronize(stepper.device)
    return (time.perf_counter() - begin) / steps


def _in_turns(system: Any, job: Job, plain: Stepper) -> Json:
    """Seconds a step of the run as it is and of its variants, a window each, several times."""
    options, plan = job.entry.options, job.measurement
    seconds: dict[str, list[float]] = {"": []}
    for turn in range(plan.windows):
        for variant in ({}, *options["variants"]):
            if options["variants"]:
                wanted = variant.get("gpu_fraction")
                system.set_gpu_fraction(options["gpu_fraction"] if wanted is None else wanted)
            stepper = plain
            if (factor := variant.get("batch_factor", 1)) > 1:
                workload = dataclasses.replace(job.workload, batch=job.workload.batch * factor)
                stepper = Stepper(system, build_batches(workload), plain.device)
            # The first steps move layers, or ask for memory.
            _timed(stepper, plan.warmup if turn == 0 or options["variants"] else 1)
            seconds.setdefault(variant.get("label", ""), []).append(_timed(stepper, plan.steps))
    return seconds


def run_job(job: Job) -> Json:
    """All of it; raises what the system raises."""
    options, folder = job.entry.options, Path(job.entry.options["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    system: Any = systems.load(job.entry.system)(
        lambda dtype: build_model(job.workload, dtype), job
    )
    stepper = Stepper(system, build_batches(job.workload), job.workload.device)
    result: Json = {}
    if job.entry.system == "hytrain":
        _timed(stepper, options["first"] - 1 + RECORDED + PLAIN_STEPS)
    else:
        _timed(stepper, options["first"] - 1)
    result["profiler"] = _profiled(stepper, folder)
    result["seconds"] = _in_turns(system, job, stepper)
    system.drain()
    observed = system.observe()
    result["gpu_fraction"] = None if observed is None else observed["gpu_fraction"]
    system.close()
    return result


def main(arguments: list[str]) -> int:
    """Returns the exit status; the result file says more."""
    job, path = Job.from_json(records.read_json(Path(arguments[0]))), Path(arguments[1])
    try:
        records.write_json(path, {"status": records.OK, **run_job(job)})
    except Exception as error:
        # The process boundary: the parent needs the log and the status, whatever went wrong.
        traceback.print_exc()
        records.write_json(path, {"status": records.FAILED, "error": str(error)})
        return 1
    return 0


if __name__ == "__main__":
    end(main(sys.argv[1:]))
