"""`hytrain doctor`: what it says of machines that are not at hand, and of this one."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from hytrain.hardware.compile_locks import find_locks
from hytrain.hardware.host_tree import HostTree, NumaNode, ProcessLimits, parse_list
from hytrain.kernels import host_limits
from hytrain.kernels.host_limits import free_beside_no_cores, has_coherent_gpu
from hytrain.placement import measure
from hytrain.placement.measure import InitialRates
from hytrain.tools import cli
from hytrain.tools.doctor.findings import (
    Finding,
    NumaFacts,
    Rates,
    core_findings,
    lock_findings,
    memory_findings,
    numa_findings,
    rate_findings,
    version_findings,
)

GIB = 2**30
FREE = ProcessLimits(frozenset(range(64)), None, None, None)
RATES = Rates(16, 200e9, 6e9, 50e9, 50e9, None, 0.002, 2e9, "saves", 10**12)
VERSIONS = {"hytrain": "0.1.0", "torch": "2.11", "deepspeed": "0.19.8"}


def _machine(root: Path, *, nodes: int = 1, cores: int = 64, gib: int = 512) -> HostTree:
    """A machine's files."""
    each = cores // nodes
    files = {
        "sys/devices/system/cpu/online": f"0-{cores - 1}\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "proc/meminfo": f"MemTotal: {gib << 20} kB\nMemAvailable: {gib * 9 // 10 << 20} kB\n",
        "proc/self/cgroup": "0::/box/inner\n",
    }
    for node in range(nodes):
        folder = f"sys/devices/system/node/node{node}"
        files[f"{folder}/cpulist"] = f"{node * each}-{(node + 1) * each - 1}\n"
        files[f"{folder}/meminfo"] = f"Node {node} MemTotal: {gib // nodes << 20} kB\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return HostTree(root)


def _limit(root: Path, group: str, text: str) -> None:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(text + "\n")


def _by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


def test_memory_of_a_gpu_that_is_a_node_is_not_the_hosts(tmp_path: Path) -> None:
    """GH200: one node of 72 cores and 480 GiB, and the GPU's 96 GiB, which MemAvailable counts."""
    tree = _machine(tmp_path, cores=72, gib=576)
    gpu = tmp_path / "sys/devices/system/node/node1"
    gpu.mkdir()
    (gpu / "cpulist").write_text("\n")
    (gpu / "meminfo").write_text(f"Node 1 MemTotal: {96 << 20} kB\nNode 1 MemFree: {95 << 20} kB\n")
    assert [node.number for node in tree.numa_nodes()] == [0]
    assert free_beside_no_cores(tmp_path) == 95 * GIB
    (gpu / "meminfo").rename(tmp_path / "hidden")
    assert free_beside_no_cores(tmp_path) == 0  # what the kernel does not tell is not subtracted
    (tmp_path / "hidden").rename(gpu / "meminfo")
    [memory] = [f for f in memory_findings(tree, FREE, 1) if f.name == "memory"]
    assert memory.seen == f"{576 * 9 // 10 - 95}.0 of 576.0 GiB free"


def test_grace_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GB200: two Grace, four GPUs as nodes; a DGX Spark: one memory, no node without cores."""
    monkeypatch.setattr(host_limits.platform, "machine", lambda: "aarch64")
    spark = _machine(tmp_path / "spark", cores=20, gib=128)
    assert not has_coherent_gpu(spark.root)
    tree = _machine(tmp_path, nodes=2, cores=144, gib=960)
    for number in range(2, 6):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text("\n")
        (folder / "meminfo").write_text(f"Node {number} MemFree: {180 << 20} kB\n")
    assert [node.number for node in tree.numa_nodes()] == [0, 1]
    assert free_beside_no_cores(tmp_path) == 4 * 180 * GIB
    assert has_coherent_gpu(tmp_path)
    monkeypatch.setattr(host_limits.platform, "machine", lambda: "x86_64")
    assert not has_coherent_gpu(tmp_path)  # an extension of memory


def test_where_a_gpu_shares_the_hosts_memory_a_note_says_what_to_do() -> None:
    found = _by_name(list(rate_findings(replace(RATES, shares_memory=True))))["GPU memory"]
    assert found.verdict == "note"
    assert "gpu_fraction" in found.advice
    assert "GPU memory" not in _by_name(list(rate_findings(RATES)))


@pytest.mark.parametrize(("coherent", "rate"), [(False, 20e9), (True, 400e9)])
def test_copies_begin_at_the_rate_of_the_link(
    coherent: bool, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "has_coherent_gpu", lambda: coherent)
    assert InitialRates(1e-9, 1e-11).copy_seconds_per_byte == 1 / rate


def test_lists_of_the_kernel() -> None:
    assert parse_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_list("\n") == []


def test_a_server_is_as_it_should_be(tmp_path: Path) -> None:
    tree = _machine(tmp_path)
    findings = [
        *version_findings(VERSIONS, "avx512"),
        *core_findings(tree, FREE, 8),
        *numa_findings(tree, FREE, NumaFacts()),
        *memory_findings(tree, FREE, 8),
        *rate_findings(RATES),
    ]
    assert {finding.verdict for finding in findings} == {"good"}
    advice = _by_name(findings)["memory"].advice
    assert "billion parameters" in advice
    fp32, bf16, codes, _reserve = (float(word) for word in re.findall(r"\d+\.\d", advice))
    # 15, 11 and 9 1/32 bytes a parameter.
    assert bf16 / fp32 == pytest.approx(15 / 11, rel=0.01)
    assert codes / fp32 == pytest.approx(15 / 9.03125, rel=0.01)


@pytest.mark.parametrize(
    ("cores", "ranks", "verdict"),
    [(2, 1, "note"), (2, 2, "note"), (2, 4, "bad"), (16, 8, "note"), (64, 8, "good")],
)
def test_cpusets_and_ranks(cores: int, ranks: int, verdict: str, tmp_path: Path) -> None:
    limits = replace(FREE, usable_cores=frozenset(range(cores)), omp_threads="1")
    findings = _by_name(list(core_findings(_machine(tmp_path), limits, ranks)))
    assert findings["cores"].verdict == verdict
    assert findings["cores"].seen == f"{cores} of 64 usable"
    assert findings["OMP_NUM_THREADS"].verdict == "good"


def test_numa(tmp_path: Path) -> None:
    tree = _machine(tmp_path, nodes=2)
    assert tree.numa_nodes()[1] == NumaNode(1, list(range(32, 64)), 256 * GIB)
    bound = replace(FREE, usable_cores=frozenset(range(32, 40)))
    seen = [
        (FREE, NumaFacts((0, 1), {0: 1.0, 1: 0.99}), "good", "go to a node"),
        (FREE, NumaFacts((0, 1), {0: 1.0, 1: 0.2}), "note", "touched on node 1 lies elsewhere"),
        (FREE, NumaFacts((0, None)), "note", "not told"),
        (bound, NumaFacts((1, 1)), "good", ""),
        (bound, NumaFacts((0, 0)), "note", "none of the GPUs"),
        (bound, NumaFacts(), "good", ""),
    ]
    for limits, facts, verdict, words in seen:
        (finding,) = numa_findings(tree, limits, facts)
        assert finding.verdict == verdict
        assert words in finding.advice
    assert finding.seen == "2 nodes, this process on 1"


def test_a_machine_without_a_gpu_is_told_so() -> None:
    alone = _by_name(list(rate_findings(replace(RATES, to_host=None, to_device=None))))
    assert (alone["GPU"].seen, alone["GPU"].verdict) == ("none", "note")
    assert "GPU" not in _by_name(list(rate_findings(RATES)))


def test_limits_of_memory(tmp_path: Path) -> None:
    tree = _machine(tmp_path)
    _limit(tmp_path, "box", str(28 * GIB))
    _limit(tmp_path, "box/inner", "max")
    assert tree.cgroup_limits() == [28 * GIB]
    limits = replace(FREE, address_space=64 * GIB, locked_memory=8 * 2**20)
    findings = _by_name(list(memory_findings(tree, limits, 1)))
    # 28 GiB less the reserve of 1, over 12 bytes of state and 3 beside it.
    assert "at most 1.9 billion" in findings["memory"].advice
    for assumed in ("k = 0", "bf16 gradients", "reserve of 1.0 GiB", "come on top"):
        assert assumed in findings["memory"].advice
    assert findings["control group"].verdict == "note"
    assert findings["address space"].verdict == "bad"
    assert findings["locked memory"].seen == "8 MiB"
    old = tmp_path / "sys/fs/cgroup/memory/job"
    old.mkdir(parents=True)
    (old / "memory.limit_in_bytes").write_text(str(5 * GIB))
    (old.parent / "memory.limit_in_bytes").write_text(str(2**63 - 4096))
    (tmp_path / "proc/self/cgroup").write_text("9:memory:/job\n3:cpu:/\n")
    assert tree.cgroup_limits() == [5 * GIB]


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    tree = HostTree(tmp_path)
    findings = _by_name([*numa_findings(tree, FREE, NumaFacts()), *memory_findings(tree, FREE, 1)])
    assert findings["NUMA"].seen == "one node"
    assert findings["huge pages"].verdict == "note"


@pytest.mark.parametrize(
    ("change", "name", "verdict"),
    [
        ({"memory": 3e9, "adam": 9e7}, "memory bandwidth", "bad"),
        ({"adam": 2e9}, "Adam", "note"),
        ({"pinned": "invalid argument"}, "pinned memory", "bad"),
        ({"to_host": 3e9}, "GPU to host", "note"),
        ({"fsync_seconds": 0.4}, "fsync", "note"),
        ({"write": 5e7}, "disk", "note"),
    ],
)
def test_rates(change: dict, name: str, verdict: str) -> None:
    finding = _by_name(list(rate_findings(replace(RATES, **change))))[name]
    assert finding.verdict == verdict
    assert finding.advice


def test_versions() -> None:
    for release, verdict in (("0.18.1", "bad"), ("0.19.6", "bad"), ("0.19.7", "good")):
        findings = _by_name(list(version_findings({**VERSIONS, "deepspeed": release}, "scalar")))
        assert findings["deepspeed"].verdict == verdict
    assert findings["instruction set"].verdict == "note"
    assert _by_name(list(version_findings({}, "avx2")))["torch"].verdict == "bad"


def test_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "--folder", str(tmp_path), "--elements", "200000"]
    assert cli.main([*command, "--json"]) in (0, 1)
    findings = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert {"torch", "cores", "memory", "locked memory", "Adam", "fsync", "disk"} <= findings.keys()
    assert cli.main(command) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    assert "what to do" in lines[2]
    assert re.fullmatch(r"\d+ bad, \d+ to note, \d+ as they should be", lines[0])
    assert lines[0] not in lines[1:]
    assert "until a small file is on the disk" in " ".join(" ".join(lines).split())
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["doctor", "--folder", str(tmp_path / "none"), "--elements", "70000"]) == 2
    assert "--folder" in capsys.readouterr().err


def test_arrays_that_measure_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--elements", "5"]) == 2
    assert "--elements 5: give at least 65536" in capsys.readouterr().err


def test_a_lock_that_was_left_in_torchs_cache(tmp_path: Path) -> None:
    assert [each.verdict for each in lock_findings(find_locks(tmp_path))] == ["good"]
    old, new = tmp_path / "py311_cpu" / "shm" / "lock", tmp_path / "adam" / "lock"
    for path in (old, new):
        path.parent.mkdir(parents=True)
        path.touch()
    os.utime(old, (1e9, 1e9))
    bad, note = lock_findings(find_locks(tmp_path))
    assert (bad.verdict, note.verdict) == ("bad", "note")
    assert str(old) in bad.seen
    assert "delete it" in bad.advice
