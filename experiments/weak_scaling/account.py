"""Where the time of steps on several GPUs goes, beside forward and backward alone.

Both systems are in one process a rank, with the same model and data, and take turns in windows.
Then torch.profiler records some steps of each: kernels, gaps and waits. A kernel of hytrain's
compute stream is compared with the same call of the other system: the time that it takes longer is
attributed to what ran beside it.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from experiments.common import systems
from experiments.common.bench import limit_memory, make_model
from experiments.common.model import build_batches
from experiments.common.records import Json
from experiments.common.timing import Stepper, synchronize
from experiments.common.worker import Recorder

STEPS = 3
"""Recorded steps."""
SHORT_NS = 5_000
"""A gap between consecutive kernels is shorter than this; longer ones are waits."""
BESIDE = 0.2
"""A kernel is beside others if it overlaps them for more than this share of its time."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel or copy of the device, with times in ns."""

    name: str
    stream: int
    begin: int
    end: int


def run(job: Json, recorder: Recorder) -> None:
    """Records "window_seconds" of both systems, and on a GPU "account", in ms a step."""
    limit_memory(job)
    made: dict[str, Any] = {}
    for name in ("hytrain", systems.REFERENCE):
        one = {**job, "system": name, "drops": True}  # as the reference is measured alone
        made[name] = systems.build(one, lambda dtype: make_model(job, dtype))
        recorder.reached(f"{name} is built")
    batches = build_batches(job, first=int(os.environ["RANK"]))
    steppers = {name: Stepper(system, batches, job["device"]) for name, system in made.items()}
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for name, stepper in steppers.items():
        _window(stepper, job["warmup"])
        recorder.reached(f"{name} is warm")
    for _ in range(job["windows"]):
        for name, stepper in steppers.items():
            seconds[name].append(_window(stepper, job["steps"]))
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    recorder.put(window_seconds=seconds, over=medians["hytrain"] / medians[systems.REFERENCE])
    if job["device"] == "cuda":
        recorded = {name: _recorded(stepper) for name, stepper in steppers.items()}
        recorder.put(account=account(recorded["hytrain"], recorded[systems.REFERENCE], STEPS))
    recorder.reached("account")
    for system in made.values():
        system.close()


def _window(stepper: Stepper, steps: int) -> float:
    """Seconds a step; all ranks begin together."""
    synchronize(stepper.device)
    dist.barrier()
    return stepper.timed_step(steps)


def _recorded(stepper: Stepper) -> list[Kernel]:
    _window(stepper, 2)
    gc.collect()  # or a few steps would have the one that belongs to many
    dist.barrier()
    synchronize(stepper.device)  # or the barrier's kernel would be recorded
    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        for _ in range(STEPS):
            stepper.step()
        synchronize(stepper.device)
    found = [
        Kernel(e.name(), e.device_resource_id(), e.start_ns(), e.start_ns() + e.duration_ns())
        for e in recording.profiler.kineto_results.events()
        if "CUDA" in str(e.device_type()) and e.duration_ns() > 0
    ]
    return sorted(found, key=lambda kernel: kernel.begin)


def account(ours: Sequence[Kernel], alone: Sequence[Kernel], steps: int) -> Json:
    """How much longer hytrain's steps take than the other system's, by cause, in ms a step.

    The causes add up to "more": copies within the GPU, kernels that are slower beside collectives,
    beside updates or beside neither, calls that the other system does not make, gaps between
    kernels, and waits, which include the updates, the end of backward and waits for other ranks.
    """
    compute = Counter(kernel.stream for kernel in alone).most_common(1)[0][0]
    beside = {
        "collectives": [k for k in ours if "nccl" in k.name.lower() and k.stream != compute],
        "updates": [k for k in ours if "adam" in k.name],
    }
    causes = _slower([k for k in ours if k.stream == compute], alone, beside)
    spans = {}
    for sign, kernels in ((1, ours), (-1, alone)):
        span = max(kernel.end for kernel in kernels) - kernels[0].begin
        busy, gaps = _busy([k for k in kernels if k.stream == compute])
        causes["gaps between kernels"] += sign * gaps
        causes["waits"] += sign * (span - busy - gaps)
        spans[sign] = span
    scale = 1e-6 / steps
    return {
        "forward_backward": scale * spans[-1],
        "more": scale * (spans[1] - spans[-1]),
        "causes": {name: round(scale * took, 3) for name, took in causes.most_common()},
        **{name: scale * sum(k.end - k.begin for k in each) for name, each in beside.items()},
    }


def _slower(
    ours: Sequence[Kernel], alone: Sequence[Kernel], beside: dict[str, list[Kernel]]
) -> Counter[str]:
    """How much longer the kernels of a compute stream take, by calls of the same name, in ns."""
    causes: Counter[str] = Counter()
    calls: dict[str, deque[int]] = defaultdict(deque)
    for kernel in alone:
        calls[kernel.name].append(kernel.end - kernel.begin)
    for kernel in ours:
        took = kernel.end - kernel.begin
        if "DtoD" in kernel.name:
            causes["copies within the GPU"] += took
        elif calls[kernel.name]:
            causes[f"kernels {_company(kernel, beside)}"] += took - calls[kernel.name].popleft()
        else:
            causes["calls of its own"] += took
    for name, others in calls.items():
        cause = "copies within the GPU" if "DtoD" in name else "calls of its own"
        causes[cause] -= sum(others)
    return causes


def _company(kernel: Kernel, beside: dict[str, list[Kernel]]) -> str:
    for name, others in beside.items():
        shared = sum(max(0, min(kernel.end, o.end) - max(kernel.begin, o.begin)) for o in others)
        if shared > BESIDE * (kernel.end - kernel.begin):
            return f"beside {name}"
    return "beside neither"


def _busy(kernels: Sequence[Kernel]) -> tuple[int, int]:
    """Time of kernels that follow one another, and of the short gaps between them."""
    busy = gaps = 0
    end = kernels[0].begin
    for kernel in kernels:
        if 0 < kernel.begin - end < SHORT_NS:
            gaps += kernel.begin - end
        busy += max(0, kernel.end - max(end, kernel.begin))
        end = max(end, kernel.end)
    return busy, gaps
