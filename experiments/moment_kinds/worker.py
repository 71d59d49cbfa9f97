"""The measuring process of one part: builds, steps, records after each stage.

python -m experiments.moment_kinds.worker JOB.json RESULT.json
"""

from __future__ import annotations

import copy
import resource
import sys
import time
import traceback
from pathlib import Path

import psutil
import torch

from experiments.common import records
from experiments.common.memory import gpu_memory, reset_gpu_peak
from experiments.common.model import build_host_model, build_partitioned_model
from experiments.common.processes import end
from experiments.common.records import GIB, Job, Json
from experiments.common.systems.deepspeed_common import build_deepspeed
from experiments.common.systems.hytrain import config_of
from experiments.common.timing import Stepper, measure
from experiments.solve_k.bench import Bench, checkpoint, plan_of
from experiments.solve_k.recorder import HostMemoryGuard, Recorder

TURNS = 3
"""Windows of each kind in part k0."""
SECONDS_TO_CLOSE = 5.0
_QUIET_STEPS = 3
"""In which no layer has moved, before anything is timed."""
_MOST_TIMES = 4
"""Times the least number of steps, after which it is timed all the same."""
_MOST_WINDOWS = 4
"""Timed ones, until no layer moves in one."""


class Kind(Bench):
    """A bench whose engine keeps its moments in one kind."""

    def __init__(self, job: Job, recorder: Recorder, begin: float) -> None:
        super().__init__(job, recorder, begin)
        self._begin = begin

    def reached(self, phase: str) -> None:
        """Into the record, and printed: when a phase ended, since the process began."""
        seconds = round(time.monotonic() - self._begin, 2)
        self.recorder.append("phases", {"ended": phase, "at_seconds": seconds})
        print(f"{seconds:.1f} s: {phase}", flush=True)

    def choose(self, kind: str) -> None:
        """Of the next engine."""
        self.options["section"] = {"moments": kind}

    def make_model(self, dtype: torch.dtype) -> torch.nn.Module:
        """On the device; on the host where the engine streams the weights; in parts on all ranks'
        devices where they are "partitioned"."""
        options, workload = self.options, self.job.workload
        if options.get("partitioned", False):
            model = build_partitioned_model(workload, dtype, config_of(self.job))
        elif options.get("streamed", False):
            model = build_host_model(workload, dtype)
        else:
            return super().make_model(dtype)
        if options["checkpointing"] == "on":
            checkpoint(model)
        return model

    def has_time(self, steps: int, seconds: float) -> bool:
        """Whether so many steps of so many seconds are left."""
        return self.seconds_left() > steps * seconds + SECONDS_TO_CLOSE

    def settled(self) -> bool:
        """Steps until no layer moves any more; whether it came to that in the time that there is.

        Layers move a few at a time, so that a solved k is reached some steps after it is known.
        """
        least = self.options["settle_steps"]
        seen: list[int] = []
        while len(seen) < _MOST_TIMES * least:
            row = self.step()
            seen.append(self.placed.gpu_layers())
            memory = [
                f"{name.removesuffix('_bytes')} {value / GIB:.1f} GiB"
                for name, value in gpu_memory(self.device).items()
            ]
            words = [f"{row['step_seconds']} s", f"{seen[-1]} layers", *memory]
            print(f"step {len(seen)}: {', '.join(words)}", flush=True)
            if len(seen) >= least and len(set(seen[-_QUIET_STEPS:])) == 1:
                return True
            if not self.has_time(2, row["step_seconds"] or 0.0):
                break
        return False

    def some_timed(self, steps: int) -> Json:
        """Steps in one window, fewer where the time ends."""
        begin = time.perf_counter()
        self.step()
        one = time.perf_counter() - begin
        while steps > 1 and not self.has_time(steps, one):
            steps -= 1
        return self.timed(windows=1, steps=steps)

    def timed_at_rest(self, steps: int) -> Json:
        """A window of :meth:`some_timed` in which no layer moved, or the last one."""
        for _ in range(_MOST_WINDOWS):
            before = self.placed.gpu_layers()
            window = self.some_timed(steps)
            window["is_settled"] = window["gpu_layers"] == before
            if window["is_settled"] or not self.has_time(steps + 1, window["step_seconds"]):
                break
        return window


def in_turns(job: Job, recorder: Recorder, begin: float) -> None:
    """One engine a kind, all alive, some steps of each after those of the others."""
    benches: dict[str, Kind] = {}
    for kind in job.entry.options["kinds"]:
        bench = Kind(copy.deepcopy(job), recorder, begin)
        bench.choose(kind)
        bench.build()
        bench.reached(f"{kind}: model")
        if not benches:
            recorder.put(reference=bench.reference())
            bench.reached("forward and backward only")
        bench.start()
        bench.reached(f"{kind}: engine")
        benches[kind] = bench
    steps = job.entry.options["timed_steps"]
    for kind, bench in benches.items():
        for _ in range(job.entry.options["settle_steps"]):
            bench.step()
        bench.reached(f"{kind}: settled")
    for turn in range(TURNS):
        for kind, bench in benches.items() if turn % 2 == 0 else reversed(benches.items()):
            # What the other kind left in caches and in flight is not this one's.
            bench.step()
            recorder.append(f"kind {kind}", bench.timed(windows=1, steps=steps))
            bench.reached(f"{kind}: turn {turn}")


def one_after_another(job: Job, recorder: Recorder, begin: float) -> None:
    """Forward and backward only, then an engine a kind around the same model."""
    options = job.entry.options
    bench = Kind(job, recorder, begin)
    bench.build()
    bench.reached("model")
    if not options.get("streamed", False):
        recorder.put(reference=bench.reference(warmup=2, windows=2, steps=2))
        bench.reached("forward and backward only")
    for kind in options["kinds"]:
        bench.choose(kind)
        bench.start()
        bench.reached(f"{kind}: engine")
        is_settled = bench.settled()
        bench.reached(f"{kind}: settled")
        timed = bench.timed_at_rest(options["timed_steps"])
        timed["is_settled"] &= is_settled
        recorder.append(f"kind {kind}", timed)
        bench.reached(f"{kind}: timed")
        bench.close()
        bench.reached(f"{kind}: closed")


def by_zero3(job: Job, recorder: Recorder, begin: float) -> None:
    """DeepSpeed's ZeRO-3 with weights and state on the host; its second and later steps."""
    (kind,) = job.entry.options["kinds"]
    bench = Kind(job, recorder, begin)
    bench.build()
    bench.reached("model")
    reset_gpu_peak(bench.device)
    offload = {"device": "cpu", "pin_memory": True}
    zero = {"stage": 3, "offload_optimizer": offload, "offload_param": dict(offload)}
    stepper = Stepper(
        build_deepspeed(lambda _: bench.model, job, zero), bench.batches, bench.device
    )
    bench.reached(f"{kind}: engine")
    print(f"first step: {stepper.timed_step():.3f} s", flush=True)
    timing = measure(stepper, plan_of(1, job.entry.options["timed_steps"]), [])
    row = bench.summary(timing)
    recorder.append(f"kind {kind}", {**row, "host_rss_bytes": timing.host_rss_bytes})
    bench.reached(f"{kind}: timed")


PLANS = {"turns": in_turns, "sequence": one_after_another, "zero3": by_zero3}


def limit_memory(options: Json, device: str) -> Json:
    """The GPU's memory by a fraction, the host's by a limit that the kernel enforces."""
    limits: Json = {}
    if options.get("gpu_gib") and device == "cuda":
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(options["gpu_gib"] * GIB / total)
        limits["gpu_gib"] = options["gpu_gib"]
    if options.get("host_gib"):
        # What the process may have of private memory that it can write: page-locked or not.
        most = int(options["host_gib"] * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        limits["host_gib"] = options["host_gib"]
    return limits


def run_job(job: Job, recorder: Recorder, begin: float) -> None:
    """Measures; raises what the engine raises."""
    options = job.entry.options
    recorder.put(limits=limit_memory(options, job.workload.device))
    guard = HostMemoryGuard(recorder, options["host_floor_gib"] * GIB)
    guard.start()
    try:
        PLANS[options["plan"]](job, recorder, begin)
    finally:
        guard.stop()
        recorder.put(host_available_least_bytes=guard.least_bytes)
    recorder.put(status=records.OK, seconds=time.monotonic() - begin)


def main(arguments: list[str], begin: float) -> int:
    """Returns the exit status; the result file says more."""
    job = Job.from_json(records.read_json(Path(arguments[0])))
    recorder = Recorder(Path(arguments[1]))
    try:
        run_job(job, recorder, begin)
    except Exception as error:
        # The process boundary: the table says what went wrong.
        traceback.print_exc()
        out = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        status = records.OUT_OF_MEMORY if out else records.FAILED
        recorder.put(status=status, error=f"{type(error).__name__}: {error}"[:2000])
        return 1
    return 0


if __name__ == "__main__":
    # The limit counts from the process's start, before its imports.
    age = time.time() - psutil.Process().create_time()
    end(main(sys.argv[1:], time.monotonic() - age))
