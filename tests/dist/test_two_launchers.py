"""Two launchers, as on two hosts, with equal and unequal slots: the ranks of one job.

They run on one machine here, over loopback, and are told by a hostfile that they are two.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launched_training
import pytest
import torch
from harness import RankPools
from support.comparisons import assert_same_states
from support.ports import free_port
from support.processes import fresh_environment

SECONDS = 200
"""Most of a launch."""
REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timeout(SECONDS + 100), pytest.mark.parity_full]


def _launch(slots: Sequence[int], folder: Path, *arguments: str) -> None:
    """Starts one launcher a host and waits for all."""
    hostfile = folder / "hostfile"
    hostfile.write_text("".join(f"host{n} slots={count}\n" for n, count in enumerate(slots)))
    python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = fresh_environment(OMP_NUM_THREADS="1", PYTHONPATH=python_path)
    together = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    logs = [(folder / f"host{n}.log").open("w+") for n in range(len(slots))]
    launchers = [
        subprocess.Popen(
            [*runner, "--no_ssh", "--node_rank", str(n), *together, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        for n, log in enumerate(logs)
    ]
    deadline = time.monotonic() + SECONDS
    try:
        for number, launcher in enumerate(launchers):
            code = launcher.wait(timeout=max(1.0, deadline - time.monotonic()))
            logs[number].seek(0)
            assert code == 0, logs[number].read()[-4000:]
    finally:
        for launcher, log in zip(launchers, logs, strict=True):
            launcher.terminate()  # it ends its ranks
            launcher.wait(timeout=40)
            log.close()


@pytest.mark.parametrize(
    ("slots", "local_ranks"),
    [((2, 2), "0101"), ((1, 2), "010"), ((2, 1), "010")],
    ids=str,
)
def test_two_hosts_train_as_one(
    ranks: RankPools, tmp_path: Path, slots: tuple[int, int], local_ranks: str
) -> None:
    world = sum(slots)
    _launch(slots, tmp_path, str(REPOSITORY / "tests/dist/launched_training.py"), str(tmp_path))
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
        assert_same_states(mine["state"], theirs["state"])
    assert found[0]["state"]
