"""Measured ranks and cases as the processes write them, made up."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.offload_step import records
from experiments.offload_step.records import Json
from experiments.unequal_gpus.cases import GIB, Case

PARAMETERS = 2_900_000_000


def profile(speed: float = 1.0, *, memory_gib: float = 130.0, **changes: Any) -> Json:
    """A GPU that takes 7 ms of forward a sample at speed 1, and twice that of backward."""
    sizes = [1, 2, 4, 8]
    found: Json = {
        "sizes": sizes,
        "forward": [(0.002 + 0.007 * size) / speed for size in sizes],
        "backward": [(0.004 + 0.014 * size) / speed for size in sizes],
        "accumulation": 0.0,
        "stored_bytes": [1.5 * size * GIB for size in sizes],
        "idle_bytes": GIB,
        "model": "llama-3b",
        "parameters": PARAMETERS,
        "num_layers": 26,
        "device": "a GPU",
        "memory_bytes": int(memory_gib * GIB),
        "reserve_bytes": GIB,
        "gpu_rate": 120e9,
        "cpu_rate": 4e9,
        "cores": 16,
        "copy_rate": 50e9,
        "host_bytes": 100 * GIB,
        "made_unequal": {"speed": speed, "granted_sms": int(128 * speed)},
        "collectives": {
            "all_gather": [(1e6, 1e-5), (2e8, 1e-3)],
            "reduce_scatter": [(1e6, 1e-5), (2e8, 1e-3)],
            "uneven_factor": 1.1,
        },
    }
    return {**found, **changes}


def trained(step: float, samples: float) -> Json:
    """A rank's result of a run."""
    return {
        "step_seconds": step,
        "samples_per_second": samples,
        "gpu": {"peak_allocated_bytes": 10 * GIB},
    }


def stage(*ranks: Json | None, status: str = records.OK, **more: Any) -> Json:
    """A stage's result."""
    return {"status": status, "ranks": list(ranks), **more}


def case(
    speeds: Sequence[float] = (1.0, 0.5), runs: Sequence[str] = ("alone", "planned", "even")
) -> Case:
    """A case of so many ranks."""
    return Case(
        label="case",
        speeds=tuple(speeds),
        memory=(1.0,) * len(speeds),
        host_gib=None,
        batch=96,
        sizes=(1, 2, 4, 8),
        runs=tuple(runs),
        seconds=1.0,
    )


def record(made: Case, results: Json) -> Json:
    """A case as result.json has it."""
    return {"case": dataclasses.asdict(made), "results": results}
