"""Two ranks with placements of their own: bitwise the serial update, equal weights everywhere."""

from __future__ import annotations

import pytest
import rank_moves as cases
from harness import RankPools

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("fractions", "stage", "clipping", "accumulation"),
    [
        ((0.5, 0.5), 2, 0.02, 1),
        ((0.7, 0.3), 1, 100.0, 1),
        ((0.7, 0.3), 2, 0.02, 2),
        ((0.5, 0.5), 1, 0.02, 2),
    ],
    ids=str,
)
def test_each_rank_moves_other_layers(
    ranks: RankPools,
    fractions: tuple[float, ...],
    stage: int,
    clipping: float,
    accumulation: int,
) -> None:
    differed = ranks(2).run(cases.moves_by_hand, fractions, stage, clipping, accumulation, 3)
    assert differed[0] == differed[1] > cases.STEPS // 2


@pytest.mark.parametrize(
    ("fractions", "stage", "clipping"),
    [((0.7, 0.3), 2, 0.02), ((0.5, 0.5), 1, 100.0)],
    ids=str,
)
def test_each_rank_solves_for_itself(
    ranks: RankPools, fractions: tuple[float, ...], stage: int, clipping: float
) -> None:
    for differed, decisions in ranks(2).run(cases.moves_by_a_solver, fractions, stage, clipping):
        assert differed > cases.STEPS // 4
        assert decisions > 3


def test_the_real_solver_knows_its_own_shard(ranks: RankPools) -> None:
    large, small = (decisions[0] for decisions in ranks(2).run(cases.solves, (0.7, 0.3)))
    sizes = [sum(layer.parameters for layer in one.layer_bytes) for one in (large, small)]
    assert sizes[0] > 2 * sizes[1]
    assert large.limits.host > 0
    # Both had seen what the host has left before either took any of it.
    assert abs(large.limits.host - small.limits.host) < 2**30


@pytest.mark.parametrize("poor", [0, 1])
def test_a_rank_that_does_not_fit_is_refused_on_all(ranks: RankPools, poor: int) -> None:
    messages = ranks(2).run(cases.one_rank_without_memory, poor)
    assert "the optimizer state fits in no split between GPU and host" in messages[poor]
    assert "another rank" in messages[1 - poor]


@pytest.mark.parametrize(("machines", "part"), [("ab", (1, 12)), ("aa", (2, 6))], ids=str)
def test_ranks_ask_each_other_where_they_run(
    ranks: RankPools, machines: str, part: tuple[int, int]
) -> None:
    assert ranks(2).run(cases.parts_of_hosts, machines) == [part, part]
