"""Makes a plan from a profile, and the config of each run. Plain data, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from experiments.common.records import GIB, Json
from hytrain.errors import PlanError
from hytrain.formats.policies import ACTIVATIONS, LAYER_MAJOR
from hytrain.formats.profile_file import DeviceProfile, ProfileFile
from hytrain.placement.memory import GPU_RESERVE_SHARE, host_reserve
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from
from hytrain.tools.planner.result import Plan, even_split, plan_file

LEAST_SHARD = 1e-4
"""Least share of the state: every rank must own some of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of what the plan may use, besides what was measured.

    Attributes:
        host_bytes: host memory of all ranks together; None: what the ranks found.
        least_reserve: bytes of a GPU that stay free at least.
    """

    host_bytes: int | None
    least_reserve: int = GIB


def device_of(profile: ProfileFile, rank: int) -> DeviceProfile:
    """A rank's device. All ranks are on one host here."""
    (host,) = profile.hosts
    return profile.device(host.host, host.ranks[rank])


@dataclasses.dataclass(frozen=True)
class Passes:
    """Forward and backward of the whole model at a micro-batch, in seconds."""

    samples: int
    forward: float
    backward: float

    @property
    def rate(self) -> float:
        """Samples a second, without any update."""
        return self.samples / (self.forward + self.backward)


def passes_of(profile: ProfileFile, rank: int, activations: str = "store") -> list[Passes]:
    """Passes by ascending micro-batch, from a layer's times and those outside of the layers.

    Args:
        profile: the profile of all ranks.
        rank: the rank whose passes these are.
        activations: "store", or a policy that recomputes them.
    """
    device = device_of(profile, rank)
    layers = profile.model.num_layers
    outside = {row.samples: row for row in device.outside}
    found: list[Passes] = []
    for row in device.layer:
        rest = outside.get(row.samples)
        forward = layers * row.forward_ms + (rest.forward_ms if rest else 0.0)
        of_layer = row.backward_ms if activations == "store" else row.recompute_backward_ms
        backward = layers * of_layer + (rest.backward_ms if rest else 0.0)
        found.append(Passes(row.samples, forward / 1e3, backward / 1e3))
    return found


def best_passes(passes: Sequence[Passes]) -> Passes:
    """The micro-batch with the most samples a second."""
    return max(passes, key=lambda each: each.rate)


def passes_rate(profile: ProfileFile) -> float:
    """Samples a second that all ranks reach with forward and backward alone, each at its best."""
    ranks = range(len(profile.hosts[0].ranks))
    return sum(best_passes(passes_of(profile, rank)).rate for rank in ranks)


def speeds_of(profile: ProfileFile) -> list[list[float]]:
    """Each rank's speeds of forward and of backward, relative to the first rank's, at the largest
    micro-batch that all ranks have measured."""
    ranks = range(len(profile.hosts[0].ranks))
    passes = [{p.samples: p for p in passes_of(profile, rank)} for rank in ranks]
    size = max(set.intersection(*map(set, passes)))
    first = passes[0][size]
    return [[first.forward / p[size].forward, first.backward / p[size].backward] for p in passes]


def problem_of(profile: ProfileFile, batch: int, limits: Limits) -> PlanProblem:
    """The problem of planning a batch for all ranks, with any activations policy, as by default.

    Raises:
        PlanError: nothing can be planned with these limits.
    """

    def kept_free(total: int) -> int:
        if limits.host_bytes is None:
            return host_reserve(None, total)
        return max(0, total - limits.host_bytes)

    options = PlanOptions(
        batch=batch,
        gpu_reserve=lambda total: max(limits.least_reserve, int(GPU_RESERVE_SHARE * total)),
        host_reserve=kept_free,
        stage=2,
        activations=ACTIVATIONS,
    )
    return problem_from(profile, options)


def data_of(problem: PlanProblem, plan: Plan) -> Json:
    """A plan as plain data."""
    fractions = [max(rank.shard_fraction, LEAST_SHARD) for rank in plan.ranks]
    return {
        "batch_sizes": [rank.batch_size for rank in plan.ranks],
        "micro_batch_sizes": [max(1, rank.microbatch_size) for rank in plan.ranks],
        "activations": [rank.activations for rank in plan.ranks],
        "shard_fractions": [fraction / sum(fractions) for fraction in fractions],
        "gpu_fractions": [rank.gpu_layers / problem.model.num_updates for rank in plan.ranks],
        "predicted_seconds": plan.predicted_seconds,
        "unclipped_seconds": plan.unclipped_seconds,
        "clipped_seconds": plan.clipped_seconds,
        "gpu_gib": [rank.gpu_bytes / GIB for rank in plan.ranks],
        "host_gib": [rank.host_bytes / GIB for rank in plan.ranks],
    }


def predicted_seconds(planned: Json, clipped_share: float) -> float:
    """Seconds of a plan's step if this share of steps is clipped."""
    unclipped, clipped = planned["unclipped_seconds"], planned["clipped_seconds"]
    return unclipped + clipped_share * (clipped - unclipped)


def verdicts(profile: ProfileFile, batch: int, limits: Limits) -> Json:
    """The plan, the even split, and, if so, why none fits without the host or evenly.

    Raises:
        PlanError: there is no plan.
    """
    problem = problem_of(profile, batch, limits)
    planned = make_plan(problem)
    if isinstance(planned, Infeasible):
        raise PlanError(planned.reason)
    without_host = make_plan(problem_of(profile, batch, dataclasses.replace(limits, host_bytes=0)))
    evenly = even_split(problem)
    return {
        "file": plan_file(problem, planned).model_dump(mode="json"),
        "planned": data_of(problem, planned),
        "even": naive_even(profile, batch)
        if evenly is None
        else {**data_of(problem, evenly), "shard_fractions": None},
        "without_host": without_host.reason if isinstance(without_host, Infeasible) else None,
        "even_split": "no even split fits" if evenly is None else None,
    }


def naive_even(profile: ProfileFile, batch: int) -> Json:
    """The even split with the least memory, used if the planner finds none that fits.

    All ranks do the same: one sample at once, activations recomputed, all state on the GPUs.
    """
    number = len(profile.hosts[0].ranks)
    return {
        "batch_sizes": [batch // number] * number,
        "micro_batch_sizes": [1] * number,
        "activations": ["recompute"] * number,
        "shard_fractions": None,
        "gpu_fractions": [1.0] * number,
    }


def alone_of(profile: ProfileFile, rank: int, share: int) -> tuple[int, int]:
    """Micro-batch and accumulation of a rank by itself, for its planned share of the batch in whole
    micro-batches of its best size."""
    size = best_passes(passes_of(profile, rank)).samples
    return size, max(1, round(share / size))


def section_of(run: str, plan: Json, rank: int, limits: Limits, host_available: int) -> Json:
    """The "hytrain" section of a rank's config.

    Args:
        run: one of cases.RUNS, except "alone".
        plan: the planner's verdicts, with "planned", "even", and the "path" of plan.json.
        rank: the rank whose config it is.
        limits: the case's limits.
        host_available: bytes of this host that the rank may take by hytrain's own count.
    """
    if not run.startswith("even"):
        # k is fixed, so that the steps that are timed are those that were predicted.
        fraction = 1.0 if run == "no_offload" else plan["planned"]["gpu_fractions"][rank]
        section: Json = {"plan": plan["path"], "gpu_fraction": fraction}
        return section | ({"wait_in_stream": False} if run == "in_kernels" else {})
    even = plan["even"]
    section = {
        "batch_sizes": even["batch_sizes"],
        "micro_batch_sizes": even["micro_batch_sizes"],
        "gpu_fraction": even["gpu_fractions"][rank],
    }
    if even["activations"][rank] in LAYER_MAJOR:
        section |= {"accumulation": "layer_major", "activations": even["activations"][rank]}
    if run == "even_offload":
        section["gpu_fraction"] = "solve"
        if limits.host_bytes is not None:
            share = limits.host_bytes // len(even["batch_sizes"])
            reserve = max(0, host_available - share)
            section["solver"] = {"host_memory_reserve_bytes": reserve}
    return section


def work_of(run: str, plan: Json) -> Json:
    """The batches, micro-batches and shards of a run of all ranks."""
    return plan["even" if run.startswith("even") else "planned"]
