"""The unequal GPUs of each part, what is run on them, and about how long. Plain data, no torch."""

from __future__ import annotations

import dataclasses

from experiments.common.records import Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Some GPUs, made unequal, and a job for them.

    Attributes:
        label: the case's unique name.
        speeds: stated speeds, one a rank; the fastest is 1.
        memory: share of each GPU's memory that its process may take.
        host_gib: host memory that the ranks may use together; None: all of it.
        batch: samples of the global batch.
        sizes: micro-batches that are measured.
        runs: what is trained after the plan is made, in this order (see RUNS).
    """

    label: str
    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    host_gib: float | None = None
    batch: int
    sizes: tuple[int, ...]
    runs: tuple[str, ...]


RUNS = {
    "alone": "each GPU by itself, all at once, each at its own best micro-batch",
    "planned": "as planned",
    "in_kernels": "as planned, ranks waiting for each other inside NCCL's kernels, not in a stream",
    "even": "even batches, even shards, one micro-batch size, all state on the GPUs",
    "even_offload": "even batches and shards, k solved within the same limits",
    "no_offload": "the planned batches and shards, all state on the GPUs",
}


def _speed_case(label: str, speeds: tuple[float, ...], batch: int) -> Case:
    return Case(
        label=label,
        speeds=speeds,
        memory=(1.0,) * len(speeds),
        batch=batch,
        sizes=(1, 2, 3, 4, 6, 8, 10, 12, 14, 16),
        runs=("alone", "planned", "even"),
    )


# Sizes for 2.915 B parameters: the training copy and its gradients take 10.9 GiB on every rank that
# computes, a sample of 512 tokens 1.5 GiB of activations, all state 38 GiB (12 bytes a parameter,
# and 2 of its gradient at the end); 1 GiB or 4 % stays free, and 1 GiB is for workspaces.
# 22 GiB: 17 % of the state beside two samples; an even half is 19 GiB.
MEMORY = Case(
    label="memory",
    speeds=(1.0, 0.5),
    memory=(0.16, 1.0),
    host_gib=0.0,
    batch=48,
    sizes=(1, 2, 3, 4, 5, 6, 7, 8),
    runs=("planned", "even"),
)
# 15.4 GiB hold 3 % of the state beside a sample (21 % with none), 38 GiB 62 %, the host 41 %: less
# than all without the host, more with it; of an even half 47 % would have to be on the host.
OFFLOAD = Case(
    label="offload",
    speeds=(1.0, 0.5),
    memory=(0.11, 0.25),
    host_gib=15.6,
    batch=48,
    sizes=(1, 2, 4, 6, 8, 10, 12, 14, 16),
    runs=("planned", "even_offload", "no_offload"),
)
PARTS: dict[str, list[Case]] = {
    "four": [_speed_case("four", (1.0, 0.5, 0.5, 0.25), 192)],
    "two": [_speed_case("half", (1.0, 0.5), 96), _speed_case("quarter", (1.0, 0.25), 96)],
    "memory": [MEMORY, OFFLOAD],
}


def jobs_of(case: Case, settings: Json) -> list[Json]:
    """The profile with the plan, then each run; "alone" is a world of its own for each GPU."""
    return [
        {
            "label": f"{case.label} {run}",
            "worker": "experiments.unequal_gpus.worker",
            **{"case": dataclasses.asdict(case), "run": run.partition("#")[0]},
            **{"ranks": len(case.speeds), "separate": run == "alone", "seconds": 60.0},
            **settings,
        }
        for run in ("profile", *case.runs)
    ]
