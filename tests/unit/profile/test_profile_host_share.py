"""What part of its host a rank has, by what the ranks say of their hosts: simulated machines,
launchers, cpusets, quotas; and the threads of a real pass."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from support.scripts import run_script

from hytrain.hardware import host_share
from hytrain.hardware.host_share import RankHost, divide_host, this_host
from hytrain.kernels import host_limits
from hytrain.offload.threads import candidates

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


@pytest.mark.parametrize(
    ("hosts", "started_here", "cores"),
    [
        # Each of two launchers has started two; all four were found.
        ([on("a")] * 4, 2, [4] * 4),
        # Bound to cores, ranks keep them.
        ([on("a", range(4 * rank, 4 * rank + 4)) for rank in range(4)], 4, [4] * 4),
        # The first has eight for itself; four are shared by all three, the last one's are half its
        # own: 8 + 4/3, 4/3, 4/3 + 4.
        ([on("a", range(12)), on("a", range(8, 12)), on("a", range(8, 16))], 1, [9, 1, 5]),
    ],
    ids=["two launchers", "bound", "overlapping"],
)
def test_cores_are_divided_among_those_that_have_them(
    hosts: list[RankHost], started_here: int, cores: list[int]
) -> None:
    assert cores_of(hosts, started_here=started_here) == cores


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


# -- cpusets and quotas ------------------------------------------------------------------------


def _ranks(cores: int, ranks: int, *, bound: bool = False, quota: float | None = None) -> list[int]:
    """Each rank's cores on a machine of 64, in a cpuset."""
    own = [range(cores) for _ in range(ranks)]
    if bound:
        own = [range(rank * cores // ranks, (rank + 1) * cores // ranks) for rank in range(ranks)]
    quotas = {} if quota is None else {"job": quota}
    hosts = [replace(on("a", mine), quotas=quotas) for mine in own]
    return cores_of(hosts, num_cores=64, started_here=ranks)


@pytest.mark.parametrize("bound", [False, True], ids=["shared", "bound"])
@pytest.mark.parametrize(
    ("cores", "ranks"),
    [(c, r) for c in (2, 4, 6, 8, 16, 24, 48, 64) for r in (1, 2, 4, 8) if r <= c],
)
def test_the_ranks_of_a_cpuset_have_it_among_them(cores: int, ranks: int, bound: bool) -> None:
    """All that any may choose fits on the cores, and leaves one for the launching thread."""
    shares = _ranks(cores, ranks, bound=bound)
    assert sum(shares) <= cores
    assert min(shares) >= cores // ranks
    for share in shares:
        assert max(candidates(share)) <= (share if share <= 2 else share - 1)
        assert max(candidates(share)) >= min(share, 2) - (share > 2)


def test_a_quota_counts_and_not_the_cores_that_are_seen() -> None:
    assert _ranks(64, 1, quota=4.0) == [4]
    assert _ranks(64, 8, quota=16.0) == [2] * 8
    assert _ranks(64, 8, quota=4.0) == [1] * 8
    assert _ranks(8, 2, quota=64.0) == [4] * 2
    # Bound to its cores, a rank has its part of the time on these.
    assert _ranks(64, 4, bound=True, quota=24.0) == [6] * 4


def _group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_quotas_of_both_versions_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "own"
    own.write_text("3:cpu,cpuacct:/job\n0::/slice/job\n")
    monkeypatch.setattr(host_limits, "_OWN_CGROUPS", own)
    roots = (tmp_path / "two", ""), (tmp_path / "one", "cpu")
    monkeypatch.setattr(host_limits, "_CPU_ROOTS", roots)
    _group(tmp_path / "two/slice/job", cpu__max="max 100000")
    assert host_limits.cpu_quotas() == {}
    _group(tmp_path / "two/slice", cpu__max="450000 100000\n")
    _group(tmp_path / "one/job", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert list(host_limits.cpu_quotas().values()) == [4.5]
    _group(tmp_path / "one/job", cpu__cfs_quota_us="150000\n", cpu__cfs_period_us="100000\n")
    assert list(host_limits.cpu_quotas().values()) == [4.5, 1.5]
    _group(tmp_path / "one/job", cpu__cfs_quota_us="nonsense")
    assert list(host_limits.cpu_quotas().values()) == [4.5]


def test_a_pass_has_the_threads_that_it_is_given() -> None:
    """torchrun sets OMP_NUM_THREADS=1, which is torch's business and not the kernel's."""
    script = """
        import os
        import torch
        from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit
        torch.set_num_threads(1)
        n = 1 << 22
        p, m, v, g = (torch.ones(n) for _ in range(4))
        before = len(os.listdir("/proc/self/task"))
        commit(p, m, v, Gradient(g, 1.0, AdamHyper(lr=1e-3)), num_threads=5)
        print("THREADS", 1 + len(os.listdir("/proc/self/task")) - before)
    """
    ended = run_script(textwrap.dedent(script))
    assert "THREADS 5" in ended.stdout, ended.stdout + ended.stderr[-2000:]
