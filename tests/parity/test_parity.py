"""Training is bitwise a serial loop, and torch's AdamW within rounding.

With moments in bf16 and 8 bits, the loop's random bits are made from parameters' names and indices
(``support/rounded_moments.py``), whatever holds a layer's state and however it is cut.
"""

from __future__ import annotations

import pytest
import torch.distributed as dist
from harness import on_ranks
from parity_cases import (
    DELAYED,
    FULL,
    ONE_RANK,
    ROUNDED,
    ROUNDED_ON_TWO_RANKS,
    SPLIT,
    SPLIT_ON_TWO_RANKS,
    TWO_RANKS,
)
from support.comparisons import check_parity
from support.covering import covering, every, pairs_of
from support.engines import environment
from support.parity import Case

pytestmark = pytest.mark.timeout(300)
full = pytest.mark.parity_full
DAILY = [
    *ONE_RANK,
    *ROUNDED,
    *SPLIT,
    *TWO_RANKS,
    *ROUNDED_ON_TWO_RANKS,
    *SPLIT_ON_TWO_RANKS,
]


@pytest.mark.parametrize(
    "case", [*DAILY, *(pytest.param(case, marks=full) for case in FULL)], ids=str
)
@on_ranks(lambda case: case.num_ranks)
def test_parity(case: Case) -> None:
    check_parity(case)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=full) for seed in (2, 3))])
@pytest.mark.parametrize("case", DELAYED, ids=str)
@on_ranks(lambda case: case.num_ranks)
def test_with_delays_at_every_hand_off(case: Case, seed: int) -> None:
    """Each rank has delays of its own."""
    with environment("HYTRAIN_DELAYS", f"{seed + 100 * dist.get_rank()}:400"):
        check_parity(case)


def test_the_selection_shows_every_pair() -> None:
    values = {"a": (1, 2, 3), "b": ("x", "y"), "c": (True, False), "d": (4, 5, 6)}
    chosen = [tuple(row.values()) for row in covering(values)]
    wanted = set().union(*(pairs_of(tuple(row.values())) for row in every(values)))
    assert set().union(*(pairs_of(row) for row in chosen)) == wanted
    assert len(chosen) < len(every(values)) / 2
