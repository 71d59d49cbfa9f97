"""One rank of one mode: builds, steps, writes what it saw.

    python -m experiments.zero3.worker JOB.json RESULT.json

RANK and WORLD_SIZE come from the environment, as a launcher sets them.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

import hytrain
from experiments.common.memory import gpu_memory, host_memory, reset_gpu_peak
from experiments.common.model import build_batches, build_host_model, build_model
from experiments.common.processes import end
from experiments.common.records import Json, Workload, read_json, write_json
from experiments.common.systems.base import OPTIMIZER
from experiments.common.timing import synchronize


def config_of(job: Json) -> Json:
    """The DeepSpeed JSON of a mode."""
    zero: Json = {
        "stage": 2 if job["stage"] == 2 else 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }
    if job["streamed"]:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    section: Json = {"gpu_fraction": job["gpu_fraction"]}
    if job["shard_fractions"]:
        section["shard_fractions"] = job["shard_fractions"]
    return {
        "train_micro_batch_size_per_gpu": job["batch"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": copy.deepcopy(OPTIMIZER),
        "steps_per_print": 10**9,
        "hytrain": section,
    }


def make_model(job: Json, workload: Workload) -> Any:
    """On the device; where the weights do not fit there, on the host."""
    build = build_model if job["cap_share"] is None else build_host_model
    return build(workload, torch.bfloat16)


def cap_memory(job: Json) -> Json:
    """Less GPU memory than the weights alone would need."""
    if job["cap_share"] is None or job["device"] != "cuda":
        return {"cap_bytes": None}
    total = torch.cuda.mem_get_info()[1]
    cap = job["cap_share"] * job["weight_bytes"]
    torch.cuda.set_per_process_memory_fraction(cap / total)
    return {"cap_bytes": int(cap)}


def run(job: Json) -> Json:
    """Steps; times, losses and memory."""
    rank = int(os.environ["RANK"])
    device = f"cuda:{rank}" if job["device"] == "cuda" else "cpu"
    if job["device"] == "cuda":
        torch.cuda.set_device(rank)
    result = cap_memory(job)
    workload = Workload(model=job["model"], batch=job["batch"], seq=job["seq"], device=device)
    begin = time.perf_counter()
    model = make_model(job, workload)
    if job["checkpointing"]:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, _, _, _ = hytrain.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(job)
    )
    result["build_seconds"] = time.perf_counter() - begin
    batches = build_batches(workload)
    losses: list[torch.Tensor] = []

    def step(number: int) -> None:
        batch = batches[(number + rank) % len(batches)]
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())

    for number in range(job["warmup"]):
        step(number)
    synchronize(job["device"])
    reset_gpu_peak(job["device"])
    windows: list[float] = []
    for window in range(2):
        begin = time.perf_counter()
        for number in range(job["steps"]):
            step(job["warmup"] + window * job["steps"] + number)
        synchronize(job["device"])
        windows.append((time.perf_counter() - begin) / job["steps"])
    result |= {
        "status": "ok",
        "window_seconds": windows,
        "step_seconds": sum(windows) / 2,
        "losses": [float(loss) for loss in losses],
        "gpu": gpu_memory(job["device"]),
        "host_rss_bytes": host_memory().rss_bytes,
    }
    engine.destroy()
    return result


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    job, path = read_json(Path(arguments[0])), Path(arguments[1])
    try:
        write_json(path, run(job))
    except Exception as error:
        # The process boundary: the table says what went wrong.
        traceback.print_exc()
        out = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        status = (
            "out of memory" if out else "refused" if isinstance(error, ValueError) else "failed"
        )
        write_json(path, {"status": status, "error": f"{type(error).__name__}: {error}"[:2000]})
        return 1
    return 0


if __name__ == "__main__":
    end(main(sys.argv[1:]))
