"""The worker of experiments that time a system's steps: builds, warms up or settles, measures.

Besides the fields that systems.py and model.py read, a job has "warmup" (steps before the timed
ones), "windows" and "steps" (of a window); "settle" {"least", "quiet", "most"} (with k solved:
steps until nothing has moved for "quiet" of them); "built" ("device", or "host" or "partitioned"
for weights that no GPU holds); and its limits: "cap" (share of the GPU's memory that the process
may take) or "cap_gib", and "host_limit_gib", which the kernel enforces.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import resource
import statistics
from collections.abc import Callable
from typing import Any

import torch

from experiments.common import systems
from experiments.common.memory import host_memory, reset_gpu_peak
from experiments.common.model import (
    build_batches,
    build_host_model,
    build_model,
    build_partitioned_model,
)
from experiments.common.records import GIB, Json
from experiments.common.sizes import model_flops, size_of
from experiments.common.timing import (
    SLOW_SECONDS,
    SLOW_STEPS,
    Stepper,
    choose_threads,
    clipped_share,
    measure,
    synchronize,
    warm_up,
)
from experiments.common.worker import Recorder

ROW = ("step", "gpu_fraction", "step_seconds", "update_seconds", "exposed_seconds")
"""The statistics that are kept of every step while k is solved."""


def limit_memory(job: Json) -> None:
    """Makes this rank's GPU torch's current one, and limits memory to what the job allows."""
    if job["device"] == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        cap = job.get("cap")
        if "cap_gib" in job:
            cap = job["cap_gib"] * GIB / torch.cuda.mem_get_info()[1]
        if cap is not None:
            torch.cuda.set_per_process_memory_fraction(cap)
    if "host_limit_gib" in job:
        # Limits the process's private writable memory, page-locked or not.
        most = int(job["host_limit_gib"] * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def make_model(job: Json, dtype: torch.dtype) -> Any:
    """Builds the job's model where its "built" says."""
    built = job.get("built", "device")
    if built == "partitioned":
        return build_partitioned_model(job, dtype, systems.ds_config(job))
    return (build_host_model if built == "host" else build_model)(job, dtype)


def empty_cache() -> None:
    """Gives torch's cached memory back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Bench:
    """A job's system and its steps; everything it returns is plain JSON."""

    def __init__(
        self, job: Json, recorder: Recorder, make: Callable[[torch.dtype], Any] | None = None
    ) -> None:
        """
        Args:
            job: see the module's docstring.
            recorder: the process's recorder.
            make: makes the model in a dtype; unless given, the job's own model.
        """
        self.job = job
        self.recorder = recorder
        self.device = job["device"]
        self._machine_bytes = host_memory().machine_used_bytes
        make = make or functools.partial(make_model, job)
        self.system = systems.build(job, make)
        synchronize(self.device)
        reset_gpu_peak(self.device)
        self.use_batch(job["batch"])
        recorder.reached(f"{job['system']} is built")

    def use_batch(self, batch: int) -> None:
        """Sets the sequences of a micro-batch from the next step on."""
        self.batch = batch
        batches = build_batches({**self.job, "batch": batch}, first=int(os.environ["RANK"]))
        accumulation = self.job.get("accumulation", 1)
        self.stepper = Stepper(self.system, batches, self.device, accumulation)

    @property
    def has_k(self) -> bool:
        """Whether the system is hytrain's engine, which has k."""
        return isinstance(self.system, systems.HyTrain)

    def step(self) -> Json:
        """Runs one step of hytrain and returns its statistics."""
        self.stepper.step()
        row = self.system.observe()
        assert row is not None
        return row

    def settle(self, *, least: int, quiet: int, most: int) -> Json:
        """Runs steps until nothing has been decided or moved for `quiet` steps."""
        rows: list[Json] = []
        changed, before = 0, None
        # A quarter of the time is left for the timed steps.
        end = 0.25 * self.recorder.seconds_left()
        while len(rows) < most and self.recorder.seconds_left() > end:
            rows.append(self.step())
            now = (len(self.system.decisions()), self.system.gpu_layers())
            changed, before = (changed if now == before else len(rows)), now
            if len(rows) >= least and len(rows) - changed >= quiet:
                break
        synchronize(self.device)
        self.recorder.reached(f"{self.system.gpu_layers()} GPU layers after {changed} steps")
        return {
            "steps": len(rows),
            "is_settled": len(rows) - changed >= quiet,
            "settled_after": changed,
            "rows": [{name: row[name] for name in ROW} for row in rows],
            "decisions": [
                [d.step, d.gpu_layers_before, d.gpu_layers_target, d.reason]
                for d in self.system.decisions()
            ],
        }

    def timed(self, *, windows: int, steps: int) -> Json:
        """Times steps as they are; for hytrain also gives measured costs and predicted times."""
        from hytrain.cost.prediction import predict

        found = measure(self.stepper, windows=windows, steps=steps)
        # Page-locked memory may show only in the machine's use.
        grown = found.pop("host_machine_bytes") - self._machine_bytes
        if self.job.get("ranks", 1) == 1:
            found["host_bytes"] = max(found["host_bytes"], grown)
        accumulation = self.job.get("accumulation", 1)
        size = size_of(self.job["model"], self.job.get("layers"))
        flops = accumulation * model_flops(size, self.batch, self.job["seq"])
        found["tflops"] = flops / found["step_seconds"] / 1e12
        found["samples"] = accumulation * self.batch
        if self.device == "cuda":
            found["failed_allocations"] = torch.cuda.memory_stats().get("num_ooms", 0)
        rows = found["observations"]
        if rows:
            updates = statistics.mean(row["update_seconds"] for row in rows)
            exposed = statistics.mean(row["exposed_seconds"] for row in rows)
            found |= {"update_seconds": updates, "exposed_seconds": exposed}
            found |= {"busy_share": updates / found["step_seconds"]}
            found |= {"gpu_fraction": rows[-1]["gpu_fraction"], "clipped": clipped_share(rows)}
        if self.has_k:
            found |= {"gpu_layers": self.system.gpu_layers(), "of": self.system.num_layers}
            if (costs := self.system.costs()) is not None:
                found["costs"] = dataclasses.asdict(costs)
                found["predicted_seconds"] = list(predict(costs).step_seconds)
        self.recorder.reached(f"{found['step_seconds']:.4f} s a step")
        return found

    def close(self) -> None:
        """Closes the system and empties torch's cache; a bare model stays in memory."""
        self.system.close()
        empty_cache()


def run(job: Json, recorder: Recorder) -> None:
    """Measures one system. The result is recorded before the system is closed, which may fail."""
    limit_memory(job)
    # Recorded first: it is known even if the model does not fit.
    parameters = size_of(job["model"], job.get("layers")).num_parameters
    recorder.put(num_parameters=parameters)
    bench = Bench(job, recorder)
    slow = False
    if "settle" in job:
        recorder.put(settling=bench.settle(**job["settle"]))
    elif job.get("ranks", 1) > 1 or job.get("gpu_fraction") == "solve":
        # Ranks step together, so all make the same number of steps; and until k is solved every
        # step may be a slow one.
        for _ in range(job["warmup"]):
            bench.stepper.step()
    else:
        seconds = warm_up(bench.stepper, job["warmup"])
        slow = bool(seconds) and seconds[-1] > SLOW_SECONDS
    recorder.put(threads=choose_threads(bench.stepper))
    steps = min(job["steps"], SLOW_STEPS) if slow else job["steps"]
    recorder.put(**bench.timed(windows=job["windows"], steps=steps))
    bench.close()
