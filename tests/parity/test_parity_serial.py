"""Training on one rank is bitwise a serial loop, and torch's AdamW within rounding."""

from __future__ import annotations

import pytest
from parity_cases import DELAYED, ONE_RANK, ONE_RANK_FULL
from support.comparisons import check_parity
from support.covering import covering, every, pairs_of
from support.engines import device, environment
from support.parity import Case

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _device_is_cpu() -> None:
    if device().type != "cpu":
        pytest.skip("bitwise on a CPU; on a GPU see test_parity_gpu.py")


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_covering_selection(case: Case) -> None:
    figures = check_parity(case)
    assert figures["steps"] == 50


@pytest.mark.parity_full
@pytest.mark.parametrize("case", ONE_RANK_FULL, ids=str)
def test_every_combination(case: Case) -> None:
    check_parity(case)


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.parity_full) for seed in (2, 3))]
)
@pytest.mark.parametrize("case", DELAYED, ids=str)
def test_with_delays_at_every_hand_off(case: Case, seed: int) -> None:
    with environment("HYTRAIN_DELAYS", f"{seed}:400"):
        check_parity(case)


def test_the_selection_shows_every_pair() -> None:
    values = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (4, 5, 6)}
    chosen = [tuple(row.values()) for row in covering(values)]
    wanted = set().union(*(pairs_of(tuple(row.values())) for row in every(values)))
    assert set().union(*(pairs_of(row) for row in chosen)) == wanted
    assert len(chosen) < len(every(values)) / 2
