"""A plan, for people and for machines."""

from __future__ import annotations

from typing import Any

from hytrain.formats.plan_file import PlannedRank
from hytrain.formats.policies import Accumulation
from hytrain.formats.text_table import align
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import Collectives, WorkloadMaker
from hytrain.tools.planner.even_split import even_split
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Plan, plan_file

_GIB = 1024**3
_LIMITS = {
    "gpu": "compute",
    "cpu": "CPU update",
    "copies": "copies to the host",
    "host": "host memory bandwidth",
    "weights": "weights from the host",
}
# By this share clipped steps take another time: worth a line.
_DIFFERENT = 0.01
# By this share a host that launches may be slower in some seconds than in others.
_STEADY = 0.1
# Of a GPU's memory: a plan that uses more is limited by it, too.
_FULL = 0.95
_LEGEND = (
    "samples (of a micro-batch); activations: stored, recomputed in backward, or offloaded to the "
    "host; shard: part of the optimizer state; GPU layers: whose state is on the GPU; step: of "
    "this rank alone; limited by: what it waits for, and memory if it is full"
)
_HEADING = (
    *("rank", "samples", "activations", "shard", "GPU layers", "step ms", "GPU GiB", "host GiB"),
    "limited by",
)


def plan_text(problem: PlanProblem, plan: Plan, without_offload: Plan | None = None) -> str:
    """What each GPU does in the plan, and how good it is.

    Args:
        problem: what was planned.
        plan: the plan.
        without_offload: the plan for weights that stay on the GPU, where they are planned to be in
            host memory and that fits all the same.
    """
    parts = [_devices(problem), "", _ranks(problem, plan), _LEGEND, *_quality_words(problem, plan)]
    parts += _clipped_words(plan) + _mode_words(plan)
    parts += _unsteady_words(problem, plan)
    if not problem.keeps_gradients:
        parts.append(
            "the GPUs have no room for the gradients of their shards besides: the first backward "
            "sends each layer's as later ones do, and waits for the CPU's updates"
        )
    if without_offload is not None:
        parts.append(
            "the model fits without --offload-param, too: a step would take "
            f"{1e3 * without_offload.predicted_seconds:.1f} ms"
        )
    return "\n".join(parts)


def headline(problem: PlanProblem, plan: Plan) -> str:
    """The step, what an even split would reach, and a warning of GPUs that compute nothing."""
    speed, number = problem.batch / plan.predicted_seconds, len(plan.ranks)
    words = f"Step: {1e3 * plan.predicted_seconds:.1f} ms predicted, {speed:.3g} samples/s"
    if number > 1 and problem.batch >= number:
        even = even_split(problem)
        own = 0.0 if even is None else problem.batch // number * number / even.predicted_seconds
        words += "; an even split does not fit" if even is None else f"; even split: {own:.3g}"
    words += "."
    idle = [str(rank) for rank, one in enumerate(plan.ranks) if not one.batch_size]
    if idle:
        why = "no plan found was faster"
        if problem.batch < number:
            why = f"--batch {problem.batch} is less than {number} GPUs"
        words += f"\nWarning: idle but for updates of their state: rank {', '.join(idle)} ({why})."
    return words


def _devices(problem: PlanProblem) -> str:
    rows = [("rank", "host", "device", "GiB to use")]
    for number, (host, gpu) in enumerate(problem.cluster.ranks):
        rows.append((str(number), host.name, device_words(gpu), f"{gpu.memory_bytes / _GIB:.1f}"))
    return "\n".join(align(rows, left=(0, 1, 2)))


def _ranks(problem: PlanProblem, plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [_HEADING]
    for number, (rank, (_, gpu)) in enumerate(zip(plan.ranks, problem.cluster.ranks, strict=True)):
        size = rank.microbatch_size
        shown = (
            f"{rank.batch_size} ({size})" if size else "none",
            rank.activations if size else "-",
            f"{rank.shard_fraction:.1%}",
            f"{rank.gpu_layers} of {problem.model.num_updates}",
            f"{1e3 * rank.step_seconds:.1f}",
            f"{rank.gpu_bytes / _GIB:.1f}",
            f"{rank.host_bytes / _GIB:.1f}",
            limit_words(rank, gpu),
        )
        rows.append((str(number), *shown))
    return "\n".join(align(rows, left=(0, len(_HEADING) - 1)))


def limit_words(rank: PlannedRank, gpu: GpuProfile) -> str:
    """What a rank's step is as long as, and whether its memory is full."""
    words = _LIMITS[rank.limit]
    if rank.limit == "gpu" and gpu.is_launch_bound(rank.microbatch_size):
        words = "launches by the host"
    return f"{words}, memory" if rank.gpu_bytes > _FULL * gpu.memory_bytes else words


def device_words(gpu: GpuProfile) -> str:
    """A device, told apart from others of its name."""
    units = "cores" if gpu.name.startswith("CPU ") else "SMs"
    return f"{gpu.name}, {gpu.multiprocessors} {units}" if gpu.multiprocessors else gpu.name


def own_speeds(problem: PlanProblem) -> list[float]:
    """Samples/s that each rank computes for itself at its best micro-batch, updates left out.

    0 where it has no room for a sample.
    """
    alone = WorkloadMaker(problem, Collectives(0.0, 0.0))

    def speed(gpu: GpuProfile) -> float:
        works = (
            alone.of(gpu, size, size, policy)
            for policy in problem.activations
            for size in gpu.micro_batches(problem.batch)
        )
        return max((one.batch / one.compute for one in works if one.room >= 0.0), default=0.0)

    return [speed(gpu) for _, gpu in problem.cluster.ranks]


def _quality_words(problem: PlanProblem, plan: Plan) -> list[str]:
    own, speed = sum(own_speeds(problem)), problem.batch / plan.predicted_seconds
    words: list[str] = []
    if own > 0.0:
        words.append(
            f"{speed / own:.0%} of the GPUs' own speeds added up: each by itself, without updates"
        )
    if plan.gap > 1e-3:
        words.append(f"at most {plan.gap:.1%} longer than the shortest step that this can predict")
    return words


def _clipped_words(plan: Plan) -> list[str]:
    """A line about clipped steps, where that makes a difference."""
    clipped, unclipped = plan.clipped_seconds, plan.unclipped_seconds
    if abs(clipped - unclipped) <= _DIFFERENT * unclipped:
        return []
    return [
        f"a step that is clipped takes {1e3 * clipped:.1f} ms, one that is not "
        f"{1e3 * unclipped:.1f}; predicted for {plan.clipped_share:.0%} clipped"
    ]


def _unsteady_words(problem: PlanProblem, plan: Plan) -> list[str]:
    """A line about hosts of launch-bound ranks that were not as fast in all of the profile."""
    spread = max(
        (
            gpu.launches.spread
            for rank, (_, gpu) in zip(plan.ranks, problem.cluster.ranks, strict=True)
            if gpu.launches is not None and gpu.is_launch_bound(rank.microbatch_size)
        ),
        default=0.0,
    )
    if spread <= _STEADY:
        return []
    return [
        f"in some seconds of the profile launching took {spread:.0%} longer than in others: steps "
        "may be as much off their prediction"
    ]


_MODE_WORDS: dict[Accumulation, str] = {
    "micro_batch_major": "one micro-batch after another",
    "layer_major": "layer by layer",
}
_WHY: dict[Accumulation, str] = {
    "micro_batch_major": "each micro-batch gathers all layers, which need not be computed again",
    "layer_major": "a layer is gathered once a pass for all micro-batches, and computed again",
}


def _mode_words(plan: Plan) -> list[str]:
    """A line about the accumulation mode, where all ranks had to be of one."""
    other, chosen = plan.other_mode, plan.accumulation
    if other is None or chosen is None:
        return []
    words = f"{_MODE_WORDS[chosen]} ({_WHY[chosen]}): {_MODE_WORDS[other.accumulation]}"
    if isinstance(other.result, Infeasible):
        return [f"{words} nothing fits: {other.result.reason}"]
    return [f"{words} the step would take {1e3 * other.result:.1f} ms"]


def plan_json(
    problem: PlanProblem, plan: Plan, without_offload: Plan | None = None
) -> dict[str, Any]:
    """The plan as its file has it; the arguments are those of :func:`plan_text`."""
    record = plan_file(problem, plan).model_dump(mode="json")
    record["samples_per_second"] = problem.batch / plan.predicted_seconds
    record["own_samples_per_second"] = own_speeds(problem)
    record["accumulation"] = plan.accumulation
    record["other_accumulation"] = _other_mode_json(plan)
    if problem.offload_param:
        seconds = None if without_offload is None else without_offload.predicted_seconds
        record["without_offload_param"] = {"step_seconds": seconds}
    record["keeps_gradients"] = problem.keeps_gradients
    return record


def _other_mode_json(plan: Plan) -> dict[str, Any] | None:
    other = plan.other_mode
    if other is None:
        return None
    if isinstance(other.result, Infeasible):
        why: dict[str, Any] = {"step_seconds": None, "reason": other.result.reason}
    else:
        why = {"step_seconds": other.result}
    return {"accumulation": other.accumulation, **why}
