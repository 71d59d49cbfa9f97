"""A plan as a picture: each rank's step and memory, beside the even split's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hytrain.errors import PlanError
from hytrain.tools.planner.baselines import Baseline
from hytrain.tools.planner.plan_report import device_words
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Plan

_GIB = 1024**3
_MOST_RANKS = 16
_LONGEST_BAR = 2.5
"""Of the plan's step: longer bars are cut, and have their number at the end."""


def draw_plan(path: Path, problem: PlanProblem, plan: Plan, others: Sequence[Baseline]) -> None:
    """Writes bars of each rank's time and memory as a PNG, the plan's and the others'.

    Args:
        path: the file; replaced.
        problem: what was planned.
        plan: the plan.
        others: what it is compared with; those that do not fit are named.

    Raises:
        PlanError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        # Heavy, and not everywhere: here and not at the top of the module.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlanError(
            f"the picture needs matplotlib, which cannot be imported ({error}): "
            "pip install hytrain[train], or leave --chart out"
        ) from error
    shown = min(len(plan.ranks), _MOST_RANKS)
    height = 1.6 + 0.3 * shown * (1 + len(others))
    figure = Figure(figsize=(11, height), layout="constrained")
    axes: Any = figure.subplots(1, 2, sharey=True)
    fitting = [(one.name, one.result) for one in others if isinstance(one.result, Plan)]
    _draw(axes, problem, [("plan", plan), *fitting], shown)
    gone = [f"{one.name}: out of memory" for one in others if not isinstance(one.result, Plan)]
    left = [f"the first {shown} of {len(plan.ranks)} ranks"] if shown < len(plan.ranks) else []
    title = f"{problem.model.name}, {problem.batch} samples a step"
    figure.suptitle("; ".join([title, *gone, *left]), fontsize=10)
    try:
        figure.savefig(path, dpi=120, format="png")
    except OSError as error:
        raise PlanError(
            f"cannot write {path} ({error.strerror}): give another file with --chart"
        ) from error


def _draw(axes: Any, problem: PlanProblem, plans: Sequence[tuple[str, Plan]], shown: int) -> None:
    time, memory = axes
    thickness = 0.8 / len(plans)
    longest = _LONGEST_BAR * 1e3 * plans[0][1].predicted_seconds
    for number, (name, plan) in enumerate(plans):
        places = [rank + (number + 0.5) * thickness - 0.4 for rank in range(shown)]
        ranks = plan.ranks[:shown]
        milliseconds = [1e3 * rank.step_seconds for rank in ranks]
        color = f"C{number}"
        step = 1e3 * plan.predicted_seconds
        label = f"{name}: step of {step:.0f} ms"
        bars = [min(each, longest) for each in milliseconds]
        time.barh(places, bars, height=thickness * 0.9, color=color, label=label)
        for place, each in zip(places, milliseconds, strict=True):
            if each > longest:
                time.text(longest, place, f"{each:.0f} > ", ha="right", va="center", fontsize=7)
        if step <= longest:
            time.axvline(step, color=color, linestyle=":")
        for place, rank in zip(places, ranks, strict=True):
            words = f" {rank.batch_size} by {rank.microbatch_size}" if rank.batch_size else " none"
            time.text(0.0, place, words, va="center", fontsize=7, color="black")
        gigabytes = [rank.gpu_bytes / _GIB for rank in ranks]
        memory.barh(places, gigabytes, height=thickness * 0.9, color=color)
    for rank, (_, gpu) in enumerate(problem.cluster.ranks[:shown]):
        room = gpu.memory_bytes / _GIB
        label = "may be used" if rank == 0 else None
        memory.plot([room, room], [rank - 0.45, rank + 0.45], color="black", label=label)
    names = [
        f"{rank} {device_words(gpu)}\n{planned.shard_fraction:.0%} of the state"
        for rank, ((_, gpu), planned) in enumerate(
            zip(problem.cluster.ranks[:shown], plans[0][1].ranks[:shown], strict=True)
        )
    ]
    time.set_yticks(range(shown), names, fontsize=8)
    time.invert_yaxis()
    time.set_xlabel("ms of a rank's own step; dotted: of the job's")
    memory.set_xlabel("GiB of GPU memory")
    time.legend(fontsize=8)
    memory.legend(fontsize=8)
    for one in axes:
        one.grid(alpha=0.3, axis="x")
