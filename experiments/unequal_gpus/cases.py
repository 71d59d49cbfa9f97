"""The unequal GPUs of each part, what is run on them, and about how long. Plain data, no torch."""

from __future__ import annotations

import dataclasses
import itertools

from experiments.common.records import Json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Some GPUs, made unequal, and a job for them.

    Attributes:
        label: its own.
        speeds: stated, one a rank; the fastest is 1.
        memory: share of each GPU's memory that its process may take.
        host_gib: host memory that the ranks may use together; None: what there is.
        batch: samples of the global batch.
        sizes: micro-batches that are measured.
        runs: what is trained after the plan is made, in this order (see RUNS).
        seconds: about how long all of it takes, processes' start included.
    """

    label: str
    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    host_gib: float | None
    batch: int
    sizes: tuple[int, ...]
    runs: tuple[str, ...]
    seconds: float

    @property
    def num_ranks(self) -> int:
        """GPUs."""
        return len(self.speeds)


RUNS = {
    "alone": "each GPU by itself, all at once, each at its own best micro-batch",
    "planned": "as planned",
    "in_kernels": "as planned, ranks waiting for each other inside NCCL's kernels, not in a stream",
    "even": "even batches, even shards, one micro-batch size, all state on the GPUs",
    "even_offload": "even batches and shards, k solved within the same limits",
    "no_offload": "the planned batches and shards, all state on the GPUs",
    "slowdown": "forward and backward alone, with fewer and fewer multiprocessors",
}
"""What can be trained. Those that are expected to end their processes come last in a case."""

SPEED_RUNS = ("alone", "planned", "even")


def cases_of(part: str, scale: float = 1.0) -> list[Case]:
    """The cases of a part; each needs its own processes, and as many GPUs as it has ranks.

    Args:
        part: one of PARTS.
        scale: of the batches; for tries at toy size.
    """
    if part not in PARTS:
        raise ValueError(f"--part {part!r} is unknown: choose of {', '.join(PARTS)}")
    cases = PARTS[part]
    return [dataclasses.replace(case, batch=max(2, round(case.batch * scale))) for case in cases]


def _speed_case(label: str, speeds: tuple[float, ...], batch: int, seconds: float) -> Case:
    return Case(
        label=label,
        speeds=speeds,
        memory=(1.0,) * len(speeds),
        host_gib=None,
        batch=batch,
        sizes=(1, 2, 3, 4, 6, 8, 10, 12, 14, 16),
        runs=SPEED_RUNS,
        seconds=seconds,
    )


FOUR = _speed_case("four", (1.0, 0.5, 0.5, 0.25), 192, 130.0)
HALF = _speed_case("half", (1.0, 0.5), 96, 110.0)
QUARTER = _speed_case("quarter", (1.0, 0.25), 96, 130.0)

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
    seconds=80.0,
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
    seconds=90.0,
)

SLOWDOWN = Case(
    label="slowdown",
    speeds=(1.0,),
    memory=(1.0,),
    host_gib=None,
    batch=8,
    sizes=(8,),
    runs=("slowdown",),
    seconds=50.0,
)

PARTS: dict[str, list[Case]] = {
    "slowdown": [SLOWDOWN],
    "four": [FOUR],
    "two": [HALF, QUARTER],
    "memory": [MEMORY, OFFLOAD],
}


def comparing_waits(case: Case, rounds: int) -> Case:
    """The case with its planned run in turns: ranks waiting in a stream, and in NCCL's kernels.

    Args:
        case: left alone where it has no planned run.
        rounds: of both; a run's later rounds are named `run#2`, `run#3`, ...
    """
    turns = ["planned", "in_kernels"]
    turns += [f"{run}#{number}" for number in range(2, rounds + 1) for run in turns[:2]]
    runs = [turns if run == "planned" else [run] for run in case.runs]
    return dataclasses.replace(case, runs=tuple(itertools.chain.from_iterable(runs)))


def stages_of(case: Case, settings: Json) -> list[Json]:
    """What the case's processes do, one after another. `settings`: model, seq, sms, steps ..."""
    common = {"case": dataclasses.asdict(case), "settings": settings}
    if case.runs == ("slowdown",):
        return [{"name": "slowdown", "kind": "slowdown", **common}]
    stages: list[Json] = [
        {"name": "profile", "kind": "profile", **common},
        {"name": "plan", "kind": "plan", "needs": ["profile"], **common},
    ]
    for run in case.runs:
        needs = ["profile"] if run == "alone" else ["plan"]
        kind = run.partition("#")[0]
        stages.append({"name": run, "kind": kind, "needs": needs, **common})
    return stages


def waves(cases: list[Case], gpus: int) -> list[list[Case]]:
    """Cases that run side by side, in order; each wave has GPUs for all of its cases.

    Raises:
        ValueError: a case needs more GPUs than there are.
    """
    found: list[list[Case]] = []
    for case in cases:
        if case.num_ranks > gpus:
            raise ValueError(f"{case.label} needs {case.num_ranks} GPUs, there are {gpus}")
        used = sum(other.num_ranks for other in found[-1]) if found else gpus
        if used + case.num_ranks > gpus:
            found.append([])
        found[-1].append(case)
    return found
