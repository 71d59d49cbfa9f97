"""Claims decided from results, and the table."""

from __future__ import annotations

import pytest
from unequal_cases import case, device, profile_stage, record, stage, trained

from experiments.common import records
from experiments.common.group import REFUSED, Work
from experiments.common.records import Json
from experiments.unequal_gpus import checks, report
from experiments.unequal_gpus.cases import cases_of, comparing_waits

PLAN: Json = {
    "planned": {
        "batch_sizes": [77, 19],
        "micro_batch_sizes": [8, 8],
        "shard_fractions": [0.5, 0.5],
        "gpu_fractions": [1.0, 1.0],
        "predicted_seconds": 1.0,
        "gpu_gib": [30.0, 31.0],
        "host_gib": [0.0, 2.5],
    },
    "even": {},
    "without_host": None,
}


def speed_case(planned: float, even: float, speeds: tuple[float, float] = (1.0, 0.25)) -> Json:
    return record(
        case(speeds),
        {
            "profile": profile_stage(device(1.0, 139.0), device(speeds[1], 139.0)),
            "plan": stage(PLAN, PLAN),
            "alone": stage(trained(1.0, 80.0), trained(1.0, 20.0)),
            "planned": stage(trained(1.05, planned), trained(1.04, planned + 1)),
            "even": stage(trained(2.0, even), trained(2.0, even)),
        },
    )


def verdicts_of(made: Json) -> dict[str, str]:
    return {check.claim: check.verdict for check in checks.check_case(made)}


def test_a_good_case_reaches_everything() -> None:
    found = verdicts_of(speed_case(95.0, 40.0))
    assert found.pop("planned over the sum of forward and backward alone") == "reported"
    assert set(found.values()) == {"reached"}
    assert len(found) == 4


def test_the_table_has_memory_beside_what_was_planned() -> None:
    made = speed_case(95.0, 40.0)
    text = report.text_of([made])
    assert "predicted 1.0000 s, GPU 30.0 31.0 GiB, host 0.0 2.5 GiB" in text
    assert "host" not in text.split("planned       ")[1].splitlines()[0]
    made["results"]["planned"]["ranks"][1]["host_grown_bytes"] = 3 * 2**30
    assert "GPU 10.0 10.0 GiB, host 0.0 3.0 GiB" in report.text_of([made])


def test_each_claim_can_be_missed() -> None:
    assert verdicts_of(speed_case(92.0, 40.0))["planned over the sum of the GPUs alone"] == "missed"
    assert verdicts_of(speed_case(95.0, 45.0))["planned over the even split"] == "missed"
    # Two speeds of which nothing is claimed beside the even split.
    other = verdicts_of(speed_case(95.0, 90.0, (1.0, 0.5)))
    assert other["planned over the even split"] == "reported"
    late = speed_case(95.0, 40.0)
    late["results"]["planned"]["ranks"][0]["step_seconds"] = 1.08
    assert verdicts_of(late)["step predicted, error"] == "missed"
    fast = speed_case(95.0, 40.0)
    fast["results"]["profile"] = profile_stage(device(1.0, 139.0), device(0.3, 139.0))
    assert verdicts_of(fast)["forward and backward from the stated speed, most"] == "missed"


@pytest.mark.parametrize(("share", "predicted"), [(0.0, 0.9), (0.5, 1.0), (1.0, 1.1)])
def test_the_prediction_is_judged_at_the_share_of_clipped_steps(
    share: float, predicted: float
) -> None:
    made = speed_case(95.0, 40.0)
    both = {"predicted_seconds": 1.1, "unclipped_seconds": 0.9, "clipped_seconds": 1.1}
    plan = {**PLAN, "planned": {**PLAN["planned"], **both}}
    made["results"]["plan"] = stage(plan, plan)
    # Results that have no share are judged as they were.
    assert checks.prediction_error(made) == pytest.approx(1.05 / 1.1 - 1.0)
    assert "clipped" not in report.text_of([made])
    for rank in made["results"]["planned"]["ranks"]:
        rank |= {"clipped_share": share, "allocator": {"num_alloc_retries": 2, "num_ooms": 0}}
    assert checks.judged_prediction(made) == pytest.approx(predicted)
    assert checks.prediction_error(made) == pytest.approx(1.05 / predicted - 1.0)
    (line,) = [line for line in report.text_of([made]).splitlines() if "clipped" in line]
    assert line.startswith("  planned ")
    assert line.endswith(f", {share:.0%} clipped (predicted {predicted:.4f} s), retries [2, 2]")


def test_the_engines_own_report_stands_beside_the_judged_mean() -> None:
    made = speed_case(95.0, 40.0)
    engine_report = {"measured_seconds": 0.97, "predicted_seconds": 1.0, "error": -0.03}
    for rank in made["results"]["planned"]["ranks"]:
        rank |= {"plan_report": engine_report, "clipped_share": 1.0, "allocator": {}}
    assert checks.prediction_error(made) == pytest.approx(0.05)
    claim = "step predicted, error by the engine's report (median)"
    (found,) = [each for each in checks.check_case(made) if each.claim == claim]
    assert (found.value, found.limit) == (0.03, None)
    assert "by the engine's report median 0.9700 s, predicted 1.0000 s" in report.text_of([made])
    # A good median does not make up for a bad mean.
    made["results"]["planned"]["ranks"][0]["step_seconds"] = 1.08
    assert verdicts_of(made)["step predicted, error"] == "missed"


def test_a_host_that_became_slower_shows_beside_the_profile() -> None:
    made = speed_case(95.0, 40.0)
    assert checks.bare_over_profile(made) is None
    first, second = made["results"]["planned"]["ranks"]
    # Of 8 samples: 6 and 12 ms a sample and 0.2 and 0.3 outside, at speed 1.
    first["bare"] = {"samples": 8, "forward": 0.0964, "backward": 0.1926}
    second["bare"] = None  # computes nothing
    assert checks.bare_over_profile(made) == [pytest.approx(2.0, rel=1e-3), 0.0]
    assert "bare passes 2.00 0.00 of the profile's" in report.text_of([made])


def test_an_old_plan_has_one_prediction_whatever_was_clipped() -> None:
    made = speed_case(95.0, 40.0)
    for rank in made["results"]["planned"]["ranks"]:
        rank |= {"clipped_share": 0.5, "allocator": {}}
    assert checks.prediction_error(made) == pytest.approx(0.05)
    assert "50% clipped (predicted 1.0000 s)" in report.text_of([made])
    assert "retries" not in report.text_of([made])


def test_backward_alone_may_be_off() -> None:
    made = speed_case(95.0, 40.0)
    slow = device(0.25, 139.0)
    for row in slow["layer"]:
        row["backward_ms"] *= 0.8
    made["results"]["profile"] = profile_stage(device(1.0, 139.0), slow)
    assert checks.slowdown_error(made) == pytest.approx(0.25, rel=0.01)


def test_nothing_is_claimed_of_what_was_not_measured() -> None:
    made = record(case(), {})
    assert {check.verdict for check in checks.check_case(made)} <= {"not measured", "reported"}
    assert "not measured" in report.text_of([made])


@pytest.mark.parametrize(
    ("status", "verdict"),
    [(records.OUT_OF_MEMORY, "reached"), (REFUSED, "reached"), (records.FAILED, "not measured")],
)
def test_only_what_was_out_of_memory_did_not_fit(status: str, verdict: str) -> None:
    memory = cases_of("memory")[0]
    results = {"even": stage({"status": status, "error": "no memory left"}, None, status=status)}
    claim = "the even split does not fit"
    assert verdicts_of(record(memory, results))[claim] == verdict
    ran = record(memory, {"even": stage(trained(1.0, 1.0), trained(1.0, 1.0))})
    assert verdicts_of(ran)[claim] == "missed"
    assert f"{status}: no memory left" in report.text_of([record(memory, results)])


def slowdown(rows: list[tuple[int, float, float]], *, limited: bool = True) -> Json:
    ran = {"other_thread": True, "limited_stream": limited}
    measured = [
        {"asked_sms": n, "granted_sms": n, "forward": f, "backward": b, "backward_ran": ran}
        for n, f, b in rows
    ]
    return record(cases_of("slowdown")[0], {"slowdown": stage({"rows": measured})})


def test_the_numbers_that_stand_for_the_speeds_are_found() -> None:
    # Of 128 there is no quarter, of 104 there is.
    rows = [(128, 1.0, 2.0), (104, 1.2, 2.4), (56, 2.2, 4.3), (48, 2.4, 4.9)]
    made = slowdown([*rows, (32, 3.6, 7.0), (24, 4.7, 9.5)])
    counted = checks.counted_slowdowns(made)
    assert counted is not None
    best = checks.best_counts(counted)
    assert best.by_speed == {1.0: 104, 0.5: 48, 0.25: 24}
    assert best.error == pytest.approx(4.8 / 4.7 - 1.0)
    found = verdicts_of(made)
    claim = "forward and backward from speeds 0.5 and 0.25, most, with --sms 1=104,0.5=48,0.25=24"
    assert found[claim] == "reached"
    assert found["backward ran on another thread, on the limited stream"] == "reached"
    assert "56 multiprocessors: forward 0.455" in report.text_of([made])


def test_a_backward_that_is_not_slowed_down_shows() -> None:
    rows = [(128, 1.0, 2.0), (64, 2.0, 2.0), (32, 4.0, 2.0)]
    found = verdicts_of(slowdown(rows, limited=False))
    assert list(found.values()) == ["missed"] * 2


# -- taking up again ---------------------------------------------------------------------------


def work() -> Work:
    stages = [
        {"name": "a"},
        {"name": "b", "needs": ["a"]},
        {"name": "c"},
    ]
    return Work("work", stages, 2)


GOOD = {"status": records.OK}
OUT = {"status": records.OUT_OF_MEMORY}


def test_a_stage_is_known_once_all_ranks_have_reported() -> None:
    made = work()
    made.take([{"a": GOOD}, {}], [], "")
    assert made.results == {}
    made.take([{"a": GOOD}, {"a": GOOD}], [], "")
    assert made.results["a"]["status"] == records.OK
    assert [stage["name"] for stage in made.left()] == ["b", "c"]


def test_one_rank_out_of_memory_ends_the_stage_with_the_processes() -> None:
    made = work()
    made.take([{"a": GOOD, "b": OUT}, {"a": GOOD}], ["log"], "")
    assert set(made.results) == {"a"}
    made.take([{"a": GOOD, "b": OUT}, {"a": GOOD}], ["log"], "ended")
    assert made.results["b"] == {
        "status": records.OUT_OF_MEMORY,
        "ranks": [OUT, None],
        "log": ["log"],
    }
    assert [stage["name"] for stage in made.left()] == ["c"]


def test_a_rank_without_memory_explains_those_that_failed_with_it() -> None:
    made = work()
    failed = {"status": records.FAILED, "error": "rank 1 failed"}
    made.take([{"a": failed}, {"a": OUT}], [], "ended")
    assert made.results["a"]["status"] == records.OUT_OF_MEMORY


def test_what_needs_a_failed_stage_is_not_tried() -> None:
    made = work()
    made.take([{"a": OUT}, {"a": OUT}], [], "")
    assert [stage["name"] for stage in made.left()] == ["c"]
    # The end that follows is that of the stage which failed, not c's.
    made.take([{"a": OUT}, {"a": OUT}], [], "ended")
    assert [stage["name"] for stage in made.left()] == ["c"]
    made.stages.append({"name": "d", "needs": ["b"]})
    assert [stage["name"] for stage in made.left()] == ["c"]
    made.take([{}, {}], ["why"], "ended")
    assert made.results["c"] == {"status": records.FAILED, "ranks": [], "log": ["why"]}


def test_a_refused_stage_does_not_end_the_processes() -> None:
    made = work()
    refused = {"status": REFUSED}
    made.take([{"c": refused}, {"c": refused}], [], "")
    made.take([{"c": refused}, {"c": refused}], ["crash"], "ended")
    assert made.results["a"]["status"] == records.FAILED


def test_what_was_under_way_when_time_was_up_says_so() -> None:
    made = work()
    made.take([{"a": GOOD}, {}], [], "late")
    assert made.results["a"]["status"] == records.TIMED_OUT


@pytest.mark.parametrize("slow", ["in_kernels", "planned"])
def test_waiting_in_a_stream_is_compared_by_medians_of_the_rounds(slow: str) -> None:
    made = speed_case(95.0, 40.0)
    claim = "step, ranks waiting in NCCL's kernels over waiting in a stream"
    assert claim not in verdicts_of(made)
    turns = comparing_waits(case((1.0, 0.25)), 3).runs
    if slow == "planned":  # as results of before have it
        turns = tuple(run.replace("in_kernels", "in_stream") for run in turns)
    made["case"]["runs"] = list(turns)
    assert checks.waits_ratio(made) is None
    for run in turns:
        kind, _, number = run.partition("#")
        if kind == "planned" or kind.startswith("in_"):
            seconds = (2.0 if kind == slow else 1.6) + (9.0 if number == "3" else 0.0)
            made["results"][run] = stage(trained(seconds, 95.0), trained(seconds, 96.0))
    assert checks.waits_ratio(made) == pytest.approx(1.25)
    assert verdicts_of(made)[claim] == "reported"
    assert f"{turns[-2]}" in report.text_of([made])
