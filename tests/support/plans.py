"""Plans for the machine that tests run on, as `hytrain plan` would write them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hytrain.formats.plan_file import PlanFile, PlannedModel, PlannedRank, Predicted, write_plan
from hytrain.hardware.device_facts import device_facts
from hytrain.hardware.host_share import machine_identity


def a_plan(
    model: nn.Module,
    batches: Sequence[int],
    micro: Sequence[int],
    *,
    fractions: Sequence[float] | None = None,
    gpu_layers: Sequence[int] | None = None,
    num_layers: int = 4,
    **changes: Any,
) -> PlanFile:
    """A plan with a rank per batch, all on this machine; ``changes`` replace fields of the file."""
    number = len(batches)
    facts = device_facts(torch.device("cpu"), ranks_on_host=number)
    ranks = [
        PlannedRank(
            host=machine_identity(),
            device=facts.name,
            multiprocessors=facts.multiprocessors,
            memory_bytes=facts.limit_bytes,
            batch_size=batch,
            microbatch_size=size if batch else 0,
            activations="store",
            shard_fraction=fractions[rank] if fractions else 1.0 / number,
            gpu_layers=gpu_layers[rank] if gpu_layers else 0,
            step_seconds=0.25,
            gpu_bytes=1 << 30,
            host_bytes=1 << 20,
            limit="gpu",
        )
        for rank, (batch, size) in enumerate(zip(batches, micro, strict=True))
    ]
    plan = PlanFile(
        version=1,
        model=PlannedModel(
            name="toy",
            num_layers=num_layers,
            parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            frozen=sum(p.numel() for p in model.parameters() if not p.requires_grad),
            dtype="fp32",
        ),
        global_batch=sum(batches),
        stage=2,
        predicted=Predicted(
            step_seconds=0.25,
            unclipped_seconds=0.25,
            clipped_seconds=0.25,
            lower_bound=0.25,
            gap=0.0,
        ),
        ranks=tuple(ranks),
    )
    return plan.model_copy(update=changes)


def write_a_plan(folder: Path, plan: PlanFile, name: str = "plan.json") -> str:
    """Writes a plan; returns its path."""
    path = folder / name
    write_plan(path, plan)
    return str(path)
