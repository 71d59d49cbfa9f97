"""A hybrid plan as JSON (docs/hybrid_planning.md, "The plan file")."""

from __future__ import annotations

from typing import Literal

from hytrain.formats.record import Record
from hytrain.tools.hybrid.cost_model import plan_cost
from hytrain.tools.hybrid.problem import Plan, Problem


class PlannedNode(Record):
    """A machine, and its GPUs that are of a stage."""

    name: str
    gpus: int


class PlannedStage(Record):
    """A pipeline stage; times in ms, memory in MB, as the cost model counts them."""

    devices: dict[str, int]
    """GPUs of each type."""

    nodes: tuple[PlannedNode, ...]
    first_layer: int
    stop_layer: int
    dp: int
    tp: int
    samples: tuple[int, ...]
    """Of a micro-batch, of each replica."""

    optimizer_on_host: bool
    time_ms: float
    update_ms: float
    gradients_ms: float
    send_ms: float
    memory_mb: float
    capacity_mb: float


class HybridPlanFile(Record):
    """All of a hybrid plan's file."""

    kind: Literal["hybrid"] = "hybrid"
    version: Literal[1] = 1
    cost_ms: float
    bound_ms: float
    simulated: Literal[True] = True
    """The cost is computed from profiles; nothing was trained."""

    tp_speed: Literal["first", "slowest"]
    order: tuple[str, ...]
    num_layers: int
    global_batch: int
    micro_batches: int
    stages: tuple[PlannedStage, ...]

    @property
    def boundaries(self) -> tuple[int, ...]:
        """First layer of each stage, then the number of layers."""
        return (*(stage.first_layer for stage in self.stages), self.num_layers)


def plan_record(problem: Problem, plan: Plan, bound: float) -> HybridPlanFile:
    """The record of a plan that is known to cost no less than ``bound`` ms at best."""
    cost = plan_cost(problem, plan)
    ranks = problem.ranks(plan.order)
    stages: list[PlannedStage] = []
    first = 0
    for number, (one, gpus) in enumerate(zip(cost.stages, plan.groups, strict=True)):
        mine = ranks[first : first + gpus]
        first += gpus
        nodes = list(dict.fromkeys(node for _, node in mine))
        choice = one.choice
        even = (problem.gbs // plan.micro_batches // choice.dp,) * choice.dp
        stages.append(
            PlannedStage(
                devices={
                    name: sum(device == name for device, _ in mine)
                    for name in dict.fromkeys(device for device, _ in mine)
                },
                nodes=tuple(
                    PlannedNode(
                        name=problem.nodes[node].name, gpus=sum(at == node for _, at in mine)
                    )
                    for node in nodes
                ),
                first_layer=plan.partition[number],
                stop_layer=plan.partition[number + 1],
                dp=choice.dp,
                tp=choice.tp,
                samples=choice.split or even,
                optimizer_on_host=choice.on_host,
                time_ms=one.time,
                update_ms=one.update,
                gradients_ms=one.gradients,
                send_ms=cost.sends[number] if number < len(cost.sends) else 0.0,
                memory_mb=max(0.0, one.demand),
                capacity_mb=choice.capacity,
            )
        )
    return HybridPlanFile(
        cost_ms=cost.total,
        bound_ms=bound,
        tp_speed=problem.options.tp_speed,
        order=plan.order,
        num_layers=problem.num_layers,
        global_batch=problem.gbs,
        micro_batches=plan.micro_batches,
        stages=tuple(stages),
    )
