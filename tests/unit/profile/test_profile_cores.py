"""Threads are right by themselves: simulated cpusets, launchers, quotas; and a real pass."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.processes import fresh_environment

from hytrain.hardware.host_share import RankHost, divide_host
from hytrain.kernels import host_limits
from hytrain.offload.threads import candidates


def _ranks(cores: int, ranks: int, *, bound: bool = False, quota: float | None = None) -> list[int]:
    """Each rank's cores on a machine of 64, in a cpuset."""
    own = [range(cores) for _ in range(ranks)]
    if bound:
        own = [range(rank * cores // ranks, (rank + 1) * cores // ranks) for rank in range(ranks)]
    quotas = {} if quota is None else {"job": quota}
    hosts = [RankHost("a", frozenset(mine), frozenset({"machine"}), quotas) for mine in own]
    return [
        divide_host(hosts, rank, started_here=ranks, num_cores=64).cores for rank in range(ranks)
    ]


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
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=fresh_environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert "THREADS 5" in ended.stdout, ended.stdout + ended.stderr[-2000:]
