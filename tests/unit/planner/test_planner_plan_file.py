"""plan.json: written and read back, checked, and compared with the job that would use it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner_clusters import PARAMETERS, planned

from hytrain.errors import PlanError
from hytrain.formats.plan_file import (
    Actual,
    ActualRank,
    PlanFile,
    difference,
    read_plan,
    write_plan,
)
from hytrain.tools.planner.cluster import Cluster, GpuProfile, Host
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.problem import Model, PlanProblem
from hytrain.tools.planner.result import plan_file

GB = 10**9


def _gpu(name: str, gigabytes: int, ms: float) -> GpuProfile:
    line = Table(((1.0, ms),))
    peak = Table(((1.0, 1e9), (2.0, 1.5e9)))
    return GpuProfile(name, gigabytes * GB, line, line, peak, GB // 2, 1e11, 2e10)


@pytest.fixture
def plan() -> PlanFile:
    fast, slow = _gpu("fast", 40, 1.0), _gpu("slow", 24, 2.0)
    rates = Table(((16.0, 4e9),))
    hosts = (
        Host("one", (fast, slow), 16, 64 * GB, 1e11, rates),
        Host("two", (slow,), 16, 64 * GB, 1e11, rates),
    )
    none = Table(((1.0, 0.0),))
    problem = PlanProblem(Cluster(hosts, none, none), Model("m", 8, PARAMETERS), 16)
    found = planned(problem)
    return plan_file(problem, found)


def _actual(plan: PlanFile) -> Actual:
    ranks = [ActualRank(rank.host, rank.device, rank.memory_bytes) for rank in plan.ranks]
    return Actual(ranks, 8, PARAMETERS, 16, 2)


def _read(tmp_path: Path, record: Any) -> PlanFile:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(record))
    return read_plan(path)


def test_it_is_read_as_it_was_written(plan: PlanFile, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, plan)
    assert read_plan(path) == plan
    record = json.loads(path.read_text())
    assert record["version"] == 1
    assert [rank["batch_size"] for rank in record["ranks"]] == [8, 4, 4]
    assert record["ranks"][1]["device"] == "slow"
    predicted = record["predicted"]
    assert predicted["step_seconds"] == predicted["clipped_seconds"] > 0.0
    assert predicted["unclipped_seconds"] > 0.0


def test_a_prediction_for_a_share_of_clipped_steps(plan: PlanFile) -> None:
    both = plan.predicted.model_copy(update={"unclipped_seconds": 1.0, "clipped_seconds": 3.0})
    assert [both.at(share) for share in (0.0, 0.25, 1.0)] == [1.0, 1.5, 3.0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "has version 2"),
        ({"global_batch": 17}, "sum to 16, not to 17"),
        ({"stage": 4}, "stage"),
        ({"surprise": 1}, "surprise: Extra inputs"),
        ({"offload_param": "cpu"}, "offload_param needs stage 3"),
        ({"ranks": []}, "ranks"),
    ],
)
def test_a_bad_file_is_refused(
    plan: PlanFile, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        _read(tmp_path, plan.model_dump(mode="json") | change)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("shard_fraction", 0.9, "shard fractions sum to"),
        ("gpu_layers", 9, "9 of 8 layers"),
        ("microbatch_size", 0, "microbatch_size is 0"),
        ("microbatch_size", 9, "micro-batches of 9 for 8 samples"),
        ("batch_size", -1, "ranks.0.batch_size"),
        ("activations", "drop", "ranks.0.activations"),
    ],
)
def test_a_bad_rank_is_refused(
    plan: PlanFile, tmp_path: Path, key: str, value: Any, words: str
) -> None:
    record = plan.model_dump(mode="json")
    record["ranks"][0][key] = value
    with pytest.raises(PlanError, match=words):
        _read(tmp_path, record)


def test_ranks_of_two_modes_are_refused_in_stage_3(plan: PlanFile, tmp_path: Path) -> None:
    record = plan.model_dump(mode="json")
    record["ranks"][0]["activations"] = "store"
    for number in (1, 2):
        record["ranks"][number]["activations"] = "keep"
    _read(tmp_path, record)
    with pytest.raises(PlanError, match="in stage 3 all ranks use each layer together"):
        _read(tmp_path, record | {"stage": 3})


def test_no_file_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read"):
        read_plan(tmp_path / "plan.json")
    for text, words in (("{", "not JSON"), ("[]", "version None"), ("{}", "version None")):
        (tmp_path / "plan.json").write_text(text)
        with pytest.raises(PlanError, match=words):
            read_plan(tmp_path / "plan.json")


def test_the_job_that_was_planned_for_has_no_difference(plan: PlanFile) -> None:
    actual = _actual(plan)
    assert difference(plan, actual) == []
    renamed = [replace(rank, host=f"new-{rank.host}") for rank in actual.ranks]
    assert difference(plan, replace(actual, ranks=renamed)) == []
    more = [replace(rank, memory_bytes=2 * rank.memory_bytes) for rank in actual.ranks]
    assert difference(plan, replace(actual, ranks=more)) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 9}, "layers: planned for 8, found 9"),
        ({"parameters": 5}, f"parameters: planned for {PARAMETERS}, found 5"),
        ({"global_batch": 8}, "samples in the global batch: planned for 16, found 8"),
        ({"stage": 3}, "ZeRO stage: planned for 2, found 3"),
        ({"ranks": []}, "ranks: planned for 3, found 0"),
    ],
)
def test_reports_differences_of_another_job(
    plan: PlanFile, change: dict[str, Any], words: str
) -> None:
    assert difference(plan, replace(_actual(plan), **change)) == [words]


def test_moments_are_compared(plan: PlanFile) -> None:
    (word,) = difference(plan, replace(_actual(plan), moments="8bit"))
    assert word == 'moments: planned for "fp32", found "hytrain.moments": "8bit"'


def test_where_weights_are_is_compared(plan: PlanFile) -> None:
    sharded = plan.model_copy(update={"stage": 3})
    streamed = sharded.model_copy(update={"offload_param": "cpu"})
    here = replace(_actual(plan), stage=3)
    there = replace(here, offload_param="cpu")
    assert difference(sharded, here) == difference(streamed, there) == []
    (words,) = difference(streamed, here)
    assert words.startswith("offload_param: planned for weights in host memory, found none there")
    (words,) = difference(sharded, there)
    assert words.endswith("remove it, or plan with --offload-param cpu")


def test_reports_another_device_less_memory_and_another_host(plan: PlanFile) -> None:
    actual = _actual(plan)
    one, two, three = actual.ranks

    def words(*ranks: ActualRank) -> list[str]:
        return difference(plan, replace(actual, ranks=ranks))

    assert words(one, replace(two, device="x"), three) == ["rank 1: planned for slow, found x"]
    (less,) = words(replace(one, memory_bytes=30 * GB), two, three)
    assert less == "rank 0 (fast): planned with 37.25 GiB, found 27.94"
    together = words(one, two, replace(three, host="one"))
    assert len(together) == 3
    assert together[2] == (
        "rank 2: planned on two with ranks [2], found on one with ranks [0, 1, 2]"
    )
    assert words(two, one, three)[-1].startswith("the devices are those of the plan")
