"""A hybrid plan as JSON (docs/hybrid_planning.md, "The plan file"), written and read."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from hytrain.formats.record import Record, parse_record, read_text, write_record
from hytrain.tools.hybrid.cost_model import plan_cost
from hytrain.tools.hybrid.problem import Plan, Problem

VERSION = 1


class PlannedNode(Record):
    """A machine, and its GPUs that are of a stage."""

    name: str
    gpus: int = Field(ge=1)


class PlannedStage(Record):
    """A pipeline stage; times in ms, memory in MB, as the cost model counts them."""

    devices: dict[str, int]
    """GPUs of each type."""

    nodes: tuple[PlannedNode, ...] = Field(min_length=1)
    first_layer: int = Field(ge=0)
    stop_layer: int = Field(ge=1)
    dp: int = Field(ge=1)
    tp: int = Field(ge=1)
    samples: tuple[int, ...] = Field(min_length=1)
    """Of a micro-batch, of each replica."""

    optimizer_on_host: bool
    time_ms: float = Field(ge=0.0)
    update_ms: float = Field(ge=0.0)
    gradients_ms: float = Field(ge=0.0)
    send_ms: float = Field(ge=0.0)
    memory_mb: float
    capacity_mb: float


class HybridPlanFile(Record):
    """All of a hybrid plan's file."""

    kind: Literal["hybrid"] = "hybrid"
    version: Literal[1] = VERSION
    cost_ms: float = Field(ge=0.0)
    bound_ms: float = Field(ge=0.0)
    simulated: Literal[True] = True
    """The cost is computed from profiles; nothing was trained."""

    tp_speed: Literal["first", "slowest"]
    order: tuple[str, ...]
    num_layers: int = Field(ge=1)
    global_batch: int = Field(ge=1)
    micro_batches: int = Field(ge=1)
    stages: tuple[PlannedStage, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> HybridPlanFile:
        ends = [0]
        for number, stage in enumerate(self.stages):
            if stage.first_layer != ends[-1] or stage.stop_layer <= stage.first_layer:
                raise ValueError(f"stages[{number}] does not follow the layers before it")
            if stage.dp * stage.tp != sum(node.gpus for node in stage.nodes):
                raise ValueError(f"stages[{number}]: dp * tp is not the number of its GPUs")
            if sum(stage.samples) * self.micro_batches != self.global_batch:
                raise ValueError(f"stages[{number}]: samples are not a micro-batch's")
            ends.append(stage.stop_layer)
        if ends[-1] != self.num_layers:
            raise ValueError(f"the stages have {ends[-1]} of {self.num_layers} layers")
        return self

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


def write_hybrid_plan(path: Path, record: HybridPlanFile) -> None:
    """Writes the file: all of it or nothing.

    Raises:
        PlanError: it cannot be written.
    """
    write_record(path, record, what="plan")


def read_hybrid_plan(path: Path) -> HybridPlanFile:
    """Reads the file.

    Raises:
        PlanError: no such file, no JSON, or values that make no hybrid plan.
    """
    text = read_text(path, "hybrid plan")
    remedy = "plan again with `hytrain plan hybrid`"
    return parse_record(HybridPlanFile, VERSION, text, path, what="hybrid plan", remedy=remedy)
