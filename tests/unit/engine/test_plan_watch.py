"""Predicted beside measured: what of a plan's prediction the measured steps are compared with."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import make_model
from support.plans import a_plan

from hytrain.errors import HyTrainError
from hytrain.optim import plan_watch
from hytrain.optim.plan_watch import PlanReport, PlanWatch, RankState, advice
from hytrain.parallel.collectives import GATE_VARIABLE
from hytrain.planner.plan_file import Predicted

BOTH = Predicted(
    step_seconds=0.5, unclipped_seconds=0.25, clipped_seconds=0.5, lower_bound=0.25, gap=0.0
)
OLD = Predicted(step_seconds=0.5, lower_bound=0.25, gap=0.0)


def watch(predicted: Predicted) -> PlanWatch:
    plan = a_plan(make_model("mlp"), (4,), (2,), predicted=predicted)
    alone: Any = SimpleNamespace(rank=0, world_size=1, is_nccl=False)
    return PlanWatch(plan, alone, torch.device("cpu"))


def state(*, clipped: bool, seconds: float = 0.4) -> RankState:
    return RankState(
        step_seconds=seconds,
        is_clipped=clipped,
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


def of_two_ranks(seconds: float) -> PlanReport:
    found = report(BOTH, "-----")
    (rank,) = found.ranks
    plan = a_plan(make_model("mlp"), (4, 4), (2, 2), predicted=BOTH)
    slow = replace(rank, step_seconds=seconds)
    return PlanReport(found.first_step, found.last_step, plan, (rank, slow))


def test_advice_where_ranks_wait_for_each_other_on_their_gpus() -> None:
    late = of_two_ranks(0.44)
    late = replace(late, ranks=tuple(replace(r, clipped_share=0.75) for r in late.ranks))
    assert late.error == pytest.approx(0.44 / 0.4375 - 1.0)
    assert advice(late, is_nccl=True, environment={}) is None, "as planned"
    late = of_two_ranks(0.44)
    words = advice(late, is_nccl=True, environment={})
    assert words is not None
    assert "NCCL_MAX_CTAS=8" in words
    assert advice(late, is_nccl=False, environment={}) is None
    assert advice(late, is_nccl=True, environment={"NCCL_MAX_CTAS": "16"}) is None
    assert advice(late, is_nccl=True, environment={GATE_VARIABLE: "1"}) is None
    assert advice(report(BOTH, "-----"), is_nccl=True, environment={}) is None, "nobody waits"


def test_advice_is_printed_below_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_watch, "advice", lambda _report, **_named: "so much for advice")
    made = watch(BOTH)
    for _ in range(13):
        made.after_step(state(clipped=False))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("plan, predicted -> measured")
    assert lines[-1] == "so much for advice"
