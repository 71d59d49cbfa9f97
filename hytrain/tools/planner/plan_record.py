"""A plan as plan.json has it."""

from __future__ import annotations

import math
from dataclasses import asdict

from hytrain.formats.plan_file import VERSION, PlanFile, PlannedModel, PlannedRank, Predicted
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.result import Plan


def plan_file(problem: PlanProblem, plan: Plan) -> PlanFile:
    """A plan as it is written."""
    ranks = [
        PlannedRank.model_validate(
            {
                **asdict(rank),
                "multiprocessors": gpu.multiprocessors,
                "memory_bytes": gpu.memory_bytes if gpu.limit_bytes is None else gpu.limit_bytes,
                "gpu_bytes": math.ceil(rank.gpu_bytes),
                "host_bytes": math.ceil(rank.host_bytes),
            }
        )
        for rank, (_, gpu) in zip(plan.ranks, problem.cluster.ranks, strict=True)
    ]
    model = {name: getattr(problem.model, name) for name in PlannedModel.model_fields}
    gap = plan.gap
    return PlanFile(
        version=VERSION,
        model=PlannedModel(**model),
        global_batch=problem.batch,
        stage=problem.stage,
        offload_param="cpu" if problem.offload_param else None,
        predicted=Predicted(
            step_seconds=plan.predicted_seconds,
            unclipped_seconds=plan.unclipped_seconds,
            clipped_seconds=plan.clipped_seconds,
            lower_bound=plan.lower_bound,
            gap=gap if math.isfinite(gap) else None,
        ),
        ranks=tuple(ranks),
    )
