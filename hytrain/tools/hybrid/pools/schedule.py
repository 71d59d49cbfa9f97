"""A plan's step played through: every forward, backward and transfer, in the order of 1F1B.

:func:`.cost.step_seconds` is a formula, which the search bounds. This is what comes of the same
profiles where nothing is taken together: each pipeline of replicas goes at its own speed
(Narayanan et al., PipeDream, SOSP 2019: forwards of as many micro-batches as stages follow, then
one forward, one backward), transfers go on beside computing, one after another on each link, and a
stage reduces its gradients when its own last backward is done, while earlier stages compute still.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from hytrain.tools.hybrid.pools.cost import (
    check,
    curve_between,
    micro_batches,
    seconds_of_bytes,
    stage_reduce_seconds,
    times_of,
    update_seconds,
)
from hytrain.tools.hybrid.pools.problem import Plan, Problem, Replicas, Stage


def schedule_seconds(problem: Problem, plan: Plan) -> float:
    """Seconds of a step.

    Raises:
        PlanError: as :func:`.cost.step_seconds`.
    """
    check(problem, plan)
    ends = [_last_backwards(problem, plan, members) for members in dict.fromkeys(_pipelines(plan))]
    return max(
        max(end[index] for end in ends)
        + stage_reduce_seconds(problem, stage)
        + update_seconds(problem, stage, plan.micro_batch)
        for index, stage in enumerate(plan.stages)
    )


def _pipelines(plan: Plan) -> list[tuple[Replicas, ...]]:
    """Who makes each pipeline: replica j of every stage, once for all j that are alike."""
    edges = [list(accumulate(one.count for one in stage.replicas)) for stage in plan.stages]
    begins = sorted({0, *(edge for some in edges for edge in some)} - {plan.dp})

    def member(stage: Stage, some: Sequence[int], replica: int) -> Replicas:
        return next(one for one, end in zip(stage.replicas, some, strict=True) if replica < end)

    return [
        tuple(member(stage, some, begin) for stage, some in zip(plan.stages, edges, strict=True))
        for begin in begins
    ]


def _last_backwards(problem: Problem, plan: Plan, members: tuple[Replicas, ...]) -> list[float]:
    """When each stage of a pipeline has done its last backward."""
    number, count = len(plan.stages), micro_batches(problem, plan)
    forward, backward = _durations(problem, plan, members)
    sends = [_send(problem, plan, members, i, i + 1) for i in range(number - 1)]
    returns = [_send(problem, plan, members, i + 1, i) for i in range(number - 1)]
    orders = [_order(number - 1 - index, count) for index in range(number)]
    # What each stage may begin with: micro-batches come one after another.
    arrived: list[list[float]] = [[0.0] * count, *([] for _ in range(number - 1))]
    returned: list[list[float]] = [[] for _ in range(number)]
    now, done = [0.0] * number, [0] * number
    passed, is_stuck = [[0, 0] for _ in range(number)], False
    while not is_stuck:
        is_stuck = True
        for index, order in enumerate(orders):
            while done[index] < len(order):
                is_backward = order[done[index]]
                inputs = (returned if is_backward else arrived)[index]
                one = passed[index][is_backward]
                if one == len(inputs):
                    break
                time = (backward if is_backward else forward)[index]
                now[index] = max(now[index], inputs[one]) + time
                passed[index][is_backward] += 1
                done[index] += 1
                is_stuck = False
                if is_backward and index:
                    _arrive(returned[index - 1], now[index], returns[index - 1])
                elif not is_backward and index < number - 1:
                    _arrive(arrived[index + 1], now[index], sends[index])
                elif not is_backward:
                    returned[index].append(now[index])
    return now


def _order(behind: int, count: int) -> list[bool]:
    """Of a stage with so many behind it: False is a forward, True a backward."""
    ahead = min(behind, count)
    return [False] * ahead + [False, True] * (count - ahead) + [True] * ahead


def _arrive(times: list[float], ready: float, seconds: float) -> None:
    """One transfer more on a link, after those before it."""
    times.append(max(ready, times[-1] if times else 0.0) + seconds)


def _durations(
    problem: Problem, plan: Plan, members: tuple[Replicas, ...]
) -> tuple[list[float], list[float]]:
    forward: list[float] = []
    backward: list[float] = []
    for stage, one in zip(plan.stages, members, strict=True):
        times = times_of(problem, one, plan.micro_batch)
        layers = slice(stage.start, stage.stop)
        forward.append(sum(times.forward[layers]))
        backward.append(sum(times.compute[layers]) - forward[-1])
    return forward, backward


def _send(
    problem: Problem, plan: Plan, members: tuple[Replicas, ...], sender: int, receiver: int
) -> float:
    # Both directions carry what lies between the stages.
    layer = plan.stages[min(sender, receiver)].stop - 1
    ends = [(members[i].pool, members[i].tp) for i in (sender, receiver)]
    size = problem.activation_bytes[layer] * plan.micro_batch
    return float(seconds_of_bytes(size, curve_between(problem, ends[0], ends[1])))
