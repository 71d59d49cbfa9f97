"""A hybrid plan as JSON (docs/hybrid_planning.md, "The plan file"), and what a launcher needs.

One stage without tensor parallelism is data parallel: hytrain trains it. Several equal stages are
what DeepSpeed's ``PipelineModule`` runs (see :mod:`hytrain.tools.pipeline_stages`). Neither can run
anything else, which is refused with the reasons.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

from hytrain.errors import PlanError
from hytrain.formats.record import Record, write_record
from hytrain.tools.hybrid.cost_model import plan_cost
from hytrain.tools.hybrid.problem import Plan, Problem


class PlannedNode(Record):
    """A machine, and how many of its GPUs are in a stage."""

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
    """Samples of a micro-batch, for each replica."""

    optimizer_on_host: bool
    time_ms: float
    update_ms: float
    gradients_ms: float
    send_ms: float
    memory_mb: float
    capacity_mb: float


class HybridPlanFile(Record):
    """The contents of a hybrid plan's file."""

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
    """Returns the record of a plan; no plan costs less than ``bound`` ms."""
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


def obstacles(record: HybridPlanFile) -> list[str]:
    """Returns why neither hytrain nor DeepSpeed's pipeline engine can run a plan; or nothing."""
    found: list[str] = []
    degrees = sorted({(stage.dp, stage.tp) for stage in record.stages})
    if len(degrees) > 1:
        words = ", ".join(f"{dp} x {tp}" for dp, tp in degrees)
        found.append(
            f"its stages differ in dp x tp ({words}); DeepSpeed's pipeline has one for all stages"
        )
    for number, stage in enumerate(record.stages):
        if len(set(stage.samples)) != 1:
            found.append(
                f"stage {number} has unequal samples ({', '.join(map(str, stage.samples))}); for "
                "that use `hytrain plan` with a profile of these GPUs"
            )
        if stage.optimizer_on_host and len(record.stages) > 1:
            found.append(
                f"stage {number} keeps optimizer state on its host: only a single stage can"
            )
    names = Counter(node.name for stage in record.stages for node in stage.nodes)
    split = {node.name for stage in record.stages for node in stage.nodes if names[node.name] > 1}
    per_stage = [Counter(node.name for node in stage.nodes) for stage in record.stages]
    twice = sorted(name for name in split if any(count[name] > 1 for count in per_stage))
    if twice:
        found.append(
            f"several nodes have the same name ({', '.join(twice)}); launchers need different ones"
        )
    return found


def notes(record: HybridPlanFile) -> list[str]:
    """Returns what a model must provide for the plan to run."""
    if any(stage.tp > 1 for stage in record.stages):
        return [
            "tensor parallelism must be in the model: give PipelineModule layers that are sharded "
            "over the ranks of its topology's axis 'model' (as in Megatron)"
        ]
    return []


def write_export(folder: Path, record: HybridPlanFile) -> list[str]:
    """Writes plan.json, hostfile, ds_config.json and, for a pipeline, pipeline.json.

    ``folder``: is created; must not exist.

    Returns:
        What else is needed: :func:`notes`, and how to launch.

    Raises:
        PlanError: the plan cannot be run (:func:`obstacles`), or the folder cannot be written.
    """
    found = obstacles(record)
    if found:
        raise PlanError(f"the plan cannot be exported: {'; '.join(found)}")
    first, *others = record.stages
    is_pipeline = bool(others) or first.tp > 1
    try:
        folder.mkdir(parents=True)
        (folder / "hostfile").write_text(_hostfile(record), encoding="utf-8")
        _write(folder / "ds_config.json", ds_config(record))
        if is_pipeline:
            _write(folder / "pipeline.json", pipeline_values(record))
    except OSError as error:
        raise PlanError(f"cannot write the export {folder} ({error.strerror})") from None
    write_record(folder / "plan.json", record, what="plan")
    command = f"deepspeed --hostfile {folder / 'hostfile'} train.py {folder}"
    return [*notes(record), f"launch with: {command}"]


def _write(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _hostfile(record: HybridPlanFile) -> str:
    """Returns the hostfile with nodes in rank order: the GPUs of the first stage first."""
    slots: dict[str, int] = {}
    for stage in record.stages:
        for node in stage.nodes:
            slots[node.name] = slots.get(node.name, 0) + node.gpus
    return "".join(f"{name} slots={count}\n" for name, count in slots.items())


def ds_config(record: HybridPlanFile) -> dict[str, Any]:
    """Returns DeepSpeed's configuration: the batch as planned, learning rate etc. as examples."""
    stage = record.stages[0]
    config: dict[str, Any] = {
        "train_batch_size": record.global_batch,
        "train_micro_batch_size_per_gpu": max(stage.samples),
        "gradient_accumulation_steps": record.micro_batches,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    if len(record.stages) > 1 or stage.tp > 1:
        return {**config, "zero_optimization": {"stage": 0}}
    zero: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    on_gpu = 0.0 if stage.optimizer_on_host else 1.0
    return {
        **config,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "hytrain": {"gpu_fraction": on_gpu},
    }


def pipeline_values(record: HybridPlanFile) -> dict[str, Any]:
    """Returns PipelineModule's values: see :func:`hytrain.tools.pipeline_stages.stage_layers`."""
    stage = record.stages[0]
    return {
        "boundaries": list(record.boundaries),
        "num_stages": len(record.stages),
        "data_parallel": stage.dp,
        "tensor_parallel": stage.tp,
        "micro_batches": record.micro_batches,
    }
