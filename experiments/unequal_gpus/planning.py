"""From what the ranks measured to a plan, and what each run is told. Plain data, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from experiments.offload_step.records import Json
from experiments.unequal_gpus.cases import GIB
from hytrain.planner.baselines import even_split
from hytrain.planner.curves import Table
from hytrain.planner.errors import PlanError
from hytrain.planner.plan import make_plan
from hytrain.planner.problem import Cluster, GpuProfile, Host, Model, PlanProblem
from hytrain.planner.uneven import Infeasible

LEAST_SHARD = 1e-4
"""Of the state: nobody may own nothing."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the plan may use beside what was measured."""

    host_bytes: int | None
    """Of all ranks together; None: what the ranks found."""


def table(sizes: Sequence[int], values: Sequence[float], scale: float = 1.0) -> Table:
    """Measured values against micro-batch sizes."""
    return Table(tuple((float(s), scale * v) for s, v in zip(sizes, values, strict=True)))


def gpu_profile(rank: Json, num_layers: int) -> GpuProfile:
    """A rank's GPU as the planner wants it: times are those of the whole model over its layers."""
    sizes = rank["sizes"]
    per_layer = 1e3 / num_layers
    stored = table(sizes, rank["stored_bytes"])
    return GpuProfile(
        name=rank["device"],
        memory_bytes=max(1, rank["memory_bytes"] - rank["reserve_bytes"]),
        forward_ms=table(sizes, rank["forward"], per_layer),
        backward_ms=table(sizes, rank["backward"], per_layer),
        peak_bytes=stored,
        stored_bytes=stored,
        idle_bytes=rank["idle_bytes"],
        update_rate=rank["gpu_rate"],
        copy_rate=rank["copy_rate"],
        most_samples=sizes[-1],
    )


def problem_of(ranks: Sequence[Json], batch: int, limits: Limits) -> PlanProblem:
    """All ranks on one host, as they are in this experiment."""
    num_layers, parameters = ranks[0]["num_layers"], ranks[0]["parameters"]
    gpus = tuple(gpu_profile(rank, num_layers) for rank in ranks)
    # Measured on all ranks at once, so that the host's bandwidth is in it.
    rate = min(rank["cpu_rate"] for rank in ranks)
    cores = sum(rank["cores"] for rank in ranks)
    found = sum(rank["host_bytes"] for rank in ranks)
    host = Host(
        name="host",
        gpus=gpus,
        cores=cores,
        memory_bytes=found if limits.host_bytes is None else limits.host_bytes,
        bandwidth=30.0 * rate * len(ranks),
        update_rates=Table(((cores / len(ranks), rate),)),
    )
    collectives = ranks[0]["collectives"]

    def against_bytes(name: str) -> Table:
        return Table(tuple((float(size), 1e3 * seconds) for size, seconds in collectives[name]))

    cluster = Cluster(
        hosts=(host,),
        all_gather_ms=against_bytes("all_gather"),
        reduce_scatter_ms=against_bytes("reduce_scatter"),
        uneven_factor=max(1.0, collectives["uneven_factor"]),
    )
    model = Model(name=ranks[0]["model"], num_layers=num_layers, parameters=parameters)
    slowest = max(rank["accumulation"] for rank in ranks)
    return PlanProblem(
        cluster=cluster,
        model=model,
        batch=batch,
        stage=2,
        activations=("store",),
        accumulation_ms=1e3 * slowest / num_layers,
        gradient_bytes=2,
    )


def plan_of(problem: PlanProblem) -> Json:
    """The plan as data.

    Raises:
        PlanError: there is none.
    """
    found = make_plan(problem)
    if isinstance(found, Infeasible):
        raise PlanError(found.reason)
    fractions = [max(rank.shard_fraction, LEAST_SHARD) for rank in found.ranks]
    return {
        "batch_sizes": [rank.batch_size for rank in found.ranks],
        "micro_batch_sizes": [max(1, rank.microbatch_size) for rank in found.ranks],
        "shard_fractions": [fraction / sum(fractions) for fraction in fractions],
        "gpu_fractions": [rank.gpu_layers / problem.model.num_layers for rank in found.ranks],
        "predicted_seconds": found.predicted_seconds,
        "rank_seconds": [rank.step_seconds for rank in found.ranks],
        "gpu_gib": [rank.gpu_bytes / GIB for rank in found.ranks],
        "host_gib": [rank.host_bytes / GIB for rank in found.ranks],
        "limits": [rank.limit for rank in found.ranks],
        "gap": found.gap if found.lower_bound > 0.0 else None,
    }


def verdicts(ranks: Sequence[Json], batch: int, limits: Limits) -> Json:
    """The plan, what an even split is, and why there is none without the host or evenly, if so.

    Raises:
        PlanError: there is no plan.
    """
    problem = problem_of(ranks, batch, limits)
    without_host = make_plan(problem_of(ranks, batch, Limits(host_bytes=0)))
    evenly = even_split(problem)
    return {
        "planned": plan_of(problem),
        "even": even_of(ranks, batch),
        "without_host": without_host.reason if isinstance(without_host, Infeasible) else None,
        "even_split": evenly.reason if isinstance(evenly, Infeasible) else None,
    }


def best_size(rank: Json, most: int | None = None) -> int:
    """The measured micro-batch with the most samples a second."""
    rates = {
        size: size / (forward + backward)
        for size, forward, backward in zip(
            rank["sizes"], rank["forward"], rank["backward"], strict=True
        )
        if most is None or size <= most
    }
    return max(rates, key=lambda size: rates[size]) if rates else 1


def passes_rate(rank: Json) -> float:
    """Samples a second of forward and backward alone, at the best micro-batch."""
    at = rank["sizes"].index(best_size(rank))
    return rank["sizes"][at] / (rank["forward"][at] + rank["backward"][at])


def even_of(ranks: Sequence[Json], batch: int) -> Json:
    """The same for every rank: a share of the batch, and the micro-batch that its slowest GPU does
    best with, of those that divide the share if any does.

    Who splits evenly looks at one GPU, the roomiest, so memory does not come into it.
    """
    share = batch // len(ranks)
    slowest = min(ranks, key=passes_rate)
    dividing = [size for size in slowest["sizes"] if share % size == 0]
    picked = {**slowest, "sizes": [], "forward": [], "backward": []}
    for size, forward, backward in zip(
        slowest["sizes"], slowest["forward"], slowest["backward"], strict=True
    ):
        if size in dividing:
            picked["sizes"].append(size)
            picked["forward"].append(forward)
            picked["backward"].append(backward)
    size = best_size(picked)
    number = len(ranks)
    return {
        "batch_sizes": [share] * number,
        "micro_batch_sizes": [size] * number,
        "shard_fractions": None,
        "gpu_fractions": [1.0] * number,
    }


def alone_of(rank: Json, share: int) -> Json:
    """A rank by itself: its planned share of the batch, in whole micro-batches of its best size."""
    size = best_size(rank)
    return {
        "micro_batch": size,
        "accumulation": max(1, round(share / size)),
        "gpu_fraction": 1.0,
    }


def section_of(run: str, plan: Json, rank: int, limits: Limits, host_available: int) -> Json:
    """The "hytrain" section of a rank's config.

    Args:
        run: one of cases.RUNS but "alone".
        plan: what the planner said, with "planned" and "even".
        rank: whose.
        limits: of the case.
        host_available: bytes of this host that the rank may take by hytrain's own count.
    """
    source = plan["even" if run.startswith("even") else "planned"]
    section: Json = {
        "batch_sizes": source["batch_sizes"],
        "micro_batch_sizes": source["micro_batch_sizes"],
        "gpu_fraction": source["gpu_fractions"][rank],
    }
    if source["shard_fractions"] is not None:
        section["shard_fractions"] = source["shard_fractions"]
    if run == "no_offload":
        section["gpu_fraction"] = 1.0
    if run == "even_offload":
        section["gpu_fraction"] = "solve"
        if limits.host_bytes is not None:
            share = limits.host_bytes // len(source["batch_sizes"])
            reserve = max(0, host_available - share)
            section["solver"] = {"host_memory_reserve_bytes": reserve}
    return section
