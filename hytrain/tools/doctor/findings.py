"""What a machine's facts mean for offloaded training; pure, so that any machine can be judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hytrain.formats.moment_kinds import FP32, MOMENTS, state_bytes_each
from hytrain.hardware.compile_locks import CompileLock
from hytrain.hardware.host_tree import HostTree, ProcessLimits
from hytrain.kernels.host_limits import free_beside_no_cores
from hytrain.placement.memory import host_reserve
from hytrain.version import DEEPSPEED, has_deepspeed_internals

Verdict = Literal["good", "note", "bad"]
_GIB = 2**30

_BESIDE_STATE_BYTES = 3
"""Bytes per parameter on the host: its waiting bf16 gradient, and 0.9 of buffers for copies."""
_SLOW_UNPIN_SECONDS = 0.01
_SLOW_FSYNC_SECONDS = 0.1
_FEW_GB_PER_S = 8.0
"""Memory is too slow if all cores read and write less than this: a laptop's has twice that."""
_LEAST_OF_MEMORY = 0.6
_MOST_IN_PLACE = 0.9
_SLOW_PINNED = 8.0
"""GB/s: half of what PCIe 3.0 carries."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        name: what was looked at.
        seen: what was found.
        verdict: "good", "note" (it costs something) or "bad" (it will fail or be far too slow).
        advice: what to do, or what it means; may be empty if it is good.
    """

    name: str
    seen: str
    verdict: Verdict
    advice: str = ""


def _judged(name: str, seen: str, is_poor: bool, advice: str, verdict: Verdict = "note") -> Finding:
    """A finding that is good, and then without advice, unless it is poor."""
    return Finding(name, seen, verdict, advice) if is_poor else Finding(name, seen, "good")


def version_findings(versions: Mapping[str, str | None], isa: str) -> Iterator[Finding]:
    """What is installed, and the kernel's instruction set."""
    for name in ("hytrain", "torch", "deepspeed"):
        version = versions.get(name)
        if version is None:
            yield Finding(name, "not installed", "bad", f"pip install {name}")
        else:
            is_other = name == "deepspeed" and not has_deepspeed_internals(version)
            advice = f"this release works with others: pip install '{DEEPSPEED}'"
            yield _judged(name, version, is_other, advice, "bad")
    advice = "the CPU has neither AVX-512 nor AVX2 (or HYTRAIN_CPU_ISA forbids it): updates "
    yield _judged("instruction set", isa, isa == "scalar", advice + "are several times slower")


def lock_findings(locks: Sequence[CompileLock]) -> Iterator[Finding]:
    """Locks in torch's extension cache, for which a start waits without a word."""
    for lock in locks:
        seen = f"{lock.path}, {lock.seconds / 60:.0f} minutes old"
        if lock.is_stale:
            advice = "its owner was killed: delete it, or starts that compile wait for ever"
            yield Finding("compile lock", seen, "bad", advice)
        else:
            yield Finding("compile lock", seen, "note", "starts wait while another one compiles")
    if not locks:
        yield Finding("compile lock", "none", "good")


def core_findings(tree: HostTree, limits: ProcessLimits, ranks: int) -> Iterator[Finding]:
    """Cores and threads.

    Args:
        tree: the host's.
        limits: those of this process.
        ranks: processes that will train on this host.
    """
    usable, everywhere = len(limits.usable_cores), tree.cores()
    seen = f"{usable} of {everywhere} usable"
    each = usable / ranks
    if each < 2:
        advice = f"{ranks} ranks share {usable} cores: give each 2 or more (a cpuset, "
        advice += "taskset or a container's limit takes the others), or start fewer ranks"
        yield Finding("cores", seen, "bad" if each < 1 else "note", advice)
    elif usable < everywhere:
        advice = "a cpuset or taskset limits this process; the threads of updates follow it"
        yield Finding("cores", seen, "note", advice)
    else:
        yield Finding("cores", seen, "good")
    text = limits.omp_threads or "not set"
    advice = "launchers set it for torch's own threads; hytrain's updates choose theirs "
    advice += "(offload.cpu_threads)"
    yield _judged("OMP_NUM_THREADS", text, text == "1", advice, "good")


@dataclass(frozen=True, slots=True)
class NumaFacts:
    """What was found about a host's NUMA nodes.

    Attributes:
        gpu_nodes: each GPU's node; None: the kernel does not tell.
        placed: for each node that this process can run on, the share of the memory touched there
            that lies there; empty: not known.
    """

    gpu_nodes: Sequence[int | None] = ()
    placed: Mapping[int, float] = field(default_factory=dict[int, float])


def numa_findings(tree: HostTree, limits: ProcessLimits, facts: NumaFacts) -> Iterator[Finding]:
    """Whether updates run, and have their memory, near the GPUs."""
    nodes = tree.numa_nodes()
    if len(nodes) < 2:
        yield Finding("NUMA", "one node", "good")
        return
    mine = [node.number for node in nodes if limits.usable_cores & set(node.cores)]
    seen = f"{len(nodes)} nodes, this process on {', '.join(map(str, mine))}"
    known = [str(node) for node in facts.gpu_nodes if node is not None]
    if known:
        seen += f", GPUs on {', '.join(known)}"
    astray = [node for node, share in facts.placed.items() if share < _MOST_IN_PLACE]
    if astray:
        advice = f"memory touched on node {astray[0]} lies elsewhere: a policy of the process "
        advice += "(numactl --membind, --interleave) holds, or the node is full"
        yield Finding("NUMA", seen, "note", advice)
    elif len(mine) > 1 and len(known) == len(facts.gpu_nodes):
        advice = "each rank's updates and their memory go to a node, its GPU's if it can be "
        yield Finding("NUMA", seen, "good", advice + "(offload.numa)")
    elif len(mine) > 1:
        advice = "the GPUs' nodes are not told: ranks are dealt out to the nodes; who knows better "
        advice += "binds them (numactl --cpunodebind=N)"
        yield Finding("NUMA", seen, "note", advice)
    elif known and str(mine[0]) not in known:
        advice = "this process is bound to a node that has none of the GPUs: copies and updates "
        advice += "cross the nodes' link; bind it to its GPU's, or not at all"
        yield Finding("NUMA", seen, "note", advice)
    else:
        yield Finding("NUMA", seen, "good")


def memory_findings(tree: HostTree, limits: ProcessLimits, ranks: int) -> Iterator[Finding]:
    """How much host memory there is, and what limits it."""
    memory = tree.memory()
    total = memory.get("MemTotal", 0)
    available = memory.get("MemAvailable", 0) - free_beside_no_cores(tree.root)
    cgroup = min(tree.cgroup_limits(), default=None)
    bounds = {"the machine's free memory": available}
    if cgroup is not None:
        bounds["the control group's limit"] = cgroup
    if limits.address_space is not None:
        bounds["ulimit -v, of each process"] = limits.address_space * ranks
    tightest = min(bounds.values())
    seen = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    yield Finding(
        "memory", seen, "good" if available > 0.5 * total else "note", _holds(tightest, ranks)
    )
    if cgroup is not None:
        advice = f"less than the machine has: raise the container's limit; {_holds(cgroup, ranks)}"
        yield _judged("control group", f"{cgroup / _GIB:.1f} GiB", cgroup < 0.9 * total, advice)
    if limits.address_space is not None:
        advice = "ulimit -v counts what is mapped, not what is used: set it to unlimited"
        seen = f"{limits.address_space / _GIB:.1f} GiB"
        yield Finding("address space", seen, "bad", advice)
    yield _memlock(limits)
    yield _huge_pages(tree)


def _holds(num_bytes: int, ranks: int) -> str:
    reserve = ranks * host_reserve(None, num_bytes // ranks)
    room = max(0, num_bytes - reserve)
    of = {
        kind: f"{room / (state_bytes_each(kind) + _BESIDE_STATE_BYTES) / 1e9:.1f}"
        for kind in MOMENTS
    }
    fewer = ", ".join(f'{of[kind]} with "moments": "{kind}"' for kind in MOMENTS if kind != FP32)
    return (
        f"at most {of[FP32]} billion parameters ({fewer}), all ranks together: with all state on "
        f"the host (k = 0), bf16 gradients and a reserve of {reserve / _GIB:.1f} GiB; the script's "
        "own memory, weights loaded on the host and data loading come on top"
    )


def _memlock(limits: ProcessLimits) -> Finding:
    if limits.locked_memory is None:
        return Finding("locked memory", "unlimited", "good")
    seen = f"{limits.locked_memory / 2**20:.0f} MiB"
    advice = "CUDA's own pinning does not count here; where it fails, set ulimit -l unlimited "
    return Finding("locked memory", seen, "note", advice + "(docker: --ulimit memlock=-1)")


def _huge_pages(tree: HostTree) -> Finding:
    mode = tree.huge_pages()
    advice = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled: updates miss the TLB less"
    return _judged("huge pages", mode or "unknown", mode not in ("always", "madvise"), advice)


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates; None: could not be measured.

    Attributes:
        threads: those of the next two.
        memory: bytes/s that the host's memory moved.
        adam: parameters/s of an update.
        to_host, to_device: bytes/s of pinned copies.
        pinned: why nothing could be pinned; None: it could, or there is no GPU.
        fsync_seconds: median time of a small file's fsync.
        write: bytes/s of writing a file, with its fsync.
        folder: where files were written.
        free_bytes: free space of its disk.
        unpin_seconds: time to give 64 MiB of pinned memory back, with the GPU idle.
        shares_memory: whether the GPU has no memory of its own.
    """

    threads: int
    memory: float
    adam: float
    to_host: float | None
    to_device: float | None
    pinned: str | None
    fsync_seconds: float
    write: float
    folder: str
    free_bytes: int
    unpin_seconds: float | None = None
    shares_memory: bool = False


def rate_findings(rates: Rates) -> Iterator[Finding]:
    """What measured rates mean."""
    moved = rates.memory / 1e9
    seen = f"{moved:.1f} GB/s with {rates.threads} thread{'s' * (rates.threads > 1)}"
    advice = "far below any server's: other work on the machine, one memory channel, or far NUMA"
    yield _judged("memory bandwidth", seen, moved < _FEW_GB_PER_S, advice, "bad")
    adam = rates.adam * 30
    seen = f"{rates.adam / 1e9:.2f} G parameters/s ({adam / 1e9:.1f} GB/s)"
    if adam < _LEAST_OF_MEMORY * rates.memory:
        advice = "well below the memory's own rate: `hytrain bench kernel` tells more"
        yield Finding("Adam", seen, "note", advice)
    else:
        each = 1e9 / rates.adam
        yield Finding("Adam", seen, "good", f"{each:.2f} s for each billion parameters on the CPU")
    if rates.pinned is None and rates.to_host is None:
        yield Finding("GPU", "none", "note", "training runs on the CPU alone, which is for tests")
    if rates.shares_memory:
        advice = "state on the host saves no memory: set gpu_fraction to 1.0; training runs anyway"
        yield Finding("GPU memory", "the host's (integrated GPU)", "note", advice)
    if rates.pinned is not None:
        advice = "copies are staged, and several times slower: ulimit -l unlimited, more memory"
        yield Finding("pinned memory", rates.pinned, "bad", advice)
    for name, rate in (("GPU to host", rates.to_host), ("host to GPU", rates.to_device)):
        if rate is not None:
            advice = "a slot with few PCIe lanes, a virtual machine, or the far NUMA node's GPU"
            seen = f"{rate / 1e9:.1f} GB/s pinned"
            yield _judged(name, seen, rate < _SLOW_PINNED * 1e9, advice)
    if rates.unpin_seconds is not None:
        advice = "a step in 16 waits that long, and for work of the GPU, after layers left the host"
        is_slow = rates.unpin_seconds > _SLOW_UNPIN_SECONDS
        seen = f"{rates.unpin_seconds * 1e3:.1f} ms for 64 MiB"
        yield Finding("pinned memory given back", seen, "note" if is_slow else "good", advice)
    seen = f"{rates.fsync_seconds * 1e3:.1f} ms a file in {rates.folder}"
    advice = "a checkpoint syncs four files a parameter, eight at a time: save elsewhere, or "
    advice += 'set "hytrain.checkpoint.async"'
    yield _judged("fsync", seen, rates.fsync_seconds > _SLOW_FSYNC_SECONDS, advice)
    each = 14e9 / rates.write
    seen = f"{rates.write / 1e9:.2f} GB/s, {rates.free_bytes / 1e9:.0f} GB free"
    advice = f"a checkpoint of a billion parameters takes {each:.0f} s and 14 GB, twice while saved"
    yield Finding("disk", seen, "note" if each > 60 else "good", advice)
