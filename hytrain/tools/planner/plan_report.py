"""A plan as text and as JSON."""

from __future__ import annotations

from typing import Any

from hytrain.formats.plan_file import PlannedRank
from hytrain.formats.policies import Accumulation
from hytrain.formats.text_table import align
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.cost_model import Collectives, WorkloadMaker
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Plan, even_split, plan_file

_GIB = 1024**3
_LIMITS = {
    "gpu": "compute",
    "cpu": "CPU update",
    "copies": "copies to the host",
    "host": "host memory bandwidth",
    "weights": "weights from the host",
}
# Clipped steps whose time differs by more than this share are worth a line.
_DIFFERENT = 0.01
# Up to this share, a host's launching may vary over the seconds of a profile without a line.
_STEADY = 0.1
# Share of a GPU's memory: a plan that uses more is limited by memory, too.
_FULL = 0.95
# Shares of a step above which collectives limit it as well (_NOTABLE), or alone (_MOST).
_NOTABLE, _MOST = 0.05, 0.5
# A wider gap says more about the bound than about the plan.
_CLOSE = 0.1
# Time to launch a layer's forward and backward: 2.4 to 3.5 ms on hosts of an H100 and an H200
# (experiments/solve_k/planned_steps.json).
_LAUNCH_SECONDS = 3e-3
_LEGEND = (
    "samples (of a micro-batch); shard: part of the optimizer state; GPU layers: whose state is on "
    "the GPU; step: the least that this rank alone takes; limited by: what it waits for, "
    "and memory if it is full"
)
_ACTIVATIONS = {
    "store": "activations stored",
    "recompute": "activations recomputed",
    "keep": "layer by layer, inputs of layers kept on the GPU",
    "offload": "layer by layer, inputs of layers offloaded to the host",
}
_HEADING = (
    *("rank", "samples", "activations", "shard", "GPU layers", "step ms", "GPU GiB", "host GiB"),
    "limited by",
)


def plan_text(problem: PlanProblem, plan: Plan, without_offload: Plan | None = None) -> str:
    """Returns what each GPU does in the plan, and how good it is.

    ``without_offload``: if weights are planned to be in host memory, the plan that keeps them on
    the GPU, if that fits as well.
    """
    parts: list[str] = []
    if any(_is_cpu(gpu) for _, gpu in problem.cluster.ranks):
        parts.append('There was no GPU: what is called "GPU" below is the CPU itself.')
    if len(plan.ranks) == 1:
        parts.append(_one_gpu(problem, plan))
    else:
        used = dict.fromkeys(one.activations for one in plan.ranks if one.microbatch_size)
        legend = "; ".join([_LEGEND, *(f"{name}: {_ACTIVATIONS[name]}" for name in used)])
        parts += [_devices(problem), "", _ranks(problem, plan), legend]
    parts += _quality_words(problem, plan)
    parts += _collective_words(problem, plan) + _clipped_words(plan) + _mode_words(plan)
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
    """Returns the step, what an even split would reach, a warning of GPUs that compute nothing."""
    number, degree = len(plan.ranks), problem.sequence_ranks
    speed = problem.batch / degree / plan.predicted_seconds
    words = f"Step: {1e3 * plan.predicted_seconds:.1f} ms predicted{_mode_note(plan)}, "
    words += f"{speed:.3g} samples/s"
    if degree > 1:
        size = plan.ranks[0].microbatch_size
        return (
            f"{words}, {speed * (problem.model.seq_len or 1):,.0f} tokens/s; {number} ranks in "
            f"groups of {degree}, whose shares cannot be chosen. Train without a plan, with "
            f"train_micro_batch_size_per_gpu {size} and gradient_accumulation_steps "
            f"{plan.ranks[0].batch_size // size}."
        )
    differ = len({(one.batch_size, round(one.shard_fraction, 3)) for one in plan.ranks}) > 1
    if differ and problem.batch >= number:
        even = even_split(problem)
        samples = problem.batch // number * number
        own = 0.0 if even is None else samples / even.predicted_seconds
        name = "even split" + f" of {samples} samples" * (samples < problem.batch)
        words += "; an even split does not fit" if even is None else f"; {name}: {own:.3g}"
    words += "."
    idle = [str(rank) for rank, one in enumerate(plan.ranks) if not one.batch_size]
    if idle:
        why = "no plan found was faster"
        if problem.batch < number:
            why = f"--batch {problem.batch} is less than {number} GPUs"
        words += f"\nWarning: idle but for updates of their state: rank {', '.join(idle)} ({why})."
    return words


def trust_words(problem: PlanProblem, plan: Plan) -> str:
    """Returns how far off the step of a plan from data sheets may be."""
    most = max(-(-one.batch_size // max(1, one.microbatch_size)) for one in plan.ranks)
    launching = most * problem.model.num_layers * _LAUNCH_SECONDS
    if plan.predicted_seconds < launching:
        return (
            "Far too short: the host's launches set the pace of a model this small, and data "
            "sheets do not give them. Hosts of an H100 and an H200 took about 3 ms to launch a "
            f"layer's forward and backward, here {1e3 * launching:.0f} ms a step: measure with "
            "`hytrain profile`."
        )
    return (
        "Estimated from data sheets. Such steps were within 15 % of measured ones where the GPU "
        "set the pace, and up to 1.9 times too long where the CPU did, on hosts of more than 100 "
        "GB/s: measure with `hytrain profile` before training."
    )


def _devices(problem: PlanProblem) -> str:
    rows = [("rank", "host", "device", "GiB to use")]
    for number, (host, gpu) in enumerate(problem.cluster.ranks):
        rows.append((str(number), host.name, device_words(gpu), f"{gpu.memory_bytes / _GIB:.1f}"))
    return "\n".join(align(rows, left=(0, 1, 2)))


def _one_gpu(problem: PlanProblem, plan: Plan) -> str:
    """Returns the sentence that replaces the tables for a single GPU."""
    rank, (host, gpu), layers = plan.ranks[0], problem.cluster.ranks[0], problem.model.num_updates
    limit = limit_words(rank, gpu, passes(problem, plan)[0][1])
    return (
        f"{device_words(gpu)}, on {host.name}: {rank.batch_size} samples in micro-batches of "
        f"{rank.microbatch_size}, {_ACTIVATIONS[rank.activations]}; the state of {rank.gpu_layers} "
        f"of {layers} layers on the GPU (k = {rank.gpu_layers / layers:.2g}); "
        f"{rank.gpu_bytes / _GIB:.1f} of the GPU's {gpu.memory_bytes / _GIB:.1f} GiB, "
        f"{rank.host_bytes / _GIB:.1f} GiB of the host; limited by {limit}"
    )


def _ranks(problem: PlanProblem, plan: Plan) -> str:
    rows: list[tuple[str, ...]] = [_HEADING]
    waits = [waited for _, waited in passes(problem, plan)]
    own = zip(plan.ranks, problem.cluster.ranks, waits, strict=True)
    for number, (rank, (_, gpu), waited) in enumerate(own):
        size = rank.microbatch_size
        shown = (
            f"{rank.batch_size} ({size})" if size else "none",
            rank.activations if size else "-",
            f"{rank.shard_fraction:.1%}",
            f"{rank.gpu_layers} of {problem.model.num_updates}",
            f"{1e3 * rank.step_seconds:.1f}",
            f"{rank.gpu_bytes / _GIB:.1f}",
            f"{rank.host_bytes / _GIB:.1f}",
            limit_words(rank, gpu, waited),
        )
        rows.append((str(number), *shown))
    return "\n".join(align(rows, left=(0, len(_HEADING) - 1)))


def limit_words(rank: PlannedRank, gpu: GpuProfile, waited: float) -> str:
    """Returns what limits a rank's step, and whether its memory is full.

    ``waited``: seconds of the step that collectives take.
    """
    words = _LIMITS[rank.limit]
    if rank.limit == "gpu" and gpu.is_launch_bound(rank.microbatch_size):
        words = "launches by the host"
    elif rank.limit == "gpu" and waited > _NOTABLE * rank.step_seconds:
        words = "collectives" if waited > _MOST * rank.step_seconds else f"{words}, collectives"
    return f"{words}, memory" if rank.gpu_bytes > _FULL * gpu.memory_bytes else words


def device_words(gpu: GpuProfile) -> str:
    """Returns a device's name and multiprocessors, to tell it apart from others of that name."""
    units = "cores" if _is_cpu(gpu) else "SMs"
    return f"{gpu.name}, {gpu.multiprocessors} {units}" if gpu.multiprocessors else gpu.name


def _is_cpu(gpu: GpuProfile) -> bool:
    """Whether a profile was made without a GPU."""
    return gpu.name.startswith("CPU ")


def passes(problem: PlanProblem, plan: Plan) -> list[tuple[float, float]]:
    """Returns for each rank the seconds of its passes, and those of them that collectives add."""
    collectives = Collectives.of(problem, even=plan.even), Collectives(0.0, 0.0)
    makers = [WorkloadMaker(problem, one) for one in collectives]
    found: list[tuple[float, float]] = []
    for rank, (_, gpu) in zip(plan.ranks, problem.cluster.ranks, strict=True):
        size, shard = rank.microbatch_size, rank.shard_fraction * problem.model.parameters
        works = [maker.of(gpu, rank.batch_size, size, rank.activations) for maker in makers]
        whole, alone = (work.compute + work.fetching(shard) for work in works)
        exchanges = (2 + (rank.activations != "store")) * rank.batch_size // max(1, size)
        alone -= exchanges * problem.model.num_layers * problem.exchange_ms.at(size) / 1e3
        found.append((whole, whole - alone if size else 0.0))
    return found


def _quality_words(problem: PlanProblem, plan: Plan) -> list[str]:
    alone = max(seconds for seconds, _ in passes(problem, plan))
    words = [f"{alone / plan.predicted_seconds:.0%} of the speed of forward and backward alone"]
    if len(plan.ranks) > problem.sequence_ranks == 1 and 1e-3 < plan.gap <= _CLOSE:
        words.append(f"at most {plan.gap:.1%} longer than the shortest step that this can predict")
    return words


def _collective_words(problem: PlanProblem, plan: Plan) -> list[str]:
    """Returns a line about collectives if they take a notable part of the step."""
    waited = max(waited for _, waited in passes(problem, plan))
    if waited <= _NOTABLE * plan.predicted_seconds:
        return []
    return [
        f"of {plan.predicted_seconds:.3g} s, {waited:.3g} are collectives (all-gathers, "
        "reduce-scatters, attention's all-to-alls) that compute does not hide: a faster "
        "interconnect (--interconnect) shortens them"
    ]


def _clipped_words(plan: Plan) -> list[str]:
    """Returns a line about clipped steps if they take a different time."""
    clipped, unclipped = plan.clipped_seconds, plan.unclipped_seconds
    if abs(clipped - unclipped) <= _DIFFERENT * unclipped:
        return []
    return [
        f"in this plan a clipped step takes {1e3 * clipped:.1f} ms, an "
        f"unclipped one {1e3 * unclipped:.1f}; predicted for {plan.clipped_share:.0%} clipped"
    ]


def _unsteady_words(problem: PlanProblem, plan: Plan) -> list[str]:
    """Returns a line about hosts of launch-bound ranks whose speed varied during the profile."""
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


def _mode_words(plan: Plan) -> list[str]:
    """Returns a line about the accumulation mode that was not chosen, if there was a choice."""
    other = plan.other_mode
    if other is None:
        return []
    words = f"{_MODE_WORDS[other.accumulation]} (--accumulation {other.accumulation})"
    if isinstance(other.result, Infeasible):
        return [f"{words} nothing fits: {other.result.reason}"]
    return [f"{words} the step would take {1e3 * other.result:.1f} ms"]


def _mode_note(plan: Plan) -> str:
    """Returns a note for the first line if Trainer makes no such steps, and what its mode takes."""
    is_even = len({rank.batch_size for rank in plan.ranks}) == 1
    if plan.accumulation == "micro_batch_major":
        return "" if is_even else " (with engine.train_batch, not in Trainer)"
    some = "" if plan.accumulation else "on some ranks "
    note = f"{some}{_MODE_WORDS['layer_major']}, with engine.train_batch"
    if plan.other_mode is not None:
        result, as_there = plan.other_mode.result, ", as in Trainer" * is_even
        takes = "nothing fits" if isinstance(result, Infeasible) else f"{1e3 * result:.1f} ms"
        note += f"; {_MODE_WORDS['micro_batch_major']}{as_there}: {takes}"
    return f" ({note})"


def plan_json(
    problem: PlanProblem, plan: Plan, without_offload: Plan | None = None
) -> dict[str, Any]:
    """Returns the plan as in its file, and more; the arguments are those of :func:`plan_text`."""
    record = plan_file(problem, plan).model_dump(mode="json")
    record["global_batch"] //= problem.sequence_ranks
    record["samples_per_second"] = record["global_batch"] / plan.predicted_seconds
    seconds = passes(problem, plan)
    record["forward_backward_seconds"] = [whole for whole, _ in seconds]
    record["collective_seconds"] = [waited for _, waited in seconds]
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
