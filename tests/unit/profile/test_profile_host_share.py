"""What part of its host a rank has, by what the ranks say of their hosts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from hytrain.hardware import host_share
from hytrain.hardware.host_share import RankHost, divide_host, this_host

GIB = 1 << 30


def on(machine: str, cores: Iterable[int] = range(16), *groups: str) -> RankHost:
    return RankHost(machine, frozenset(cores), frozenset({"machine", *groups}))


def cores_of(hosts: list[RankHost], num_cores: int = 16, started_here: int = 1) -> list[int]:
    return [
        divide_host(hosts, rank, started_here=started_here, num_cores=num_cores).cores
        for rank in range(len(hosts))
    ]


def test_one_rank_has_all_of_its_host() -> None:
    share = divide_host([on("a", range(16), "job")], 0, num_cores=16)
    assert (share.ranks, share.cores) == (1, 16)
    assert share.memory({"machine": 90 * GIB, "job": 70 * GIB}) == 70 * GIB


def test_ranks_of_a_machine_need_not_follow_one_another() -> None:
    hosts = [on("a"), on("b"), on("a"), on("a"), on("b")]
    shares = [divide_host(hosts, rank, num_cores=16) for rank in range(5)]
    assert [share.ranks for share in shares] == [3, 2, 3, 3, 2]
    assert [share.cores for share in shares] == [5, 8, 5, 5, 8]
    assert [s.memory({"machine": 60 * GIB}) // GIB for s in shares] == [20, 30, 20, 20, 30]


def test_two_launchers_on_one_machine_share_it_all_the_same() -> None:
    # Each has started two; all four were found.
    assert cores_of([on("a")] * 4, started_here=2) == [4] * 4


def test_ranks_that_are_bound_to_cores_keep_them() -> None:
    hosts = [on("a", range(4 * rank, 4 * rank + 4)) for rank in range(4)]
    assert cores_of(hosts, started_here=4) == [4] * 4


def test_cores_are_divided_among_those_that_have_them() -> None:
    # The first has eight for itself; four are shared by all three, the last one's are half its own.
    hosts = [on("a", range(12)), on("a", range(8, 12)), on("a", range(8, 16))]
    assert cores_of(hosts) == [9, 1, 5]  # 8 + 4/3, 4/3, 4/3 + 4


@pytest.mark.parametrize(("mine", "cores"), [(16, 4), (4, 4), (2, 2), (8, 2)])
def test_what_else_the_launcher_has_started_counts(mine: int, cores: int) -> None:
    # One rank of four is in this group; masks that cannot be disjoint are taken for shared.
    assert cores_of([on("a", range(mine))], started_here=4) == [cores]
    share = divide_host([on("a")], 0, started_here=4, num_cores=16)
    assert share.memory({"machine": 80 * GIB}) == 20 * GIB


def test_there_is_always_a_core() -> None:
    assert cores_of([on("a", range(2))] * 4, num_cores=2) == [1] * 4
    assert cores_of([on("a", range(3))] * 3, num_cores=3) == [1] * 3


def test_the_scarcest_memory_decides() -> None:
    # Two containers of one machine: ranks 0 and 1 in one, rank 2 in the other.
    hosts = [on("a", range(16), "x"), on("a", range(16), "x"), on("a", range(16), "y")]
    first, _, last = (divide_host(hosts, rank, num_cores=16) for rank in range(3))
    assert first.memory({"machine": 90 * GIB, "x": 40 * GIB}) == 20 * GIB
    assert first.memory({"machine": 30 * GIB, "x": 40 * GIB}) == 10 * GIB
    assert last.memory({"machine": 90 * GIB, "y": 25 * GIB}) == 25 * GIB
    # A group that appeared since nobody has asked about: as many as share the machine.
    assert last.memory({"machine": 90 * GIB, "new": 60 * GIB}) == 20 * GIB


def test_groups_of_one_name_on_two_machines_are_two() -> None:
    hosts = [on("a", range(16), "cgroup 28:1"), on("b", range(16), "cgroup 28:1")]
    share = divide_host(hosts, 0, num_cores=16)
    assert share.pool_ranks == {"machine": 1, "cgroup 28:1": 1}


def test_this_host_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = this_host()
    assert here == this_host()
    assert here.cores
    assert "machine" in here.memory_pools
    monkeypatch.setattr(host_share, "_BOOT_ID", tmp_path / "absent")
    assert host_share.machine_identity() == host_share.socket.gethostname()
