"""Predicted beside measured: what of a plan's prediction the measured steps are compared with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import make_model
from support.plans import a_plan

from hytrain.engine.plan_watch import PlanReport, PlanWatch, RankMeasured
from hytrain.errors import HyTrainError
from hytrain.formats.plan_file import Predicted

BOTH = Predicted(
    step_seconds=0.5, unclipped_seconds=0.25, clipped_seconds=0.5, lower_bound=0.25, gap=0.0
)
OLD = Predicted(step_seconds=0.5, lower_bound=0.25, gap=0.0)


def watch(predicted: Predicted) -> PlanWatch:
    plan = a_plan(make_model("mlp"), (4,), (2,), predicted=predicted)
    alone: Any = SimpleNamespace(rank=0, world_size=1, gather_objects=lambda own, _: [own])
    return PlanWatch(plan, alone, torch.device("cpu"))


def state(*, clipped: bool, seconds: float = 0.4) -> RankMeasured:
    return RankMeasured(
        step_seconds=seconds,
        clipped_share=float(clipped),
        gpu_bytes=None,
        host_bytes=1,
        gpu_layers=2,
        num_layers=4,
        is_settled=True,
    )


def report(predicted: Predicted, clipped: str) -> PlanReport:
    """After steps that were clipped ("c") or not ("-")."""
    made = watch(predicted)
    for letter in clipped:
        made.after_step(state(clipped=letter == "c"))
    return made.report()


@pytest.mark.parametrize(
    ("clipped", "share"),
    [
        ("----", 0.0),
        ("cccc", 1.0),
        # A step feels the decision before it: step 4 that of step 3, and step 4's nobody yet.
        ("--c-", 1.0),
        ("cc-c", 0.0),
        ("ccc-c-c", 0.5),
        # Of many steps the last ten count.
        ("ccccccc" + "-" * 10, 0.1),
        ("c" * 6 + "-" * 11, 0.0),
    ],
)
def test_the_prediction_is_that_of_as_many_clipped_steps(clipped: str, share: float) -> None:
    found = report(BOTH, clipped)
    assert found.last_step == len(clipped)
    assert found.first_step == max(4, len(clipped) - 9)
    assert found.clipped_share == pytest.approx(share)
    assert found.predicted_seconds == pytest.approx(0.25 + 0.25 * share)
    assert found.error == pytest.approx(0.4 / found.predicted_seconds - 1.0)
    record = found.to_json()
    assert record["clipped_share"] == found.clipped_share
    assert record["predicted_seconds"] == found.predicted_seconds
    assert record["error"] == found.error
    words = found.table().splitlines()[0]
    assert f"step {1e3 * found.predicted_seconds:.1f} -> 400.0 ms" in words
    assert f"{share:.0%} of the steps clipped" in words


@pytest.mark.parametrize("clipped", ["-----", "ccccc"])
def test_an_old_plan_has_one_prediction(clipped: str) -> None:
    found = report(OLD, clipped)
    assert found.predicted_seconds == 0.5
    assert found.error == pytest.approx(-0.2)


def test_the_steps_of_warming_up_are_not_measured() -> None:
    made = watch(BOTH)
    for seconds in (9.0, 9.0, 9.0):
        made.after_step(state(clipped=True, seconds=seconds))
    with pytest.raises(HyTrainError, match="make some more"):
        made.report()
    made.after_step(state(clipped=False))
    found = made.report()
    assert (found.first_step, found.last_step) == (4, 4)
    assert found.measured_seconds == 0.4
