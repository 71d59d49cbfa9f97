"""Two launchers, as on two hosts, with equal and unequal slots: the ranks of one job.

They run on one machine here, over loopback, and are told by a hostfile that they are two.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import launched_training
import pytest
import torch
from harness import RankPools
from launchers import REPOSITORY, SECONDS, launch
from support.comparisons import assert_same_bits

pytestmark = pytest.mark.timeout(SECONDS + 100)


@pytest.mark.parametrize(
    ("slots", "local_ranks"),
    [
        pytest.param((2, 2), "0101", marks=pytest.mark.parity_full),
        ((1, 2), "010"),
        pytest.param((2, 1), "010", marks=pytest.mark.parity_full),
    ],
    ids=str,
)
def test_two_hosts_train_as_one(
    ranks: RankPools, tmp_path: Path, slots: tuple[int, int], local_ranks: str
) -> None:
    world = sum(slots)
    launch(slots, tmp_path, str(REPOSITORY / "tests/dist/launched_training.py"), str(tmp_path))
    found: list[dict[str, Any]] = [torch.load(tmp_path / f"rank{n}.pt") for n in range(world)]
    # DeepSpeed counts RANK % slots: with one slot and two, the last rank
    # has LOCAL_RANK 0.
    assert "".join(one["LOCAL_RANK"] for one in found) == local_ranks
    # What the launchers take for two hosts is one machine: its cores are divided among all.
    assert [one["ranks_on_host"] for one in found] == [world] * world
    assert [one["cores"] for one in found] == [
        max(1, len(os.sched_getaffinity(0)) // world)
    ] * world
    expected = ranks(world).run(launched_training.train)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert mine["state"].keys() == theirs["state"].keys()
        for name, tensors in mine["state"].items():
            for kind, value in tensors.items():
                assert_same_bits(f"{kind} of {name}", value, theirs["state"][name][kind])
    assert found[0]["state"]
