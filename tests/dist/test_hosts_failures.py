"""A rank, a host or a cable fails: the other host names it, within the time that is documented.

A host is a namespace: support/hosts.py. `make test-hosts` runs all, `make test` a part.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.hosts import Hosts, Program, rank_variables, wait_until
from support.ports import free_port

from hytrain.comm.failure_watch import UNREACHABLE_SECONDS

pytestmark = pytest.mark.timeout(280)
full = pytest.mark.parity_full
SCRIPT = str(Path(__file__).with_name("training_on_hosts.py"))
START_SECONDS = 120.0
NAMED_SECONDS = 28.0
"""The promise is ten (kill_runs.py), and a busy machine is slower."""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(2) as hosts:
        yield hosts


@contextmanager
def _training(hosts: Hosts, folder: Path, what: str = "fail") -> Iterator[list[Program]]:
    """A rank on each host, both at work."""
    port = free_port()
    ranks = [
        Program(
            host,
            [sys.executable, SCRIPT, what, str(folder)],
            folder / f"log{rank}",
            **rank_variables(rank, len(hosts), port),
        )
        for rank, host in enumerate(hosts)
    ]
    if what == "firewall":
        for rank, host in enumerate(hosts):
            wait_until(lambda rank=rank: ranks[rank].line("LISTENS"), ranks, START_SECONDS)
            host.close_port(int(ranks[rank].line("LISTENS")))
            (folder / f"closed{rank}").touch()
    wait_until(lambda: all(_steps(rank) >= 50 for rank in ranks), ranks, START_SECONDS)
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def _steps(rank: Program) -> int:
    """The last one that it has told of."""
    lines = [line.split() for line in rank.text.splitlines() if line.startswith("STEP ")]
    return int(lines[-1][1]) if lines else 0


@pytest.mark.parametrize(
    ("what", "words"),
    [
        pytest.param("fail", "rank 1 was killed or has crashed (process ", marks=full),
        ("firewall", "the connection to rank 1 (process "),
    ],
)
def test_a_rank_is_killed(hosts: Hosts, tmp_path: Path, what: str, words: str) -> None:
    with _training(hosts, tmp_path, what) as ranks:
        assert [rank.line("WATCHES") for rank in ranks] == [host.address for host in hosts]
        (tmp_path / "die").touch()
        took = wait_until(lambda: ranks[0].line("RAISED"), ranks, NAMED_SECONDS)
        raised = ranks[0].line("RAISED")
        assert words in raised
        assert "on host host1" in raised
        assert ("its watch has not answered" in raised) == (what == "firewall")
        wait_until(lambda: ranks[0].code == 1, ranks, NAMED_SECONDS)
        print(f"named after {took:.1f} s")


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=full)])
def test_a_hosts_processes_are_killed(hosts: Hosts, tmp_path: Path, victim: int) -> None:
    """The first one's host has the store, too."""
    other = 1 - victim
    with _training(hosts, tmp_path) as ranks:
        hosts[victim].kill()
        took = wait_until(lambda: ranks[other].line("RAISED"), ranks, NAMED_SECONDS)
        # Whether the dead host is heard of once more, or not, it is named.
        words = f"rank {victim} was killed or has crashed", f"connection to rank {victim} "
        assert any(each in ranks[other].line("RAISED") for each in words)
        wait_until(lambda: ranks[other].code == 1, ranks, NAMED_SECONDS)
        print(f"named after {took:.1f} s")


@full
@pytest.mark.parametrize("victim", [1, 0])
def test_a_host_loses_its_power(hosts: Hosts, tmp_path: Path, victim: int) -> None:
    """Nothing is heard of it any more: it has a minute, and is named then."""
    other = 1 - victim
    with _training(hosts, tmp_path) as ranks:
        hosts.cut(victim)
        hosts[victim].kill()
        most = UNREACHABLE_SECONDS + NAMED_SECONDS
        took = wait_until(lambda: ranks[other].line("RAISED"), ranks, most)
        raised = ranks[other].line("RAISED")
        print(f"named after {took:.1f} s: {raised}")
        assert took > UNREACHABLE_SECONDS
        assert f"rank {victim} " in raised
        wait_until(lambda: ranks[other].code == 1, ranks, NAMED_SECONDS)


@full
@pytest.mark.parametrize("seconds", [20.0, 60.0])
def test_a_cable_is_out_for_a_while(hosts: Hosts, tmp_path: Path, seconds: float) -> None:
    """Training goes on with what it was about to do."""
    with _training(hosts, tmp_path) as ranks:
        hosts.cut(1)
        time.sleep(seconds)
        before = [_steps(rank) for rank in ranks]
        hosts.mend(1)
        took = wait_until(
            lambda: all(_steps(r) >= s + 100 for r, s in zip(ranks, before, strict=True)),
            ranks,
            100.0,
        )
        print(f"went on after {took:.1f} s")
        assert not any(rank.line("RAISED") for rank in ranks)
        norms = [{ln for ln in rank.text.splitlines() if ln.startswith("STEP")} for rank in ranks]
        assert len(norms[0] & norms[1]) >= 3, "the ranks have not taken the same steps"
