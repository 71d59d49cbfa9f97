"""Another system with a model of some size: whether it trains, and what it needs for that."""

from __future__ import annotations

import dataclasses
import time

from experiments.common.memory import gpu_memory, reset_gpu_peak
from experiments.common.model import build_batches
from experiments.common.sizes import model_flops, register
from experiments.common.systems import load
from experiments.common.threads import set_threads
from experiments.common.timing import Stepper, measure, synchronize
from experiments.solve_k.bench import Bench, plan_of

WARMUP = 2
"""Steps: optimizers allocate in the first."""

WINDOWS, STEPS = 2, 1


def other(bench: Bench) -> None:
    """Build the system, step it, and record what it took. Whatever does not fit raises, or is
    ended by the guard of the host's memory."""
    workload, record = bench.job.workload, bench.recorder
    size = register(workload.model, bench.options["layers"])
    record.put(
        size=dataclasses.asdict(size),
        num_parameters=size.num_parameters,
        gpu_total_bytes=bench.gpu_total(),
        checkpointing=True,
    )
    bench.note_host("before building")
    begin = time.perf_counter()
    system = load(bench.job.entry.system)(bench.make_model, bench.job)
    synchronize(bench.device)
    record.put(engine_seconds=time.perf_counter() - begin)
    bench.note_host("engine built")
    set_threads(bench.options["threads"][0])
    reset_gpu_peak(bench.device)
    stepper = Stepper(system, build_batches(workload), bench.device)
    for number in range(1, WARMUP + 1):
        seconds = stepper.timed_step()
        bench.note_host(f"step {number}")
        print(f"step {number}: {seconds:.2f} s", flush=True)
    timing = measure(stepper, plan_of(WINDOWS, STEPS), [])
    flops = model_flops(size, batch=workload.batch, seq=workload.seq)
    record.put(
        trained={
            "step_seconds": timing.step_seconds,
            "window_seconds": list(timing.window_seconds),
            "tflops": flops / timing.step_seconds / 1e12,
            "gpu": gpu_memory(bench.device),
            "host_rss_bytes": timing.host_rss_bytes,
            "losses": list(timing.losses),
        }
    )
    bench.note_host("trained")
