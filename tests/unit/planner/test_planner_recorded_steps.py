"""Steps that were trained on two H200s are as long as predicted from what was profiled there."""

from __future__ import annotations

import pytest
from recorded_h200 import RECORDED, Recorded, profile_of

from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cost_model import Collectives, workload
from hytrain.tools.planner.planned_step import PlannedStep
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from


def predicted(recorded: Recorded) -> float:
    options = PlanOptions(
        batch=sum(recorded.batches),
        gpu_reserve=lambda total: 0,
        host_reserve=lambda total: 0,
        activations=("store",),
        # Nobody recorded then how many were clipped: the model was judged as one without clipping.
        clipped_share=0.0,
    )
    problem = problem_from(profile_of(recorded.multiprocessors), options)
    even = recorded.fractions is None
    collectives = Collectives.of(problem, even=even)
    workloads = [
        workload(problem, gpu, collectives, batch, microbatch, "store")
        for (_, gpu), batch, microbatch in zip(
            problem.cluster.ranks, recorded.batches, recorded.microbatches, strict=True
        )
    ]
    fractions = recorded.fractions or (0.5, 0.5)
    shares = [
        Share(fraction, _updates(problem, number))
        for fraction, number in zip(fractions, recorded.gpu_layers, strict=True)
    ]
    return PlannedStep(problem, workloads, shares, even=even).seconds()


def _updates(problem: PlanProblem, blocks: int) -> int:
    """Those plans counted blocks, and training placed the same share of its own layers."""
    model = problem.model
    return round(blocks / model.num_layers * model.num_updates)


@pytest.mark.parametrize("case", RECORDED)
def test_a_recorded_step_is_predicted(case: str) -> None:
    recorded = RECORDED[case]
    assert recorded.seconds / predicted(recorded) - 1.0 == pytest.approx(0.0, abs=0.07)


@pytest.mark.parametrize("case", [case for case in RECORDED if case.endswith("even")])
def test_steps_of_measured_sizes_are_predicted_within_1_2_percent(case: str) -> None:
    recorded = RECORDED[case]
    assert recorded.seconds / predicted(recorded) - 1.0 == pytest.approx(0.0, abs=0.012)
