"""A training that is killed again and again, and resumed each time, ends as one that was not.

make test-stress KILLS=20 SEED=1

A life is counted in steps and not in seconds, so that a busy machine only makes it longer. Most
lives are forked from a process that has imported everything: a start under the launcher takes half
a minute to two minutes there, which is what the rest of the test takes.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harness import RankError, RankPool
from stressed_training import live
from support.ports import free_port
from support.processes import fresh_environment
from support.resume import assert_same

REPOSITORY = Path(__file__).resolve().parents[2]
KILLS = int(os.environ.get("KILLS", "20"))
SEED = int(os.environ.get("SEED", "1"))
LAUNCHED = 2
"""Lives of the long test that the launcher begins and ends."""
LONGEST_LIFE = 12
"""Steps before a kill, at most."""
LATEST = 0.15
"""Seconds after that step, at most: longer than a step, and than most saves."""
START_SECONDS = 400.0
"""Imports of four processes, on a machine whose cores others use as well."""


class _Killer(threading.Thread):
    """Kills one rank or both, a random while after a random step of their life."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        super().__init__(daemon=True)
        self._folder = folder
        self._pids = [folder / f"pid{rank}" for rank in range(2)]
        for file in (*self._pids, folder / "made"):
            file.unlink(missing_ok=True)
        self._steps = chance.randint(0, LONGEST_LIFE)
        self._delay = chance.random() * LATEST
        self._victims = chance.choice([(0,), (1,), (0, 1)])
        self.has_killed = False

    def run(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        self._wait(deadline, lambda: all(file.exists() for file in self._pids))
        begin = self._made()
        self._wait(deadline, lambda: self._made() >= begin + self._steps)
        time.sleep(self._delay)
        for victim in self._victims:
            os.kill(int(self._pids[victim].read_text()), signal.SIGKILL)
        self.has_killed = True

    def _made(self) -> int:
        return int((self._folder / "made").read_text())

    def _wait(self, deadline: float, is_true: Callable[[], bool]) -> None:
        while not is_true():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the ranks did not get to step {self._steps} of their life")
            time.sleep(0.005)


def _forked(folder: Path, steps: int, delays: int, *, to_die: bool) -> None:
    # The launcher ends the others at once when a rank has died.
    with RankPool(2, settle_seconds=0.5) as pool:
        if not to_die:
            pool.run(live, folder, steps, delays, timeout=600.0)
            return
        with pytest.raises(RankError, match="died with exit code -9"):
            pool.run(live, folder, steps, delays, timeout=START_SECONDS)


def _launched(folder: Path, steps: int, delays: int, *, to_die: bool) -> None:
    python_path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = fresh_environment(OMP_NUM_THREADS="1", PYTHONPATH=python_path)
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2"]
    script = str(REPOSITORY / "tests/dist/stressed_training.py")
    port = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    arguments = [str(folder), str(steps), str(delays)]
    with (folder / "log").open("a") as log:
        code = subprocess.run(
            [*runner, *port, script, *arguments],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            timeout=2 * START_SECONDS,
        ).returncode
    assert (code != 0) == to_die, (folder / "log").read_text()[-4000:]


def _check(tmp_path: Path, kills: int, launched: int, seed: int) -> None:
    chance = random.Random(seed)
    steps = (LONGEST_LIFE + 3) * kills + 6
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    for folder in (killed, straight):
        folder.mkdir()
    _forked(straight, steps, 0, to_die=False)
    for number in range(kills):
        killer = _Killer(killed, chance)
        killer.start()
        begin = _launched if number < launched else _forked
        begin(killed, steps, number + 1, to_die=True)
        killer.join()
        assert killer.has_killed
    _forked(killed, steps, 0, to_die=False)
    resumed = [int(line) for line in (killed / "resumed").read_text().split()]
    print(f"resumed at {resumed}, of {steps} steps")
    assert len(resumed) == kills + 1
    # Nothing is lost: no run begins before the one that was killed had.
    assert resumed == sorted(resumed)
    assert 0 < resumed[-1] < steps
    ends = [torch.load(folder / "end.pt", weights_only=False) for folder in (killed, straight)]
    assert_same(*ends)


@pytest.mark.stress
@pytest.mark.timeout(240)
def test_killed_once(tmp_path: Path) -> None:
    _check(tmp_path, 1, 0, 5)


@pytest.mark.stress
@pytest.mark.timeout(3000)
def test_it_ends_as_one_that_was_not_killed(tmp_path: Path) -> None:
    _check(tmp_path, KILLS, LAUNCHED, SEED)
