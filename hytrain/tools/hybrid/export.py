"""What a launcher needs to run a hybrid plan: DeepSpeed's pipeline engine, or hytrain.

One stage without tensor parallelism is data parallel: hytrain trains it. Several equal stages are
what DeepSpeed's ``PipelineModule`` runs (see :mod:`hytrain.tools.pipeline_stages`). Nothing else is
executable by either, and is refused with the reasons.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hytrain.errors import PlanError
from hytrain.formats.record import write_record
from hytrain.tools.hybrid.plan_record import HybridPlanFile


def obstacles(record: HybridPlanFile) -> list[str]:
    """Why neither hytrain nor DeepSpeed's pipeline engine can run a plan; empty where one can."""
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
    """What a model must bring for the plan to run."""
    if any(stage.tp > 1 for stage in record.stages):
        return [
            "tensor parallelism must be in the model: give PipelineModule layers that are sharded "
            "over the ranks of its topology's axis 'model' (as in Megatron)"
        ]
    return []


def write_export(folder: Path, record: HybridPlanFile) -> list[str]:
    """Writes plan.json, hostfile, ds_config.json and, of a pipeline, pipeline.json.

    ``folder``: is made; must not be there.

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
    """Nodes in the order of ranks: the GPUs of the first stage first."""
    slots: dict[str, int] = {}
    for stage in record.stages:
        for node in stage.nodes:
            slots[node.name] = slots.get(node.name, 0) + node.gpus
    return "".join(f"{name} slots={count}\n" for name, count in slots.items())


def ds_config(record: HybridPlanFile) -> dict[str, Any]:
    """DeepSpeed's configuration: the batch as planned; learning rate and the like are examples."""
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
    """For ``PipelineModule``: see :func:`hytrain.tools.pipeline_stages.stage_layers`."""
    stage = record.stages[0]
    return {
        "boundaries": list(record.boundaries),
        "num_stages": len(record.stages),
        "data_parallel": stage.dp,
        "tensor_parallel": stage.tp,
        "micro_batches": record.micro_batches,
    }
