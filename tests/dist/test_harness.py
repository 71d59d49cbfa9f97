"""The harness reports what happened on a rank, whichever way the rank fails."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from harness import RankError, RankPool


def _sum_of_ranks(factor: int) -> float:
    value = torch.tensor(float(dist.get_rank() + 1) * factor)
    dist.all_reduce(value)
    return value.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("only here")
    dist.barrier()


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def test_results_come_back_in_rank_order_and_a_failed_pool_starts_again() -> None:
    with RankPool(2, with_deepspeed=False, settle_seconds=0.5) as pool:
        assert pool.run(_sum_of_ranks, 1) == [3.0, 3.0]
        assert pool.run_each(_sum_of_ranks, [(1,), (2,)]) == [5.0, 5.0]
        with pytest.raises(RankError, match=r"(?s)rank 1 failed.*KeyError: 'only here'"):
            pool.run(_fail_on, 1)
        with pytest.raises(RankError, match=r"(?s)time of 1 s is up.*rank 0 is here.*_hang_on"):
            pool.run(_hang_on, 0, timeout=1.0)
        with pytest.raises(RankError, match="rank 0 died with exit code 7"):
            pool.run(_die_on, 0)
