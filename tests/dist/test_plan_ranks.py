"""Training by a plan on two and three ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_plans as cases
from harness import RankPools
from rank_plans import Planned

pytestmark = pytest.mark.timeout(240)

TWO = Planned((3, 1), (2, 1), (0.7, 0.3), (1, 3))
IDLE = Planned((4, 0), (2, 0), (0.25, 0.75), (4, 0))
THREE = Planned((1, 4, 2), (1, 3, 1), (0.2, 0.5, 0.3), (0, 2, 4))
SHARDED = Planned((4, 2), (2, 1), (0.7, 0.3), (1, 3), stage=3)


@pytest.mark.parametrize("case", [TWO, IDLE, SHARDED, THREE], ids=str)
def test_it_is_the_same_as_the_keys_that_it_stands_for(
    ranks: RankPools, case: Planned, tmp_path: Path
) -> None:
    ranks(len(case.batches)).run(cases.as_with_the_keys, case, tmp_path)


def test_each_rank_treats_activations_its_own_way(ranks: RankPools, tmp_path: Path) -> None:
    ranks(3).run(cases.each_rank_treats_activations_its_own_way, THREE, tmp_path)


@pytest.mark.parametrize(
    ("batches", "policies", "offload"),
    [
        ((4, 1), ("keep", "offload"), None),
        ((3, 0), ("keep", "keep"), None),
        ((1, 3), ("keep", "keep"), "cpu"),
    ],
    ids=str,
)
def test_layer_by_layer_ranks_make_as_many_micro_batches_as_each_likes(
    ranks: RankPools,
    tmp_path: Path,
    batches: tuple[int, int],
    policies: tuple[str, str],
    offload: str | None,
) -> None:
    sizes = tuple(min(1, batch) for batch in batches)
    case = Planned(batches, sizes, (0.3, 0.7), (1, 0), stage=3)
    ranks(2).run(cases.as_one_process_with_the_whole_batch, case, policies, offload, tmp_path)


def test_each_rank_begins_with_its_own_k(ranks: RankPools, tmp_path: Path) -> None:
    ranks(3).run(cases.k_begins_as_planned, THREE, tmp_path)


def test_a_plan_for_another_job_is_refused_on_all_ranks_alike(
    ranks: RankPools, tmp_path: Path
) -> None:
    texts = ranks(2).run(cases.refused_alike, TWO, tmp_path)
    assert texts[0] == texts[1]
    assert "rank 1: planned for NVIDIA L4, found CPU" in texts[0]


def test_what_one_rank_lacks_all_ranks_refuse(ranks: RankPools, tmp_path: Path) -> None:
    pool = ranks(2)
    for missing, different, another in pool.run(cases.trouble_of_one_is_everybodys, TWO, tmp_path):
        assert missing.startswith("rank 1: ")
        assert "there is no file" in missing
        assert "ranks read different files" in different
        assert "trained on rank 0 (host " in another


def test_predicted_stands_beside_measured_on_every_rank(ranks: RankPools, tmp_path: Path) -> None:
    reports = ranks(2).run(cases.predicted_beside_measured, TWO, tmp_path)
    (first, met), (second, also_met) = reports
    assert met == also_met == 13
    assert first == second
    assert [rank["batch_size"] for rank in first["ranks"]] == [3, 1]
    assert all(rank["step_seconds"] > 0.0 for rank in first["ranks"])
    assert all(rank["host_bytes"] > 0 for rank in first["ranks"])
