"""Why no plan fits, in words: what is short of memory, what it has and what is needed at least."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import Collectives, sizes_to_choose, workload
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.step_program import StepProgram

_GIB = 1024**3


def missing(problem: PlanProblem, *, is_bounded: bool) -> Infeasible:
    """Returns why no plan fits, however long its step.

    Args:
        problem: the problem for which no plan was found.
        is_bounded: whether the bound is finite: by it, some step may be possible.
    """
    ranks = problem.cluster.ranks
    program = StepProgram(problem, even=False)
    extremes = [rank.extremes for rank in program.ranks]
    least = 0 if problem.allow_idle else 1
    room = sum(max((work.room for work in works), default=0.0) for works in extremes)
    for rank, ((_, gpu), works) in enumerate(zip(ranks, extremes, strict=True)):
        if not works:
            return _and_host(problem, _rank_is_missing(problem, rank, gpu, least), room)
    if not any(work.batch for works in extremes for work in works):
        alone = [_rank_is_missing(problem, rank, gpu, 1) for rank, (_, gpu) in enumerate(ranks)]
        return _and_host(problem, min(alone, key=lambda one: one.missing), room)
    if is_bounded:
        return Infeasible(
            "the state fits only if layers are split between GPU and host, or by less than a "
            "thousandth of it: no plan was found; a little more memory would help",
            is_close=True,
        )
    if (spare := program.spare_samples(program.longest)) < 0:
        return _samples_are_missing(problem, problem.batch + spare)
    # GPUs that are too small even with all state on hosts of any size: in stage 3 they have their
    # part of the weights and gradients.
    on_gpus = float(problem.sharded_bytes * problem.model.parameters)
    for (_, gpu), works in zip(ranks, extremes, strict=True):
        if len(ranks) == 1:  # which has to compute the whole batch
            works = [work for work in works if work.batch == problem.batch] or works
        on_gpus += gpu.memory_bytes - max(work.room for work in works)
    gpus = sum(gpu.memory_bytes for _, gpu in ranks)
    if problem.sharded_bytes and on_gpus > gpus:
        text = _too_little([gpu.name for _, gpu in ranks], "GPU", gpus, on_gpus)
        words = f"{text}, with all optimizer state in host memory"
        return _and_host(problem, Infeasible(words, (on_gpus - gpus) / _GIB), 0.0)
    # Hosts that are too small even with all state on GPUs of any size: offload_param's weights.
    if short := _host_is_short(problem, math.inf):
        return Infeasible(*short)
    held = min(1.0, program.held(program.longest))
    total = problem.model.parameters * (problem.host_state_bytes + problem.host_weight_bytes)
    what = "weights and optimizer state" if problem.offload_param else "optimizer state"
    lacking = (1.0 - held) * total / _GIB
    usable = sum(host.memory_bytes for host in problem.cluster.hosts)
    return Infeasible(
        f"the GPUs and hosts can hold {held:.1%} of the model's {what} together, with "
        f"{gpus / _GIB:.2f} GiB of GPU memory and {usable / _GIB:.2f} of host memory: memory for "
        f"{lacking:.2f} GiB is missing, on any host or GPU",
        lacking,
    )


def lacks_memory(problem: PlanProblem) -> bool:
    """Whether it is certain without a search that no plan fits, as hosts cannot hold what GPUs have
    no room for."""
    # Without the gradients that a first backward keeps: this needs the least memory.
    least = replace(problem, keeps_gradients=False)
    ranks = StepProgram(least, even=False).ranks
    room = sum(max((work.room for work in rank.extremes), default=0.0) for rank in ranks)
    room -= least.sharded_bytes * least.model.parameters
    return room < 0.0 or _host_is_short(least, room) is not None


def _and_host(problem: PlanProblem, found: Infeasible, room: float) -> Infeasible:
    """Adds what hosts lack to what GPUs lack; ``room``: bytes that GPUs have for state."""
    short = _host_is_short(problem, room)
    if short is None:
        return found
    return replace(found, reason=f"{found.reason}; {short[0]}", missing=found.missing + short[1])


def _host_is_short(problem: PlanProblem, room: float) -> tuple[str, float] | None:
    """Returns in words and in GiB what the hosts lack for what GPUs with so many bytes for state do
    not hold; None if they hold it."""
    parameters = problem.model.parameters
    state = max(0.0, parameters - room / problem.gpu_state_bytes) * problem.host_state_bytes
    needed = state + problem.host_weight_bytes * parameters
    hosts = problem.cluster.hosts
    usable = sum(host.memory_bytes for host in hosts)
    if needed <= usable:
        return None
    what = "weights and optimizer state" if problem.offload_param else "optimizer state"
    what = what if state else "weights alone"
    text = _too_little([host.name for host in hosts], "host", usable, needed)
    return f"{text}, for {what}", (needed - usable) / _GIB


def _too_little(names: Sequence[str], kind: str, usable: float, least: float) -> str:
    who = f"the {kind} ({names[0]})" if len(names) == 1 else f"the {len(names)} {kind}s together"
    # Rounded apart, so that the larger number is larger in print, too.
    has, needs = math.floor(usable / _GIB * 100) / 100, math.ceil(least / _GIB * 100) / 100
    return f"{kind} memory is short: {who} can use {has:.2f} GiB and must hold {needs:.2f} at least"


def _lacking(problem: PlanProblem, gpu: GpuProfile, batch: int) -> float:
    """Returns the GiB a rank's GPU lacks for so many samples and all else that must be there."""
    collectives = Collectives.of(problem, even=True)
    roomy = replace(gpu, memory_bytes=2**62)
    works = [
        workload(problem, roomy, collectives, batch, size, policy)
        for policy in problem.activations
        for size in (sizes_to_choose(problem, gpu, batch) if batch else (0,))
    ]
    return (2**62 - max(work.room for work in works) - gpu.memory_bytes) / _GIB


def _rank_is_missing(problem: PlanProblem, rank: int, gpu: GpuProfile, batch: int) -> Infeasible:
    """Describes a rank whose GPU cannot hold 0 samples, or 1, beside what else must be there."""
    lacking = _lacking(problem, gpu, batch)
    what = "the weights alone" if batch == 0 else "a single sample beside the weights"
    return Infeasible(
        f"rank {rank} ({gpu.name}) can use {gpu.memory_bytes / _GIB:.2f} GiB, {lacking:.2f} GiB "
        f"too little for {what}",
        lacking,
    )


def _samples_are_missing(problem: PlanProblem, most: int) -> Infeasible:
    """Describes GPUs that can compute ``most`` samples of the batch at most."""
    ranks = problem.cluster.ranks
    each = -(-problem.batch // len(ranks))
    lacking = min(_lacking(problem, gpu, each) for _, gpu in ranks)
    words = (
        f"GPU memory is short: it is enough for {most} of the batch's {problem.batch} samples, "
        "with all optimizer state in host memory"
    )
    gradients = problem.gradient_bytes * problem.model.parameters / _GIB
    if problem.stage != 3 and gradients:
        words += f" ({gradients:.2f} GiB of gradients stay on each GPU between micro-batches)"
    return Infeasible(words, max(0.0, lacking), samples=most)
