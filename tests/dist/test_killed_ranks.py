"""A rank is killed in the middle of training: the others name it and end, within seconds."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_runs import Kill, Nursery, random_kill

pytestmark = pytest.mark.timeout(280)
full = pytest.mark.parity_full
MOST_SECONDS = 28.0
"""The promise is ten (kill_runs.py), and a busy machine is slower. Less than the half minute that
ends a process whose script has caught the failure: nothing else may have to."""


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


APART = ("host0", "host1", "host2", "host3")
"""Nobody looks at another one's process: the connections tell."""


@pytest.mark.parametrize(
    "kill",
    [
        Kill("step", stage=2, ranks=3, victim=1, delay=0.3),
        Kill("save", stage=3, ranks=2, victim=0, delay=0.4),
        # Rank 2 has no connection to rank 0, only to ranks 1 and 3, which end because of it.
        Kill("accumulation", stage=1, ranks=4, victim=0, delay=0.2, hosts=APART),
        Kill("own", stage=2, ranks=2, victim=1, delay=0.1, without_peers=True),
    ],
    ids=lambda kill: kill.case,
)
def test_a_killed_rank_is_named_and_all_end(nursery: Nursery, tmp_path: Path, kill: Kill) -> None:
    assert not nursery.run(kill, tmp_path).faults(kill, most_seconds=MOST_SECONDS)


@pytest.mark.parametrize(
    ("victim", "hosts"), [(1, APART), pytest.param(0, None, marks=full)], ids=["apart", "the store"]
)
def test_a_stopped_rank_is_not_taken_for_a_killed_one(
    nursery: Nursery, tmp_path: Path, victim: int, hosts: tuple[str, ...] | None
) -> None:
    kill = Kill("step", 2, 2, victim=victim, delay=0.1, signal=signal.SIGSTOP, hosts=hosts)
    ends = nursery.run(kill, tmp_path, seconds=8.0)
    assert ends.codes == [None, None], ends.logs
    assert not any("has failed" in log or "was killed" in log for log in ends.logs), ends.logs


def test_ranks_whose_scripts_end_one_after_another_end_well(
    nursery: Nursery, tmp_path: Path
) -> None:
    ends = nursery.run(Kill("ends", 2, 2, victim=1, delay=0.0, signal=0, hosts=APART), tmp_path)
    assert ends.codes == [0, 0], ends.logs
    assert not any("has failed" in log or "was killed" in log for log in ends.logs), ends.logs


@pytest.mark.parametrize(
    ("case", "code", "words"),
    [
        ("raises", 1, "the script's own mistake"),
        pytest.param("exits", 3, "its process has ended", marks=full),
    ],
)
def test_a_script_that_ends_alone(
    nursery: Nursery, tmp_path: Path, case: str, code: int, words: str
) -> None:
    kill = Kill(case, stage=2, ranks=2, victim=1, delay=0.0, signal=0)
    ends = nursery.run(kill, tmp_path)
    assert not ends.faults(kill, most_seconds=MOST_SECONDS)
    assert ends.codes[1] == code
    assert words in ends.logs[0]


@full
@pytest.mark.parametrize("seed", range(10))
def test_any_rank_is_killed_at_any_moment(nursery: Nursery, tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    for number in range(5):
        kill = random_kill(generator)
        folder = tmp_path / str(number)
        folder.mkdir()
        assert not nursery.run(kill, folder).faults(kill, most_seconds=MOST_SECONDS), kill
