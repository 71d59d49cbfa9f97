"""Which cases run where, and what the ranks are told."""

from __future__ import annotations

import math

import pytest
from unequal_cases import PARAMETERS, case, profile

from experiments.unequal_gpus.cases import GIB, PARTS, RUNS, cases_of, stages_of, waves
from experiments.unequal_gpus.group import divide_cores
from experiments.unequal_gpus.planning import (
    Limits,
    alone_of,
    best_size,
    even_of,
    passes_rate,
    problem_of,
    section_of,
    verdicts,
)
from hytrain.planner.errors import PlanError

UNLIMITED = Limits(host_bytes=None)


def test_every_part_has_cases_whose_runs_are_known() -> None:
    for part in PARTS:
        for each in cases_of(part):
            assert set(each.runs) <= set(RUNS)
            assert len(each.memory) == each.num_ranks
            assert max(each.speeds) == 1.0
    with pytest.raises(ValueError, match="unknown"):
        cases_of("five")


def test_cases_that_fit_run_side_by_side() -> None:
    two = [*cases_of("two"), *cases_of("memory")]
    assert [[c.label for c in wave] for wave in waves(two, 4)] == [
        ["half", "quarter"],
        ["memory", "offload"],
    ]
    assert [len(wave) for wave in waves(two, 2)] == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="needs 4 GPUs"):
        waves(cases_of("four"), 2)


def test_a_run_needs_the_plan_and_the_plan_the_profile() -> None:
    stages = stages_of(case(), {"model": "toy"})
    assert [stage["name"] for stage in stages] == ["profile", "plan", "alone", "planned", "even"]
    assert [stage.get("needs") for stage in stages[1:3]] == [["profile"], ["profile"]]


def test_cores_are_divided_and_none_is_given_twice() -> None:
    found = divide_cores(range(10, 20), 3)
    assert found == ((10, 11, 12), (13, 14, 15), (16, 17, 18))
    assert divide_cores([4, 7], 3) == ((4, 7),) * 3


def test_the_batch_is_split_by_speed() -> None:
    found = verdicts([profile(1.0), profile(0.5), profile(0.25)], 112, UNLIMITED)
    planned = found["planned"]
    assert sum(planned["batch_sizes"]) == 112
    assert planned["batch_sizes"] == pytest.approx([64, 32, 16], abs=2)
    assert math.fsum(planned["shard_fractions"]) == pytest.approx(1.0)
    assert min(planned["shard_fractions"]) > 0.0
    # Nothing is charged for recomputation: 64 samples by 8 are eight times forward and backward.
    passes = 8 * (profile()["forward"][-1] + profile()["backward"][-1])
    assert planned["predicted_seconds"] == pytest.approx(passes, rel=0.05)


def test_no_micro_batch_is_planned_beyond_those_measured() -> None:
    gpu = problem_of([profile()], 64, UNLIMITED).cluster.ranks[0][1]
    assert gpu.micro_sizes(64) == range(1, 9)
    found = verdicts([profile(), profile()], 64, UNLIMITED)
    assert max(found["planned"]["micro_batch_sizes"]) <= 8


def test_what_does_not_fit_is_refused_with_what_is_missing() -> None:
    small = [profile(memory_gib=20.0), profile(0.5, memory_gib=20.0)]
    with pytest.raises(PlanError, match="GiB"):
        verdicts(small, 48, Limits(host_bytes=0))
    found = verdicts(small, 48, Limits(host_bytes=60 * GIB))
    assert "GiB" in found["without_host"]
    assert min(found["planned"]["gpu_fractions"]) < 1.0
    assert sum(found["planned"]["host_gib"]) <= 60.0


def test_memory_goes_to_who_has_it_and_samples_to_who_is_fast() -> None:
    planned = verdicts(
        [profile(1.0, memory_gib=22.0), profile(0.5)], 48, Limits(host_bytes=0)
    )["planned"]  # fmt: skip
    assert planned["batch_sizes"][0] > planned["batch_sizes"][1]
    assert planned["shard_fractions"][0] < 0.3
    assert planned["gpu_fractions"] == [1.0, 1.0]
    assert planned["gpu_gib"][0] <= 22.0


def test_the_even_split_takes_a_size_that_divides_its_share() -> None:
    ranks = [profile(1.0), profile(0.25)]
    told = even_of(ranks, 24)
    assert told["batch_sizes"] == [12, 12]
    assert told["micro_batch_sizes"] == [4, 4]
    assert even_of(ranks, 32)["micro_batch_sizes"] == [8, 8]


def test_a_gpu_alone_has_its_share_in_its_best_micro_batches() -> None:
    slow = profile(0.5, forward=[0.01, 0.02, 0.03, 0.2], backward=[0.02, 0.04, 0.06, 0.4])
    assert best_size(slow) == 4
    assert passes_rate(slow) == pytest.approx(4 / 0.09)
    assert alone_of(slow, 33) == {"micro_batch": 4, "accumulation": 8, "gpu_fraction": 1.0}
    assert alone_of(slow, 1)["accumulation"] == 1


def test_sections_are_what_the_run_says() -> None:
    limits = Limits(host_bytes=60 * GIB)
    plan = verdicts([profile(memory_gib=20.0), profile(0.5, memory_gib=20.0)], 48, limits)
    planned = section_of("planned", plan, 1, limits, 90 * GIB)
    assert planned["gpu_fraction"] == plan["planned"]["gpu_fractions"][1]
    assert planned["shard_fractions"] == plan["planned"]["shard_fractions"]
    bare = section_of("no_offload", plan, 1, limits, 90 * GIB)
    assert bare == {**planned, "gpu_fraction": 1.0}
    even = section_of("even", plan, 0, limits, 90 * GIB)
    assert even["batch_sizes"] == [24, 24]
    assert even["gpu_fraction"] == 1.0
    assert "shard_fractions" not in even
    offload = section_of("even_offload", plan, 0, limits, 90 * GIB)
    assert offload["gpu_fraction"] == "solve"
    assert offload["solver"] == {"host_memory_reserve_bytes": 60 * GIB}


def test_the_memory_cases_are_what_they_claim_to_be() -> None:
    # As an H200 would measure it: no bandwidth or speed enters, only sizes.
    for each in cases_of("memory"):
        ranks = [
            profile(speed, memory_gib=139.8 * share, reserve_bytes=int(max(1, 5.6 * share) * GIB))
            for speed, share in zip(each.speeds, each.memory, strict=True)
        ]
        assert each.host_gib is not None
        limits = Limits(host_bytes=int(each.host_gib * GIB))
        found = verdicts(ranks, each.batch, limits)
        assert (found["without_host"] is not None) == (each.label == "offload")
        # An even half of the state: 14 bytes a parameter on the GPU, beside a copy of the weights.
        half = 7 * PARAMETERS / GIB
        least = 4 * PARAMETERS / GIB + ranks[0]["stored_bytes"][0] / GIB
        room = 139.8 * each.memory[0] - least
        assert room + each.host_gib < half
        assert found["even_split"] is not None
