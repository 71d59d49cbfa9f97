"""The measuring process: records one run, then times it and its variants in turns.

hytrain records itself. torch.profiler records another system, and hytrain again after its own
recording; the share of these steps in which the GPU runs a kernel is computed from its events.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from experiments.common import systems
from experiments.common.model import build_batches, build_model
from experiments.common.records import Json
from experiments.common.timing import Stepper, synchronize
from experiments.common.worker import Recorder

PLAIN_STEPS = 10
"""Steps after the recording, so that hytrain writes its file and says what recording cost."""
TURNS, STEPS, SETTLING_STEPS = 2, 4, 4
"""Windows of each variant, steps of one, and steps before it: they move layers, or ask for
memory."""


def _profiled(stepper: Stepper, steps: int, path: Path) -> float | None:
    """Makes steps under torch.profiler, which writes a file; returns the GPU's busy share."""
    activities = [ProfilerActivity.CPU]
    if stepper.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(activities=activities, schedule=plan) as profiler:
        for _ in range(1 + steps):
            stepper.step()
            profiler.step()
        synchronize(stepper.device)
    profiler.export_chrome_trace(str(path))
    return _busy(profiler)


def _busy(profiler: Any) -> float | None:
    """The union of kernels within the profiler's steps, over the time of these steps."""
    events = list(profiler.events())
    on_host = [
        e
        for e in events
        if e.name.startswith("ProfilerStep") and e.device_type == torch.autograd.DeviceType.CPU
    ]
    reached = begin = min(e.time_range.start for e in on_host)
    stop = max(e.time_range.end for e in on_host)
    kernels = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if e.device_type == torch.autograd.DeviceType.CUDA
        and not e.name.startswith(("Memcpy", "Memset", "ProfilerStep"))
        and not e.is_user_annotation
    )
    covered = 0.0
    for first, last in kernels:
        first, last = max(first, reached), min(last, stop)
        if last > first:
            covered, reached = covered + last - first, last
    return covered / (stop - begin) if kernels else None


def _in_turns(system: Any, job: Json, plain: Stepper) -> dict[str, list[float]]:
    """Seconds a step of the plain run and of its variants, in turns, a window each."""
    seconds: dict[str, list[float]] = {}
    for _ in range(TURNS):
        for variant in ({}, *job["variants"]):
            if job["variants"]:
                fraction = variant.get("gpu_fraction", job["gpu_fraction"])
                system.engine.set_gpu_fraction(fraction)
            stepper = plain
            if (factor := variant.get("batch_factor", 1)) > 1:
                larger = build_batches({**job, "batch": job["batch"] * factor})
                stepper = Stepper(system, larger, plain.device)
            stepper.timed_step(SETTLING_STEPS)
            seconds.setdefault(variant.get("label", ""), []).append(stepper.timed_step(STEPS))
    return seconds


def run(job: Json, recorder: Recorder) -> None:
    """Records and times the job's run; raises what the system raises."""
    folder, steps = Path(job["folder"]), job["recorded"]
    files = {"profiler": str(folder / "torch_profiler.json")}
    if job["system"] == "hytrain":
        section: Json = {
            "trace": {"dir": str(folder), "steps": [job["first"], job["first"] + steps]}
        }
        if "cpu_threads" in job:
            section["offload"] = {"cpu_threads": job["cpu_threads"]}
        job = {**job, "section": section}
        files["recorder"] = str(folder / "trace_rank0.json")
    system = systems.build(job, functools.partial(build_model, job))
    stepper = Stepper(system, build_batches(job), job["device"])
    extra = steps + PLAIN_STEPS if job["system"] == "hytrain" else 0
    stepper.timed_step(job["first"] - 1 + extra)
    busy = _profiled(stepper, steps, Path(files["profiler"]))
    recorder.put(busy=busy, files=files, seconds=_in_turns(system, job, stepper))
    system.drain()
    system.close()
