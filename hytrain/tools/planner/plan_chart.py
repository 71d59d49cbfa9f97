"""A plan as a picture: each rank's step and memory, beside the even split's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hytrain.tools.pictures import picture
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
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    shown = min(len(plan.ranks), _MOST_RANKS)
    height = 1.6 + 0.3 * shown * (1 + len(others))
    fitting = [(one.name, one.result) for one in others if isinstance(one.result, Plan)]
    gone = [f"{one.name}: out of memory" for one in others if not isinstance(one.result, Plan)]
    left = [f"the first {shown} of {len(plan.ranks)} ranks"] if shown < len(plan.ranks) else []
    title = f"{problem.model.name}, {problem.batch} samples a step"
    with picture(path, (11, height), flag="--chart", without="leave --chart out") as figure:
        axes: Any = figure.subplots(1, 2, sharey=True)
        _draw(axes, problem, [("plan", plan), *fitting], shown)
        figure.suptitle("; ".join([title, *gone, *left]), fontsize=10)


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
