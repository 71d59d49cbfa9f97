"""A training that is killed again and again, and resumed each time, ends as one that was not.

make test-stress KILLS=20 SEED=1
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launchers import REPOSITORY, free_port
from support.processes import fresh_environment
from support.resume import assert_same

pytestmark = [pytest.mark.stress, pytest.mark.timeout(3000)]

KILLS = int(os.environ.get("KILLS", "20"))
SEED = int(os.environ.get("SEED", "1"))
STEPS = 40 * KILLS
START_SECONDS = 120.0
LONGEST = 2.5
"""Seconds of training before a kill, at most: saves are under way most of the time."""


def _launch(folder: Path, seed: int) -> subprocess.Popen[bytes]:
    for rank in range(2):
        (folder / f"pid{rank}").unlink(missing_ok=True)
    python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = fresh_environment(
        OMP_NUM_THREADS="1", PYTHONPATH=python_path, HYTRAIN_DELAYS=f"{seed}:1500"
    )
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    script = str(REPOSITORY / "tests/dist/stressed_training.py")
    port = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(
            [*runner, *port, script, str(folder), str(STEPS)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )


def _pids(folder: Path, launcher: subprocess.Popen[bytes]) -> list[int]:
    """When both ranks train."""
    deadline = time.monotonic() + START_SECONDS
    files = [folder / f"pid{rank}" for rank in range(2)]
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, (folder / "log").read_text()[-4000:]
        assert launcher.poll() is None, (folder / "log").read_text()[-4000:]
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def _finish(folder: Path) -> None:
    launcher = _launch(folder, 0)
    assert launcher.wait(1200) == 0, (folder / "log").read_text()[-4000:]


def test_it_ends_as_one_that_was_not_killed(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    for folder in (killed, straight):
        folder.mkdir()
    _finish(straight)
    for number in range(KILLS):
        launcher = _launch(killed, number)
        pids = _pids(killed, launcher)
        time.sleep(chance.random() * LONGEST)
        victims = chance.choice([pids[:1], pids[1:], pids])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        assert launcher.wait(120) != 0
    _finish(killed)
    resumed = [int(line) for line in (killed / "resumed").read_text().split()]
    print(f"resumed at {resumed}")
    assert len(resumed) == KILLS + 1
    # Nothing is lost: no run begins before the one that was killed had.
    assert resumed == sorted(resumed)
    assert 0 < resumed[-1] < STEPS
    ends = [torch.load(folder / "end.pt", weights_only=False) for folder in (killed, straight)]
    assert_same(*ends)
