"""What memory there is, what the steps need of it, and the short calibrations at start."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.config import SolverConfig
from hytrain.hardware.gpu_memory import allocated_bytes, give_back_cached, usable_gpu_bytes
from hytrain.hardware.host_share import HostShare, NearCores
from hytrain.kernels import host_limits as host_room
from hytrain.offload import threads, update_arrays
from hytrain.placement import memory_probe
from hytrain.placement.calibration import gpu_seconds_per_parameter
from hytrain.placement.costs import LayerBytes
from hytrain.placement.memory_probe import MemoryProbe

GIB = 1 << 30
CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


# -- the host ----------------------------------------------------------------------------------


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Writes the files of a control group; the machine has 100 GiB left."""
    available = SimpleNamespace(available=100 * GIB)
    monkeypatch.setattr(host_room.psutil, "virtual_memory", lambda: available)

    hierarchies = {
        hierarchy.controller: hierarchy._replace(root=tmp_path / f"version{version}")
        for version, hierarchy in zip((2, 1), host_room._HIERARCHIES, strict=True)
    }

    def write(version: int, limit: str, usage: int, statistics: str, group: str = ".") -> str:
        hierarchy = hierarchies["" if version == 2 else "memory"]
        folder = hierarchy.root / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / hierarchy.limit).write_text(f"{limit}\n")
        (folder / hierarchy.usage).write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"{statistics}\n")
        return f"cgroup {folder.stat().st_dev}:{folder.stat().st_ino}"

    monkeypatch.setattr(host_room, "_HIERARCHIES", tuple(hierarchies.values()))
    monkeypatch.setattr(host_room, "_OWN_CGROUPS", tmp_path / "own")
    return write


def test_without_a_control_group_the_machine_counts(cgroup: Any) -> None:
    assert host_room.available_host_bytes() == 100 * GIB


def test_a_gpu_s_own_node_does_not_count(cgroup: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_room, "free_beside_no_cores", lambda: 95 * GIB)
    assert host_room.available_host_bytes() == 5 * GIB


def test_a_control_group_without_a_limit_does_not_count(cgroup: Any) -> None:
    cgroup(2, "max", 7 * GIB, "inactive_file 0")
    cgroup(1, str(2**63 - 4096), 7 * GIB, "total_inactive_file 0")
    assert host_room.available_host_bytes() == 100 * GIB


@pytest.mark.parametrize(
    ("version", "statistics"),
    [
        (2, "anon 1\nfile 8\ninactive_file {cache}\nactive_file 5"),
        (1, "inactive_file 3\ntotal_cache 4\ntotal_inactive_file {cache}"),
    ],
)
def test_cached_files_count_as_free(cgroup: Any, version: int, statistics: str) -> None:
    cgroup(version, str(40 * GIB), 35 * GIB, statistics.format(cache=20 * GIB))
    assert host_room.available_host_bytes() == 25 * GIB


def test_a_full_control_group_has_nothing_left(cgroup: Any) -> None:
    cgroup(2, str(40 * GIB), 41 * GIB, "")
    assert host_room.available_host_bytes() == 0


def test_the_machine_may_have_less_than_the_control_group_allows(cgroup: Any) -> None:
    cgroup(2, str(400 * GIB), GIB, "inactive_file 0")
    assert host_room.available_host_bytes() == 100 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_the_groups_around_the_own_one_count(cgroup: Any, tmp_path: Path, version: int) -> None:
    line = "0::/jobs/7/step" if version == 2 else "4:cpu:/other\n3:hugetlb,memory:/jobs/7/step"
    (tmp_path / "own").write_text(f"{line}\n")
    cgroup(version, "max" if version == 2 else str(2**63 - 4096), 0, "")
    job = cgroup(version, str(30 * GIB), 10 * GIB, "", group="jobs/7")
    step = cgroup(version, str(50 * GIB), 10 * GIB, "", group="jobs/7/step")
    cgroup(version, str(GIB), 0, "", group="jobs/8")
    pools = host_room.host_memory_pools()
    assert pools[job] == 20 * GIB
    assert pools[step] == 40 * GIB
    assert host_room.available_host_bytes() == 20 * GIB


def test_a_group_that_is_not_mounted_here_leaves_the_root(cgroup: Any, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/docker/1234\n")
    root = cgroup(2, str(40 * GIB), 30 * GIB, "")
    assert host_room.host_memory_pools() == {"machine": 100 * GIB, root: 10 * GIB}


# -- the budget --------------------------------------------------------------------------------

ALONE = HostShare(1, 1, {"machine": 1})
LAYERS = [LayerBytes(f"layer {index}", 1000) for index in range(4)]


def test_ranks_share_the_host_and_each_keeps_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_probe, "host_memory_pools", lambda: {"machine": 80 * GIB})
    limits = MemoryProbe(LAYERS, CPU).limits(
        SolverConfig(gpu_memory_reserve_bytes=5, host_memory_reserve_bytes=6),
        0,
        7 * GIB,
        HostShare(4, 1, {}),
    )
    assert limits.host == 27 * GIB
    assert (limits.gpu, limits.gpu_reserve, limits.host_reserve) == (None, 5, 6)
    assert limits.gpu_base_at == ()


def test_room_for_activations_is_left_until_they_have_taken_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = {"machine": 80 * GIB}
    monkeypatch.setattr(memory_probe, "host_memory_pools", lambda: left)
    probe, solver = MemoryProbe(LAYERS, CPU), SolverConfig(host_activation_bytes=30 * GIB)
    first = probe.limits(solver, 0, 0, ALONE)
    assert (first.host, first.host_base) == (80 * GIB, 30 * GIB)
    for taken, coming in ((0, 30), (20, 10), (50, 0)):
        left["machine"] = (40 - taken) * GIB  # and 40 of state
        now = probe.limits(solver, 0, 40 * GIB, ALONE, first.host)
        assert (now.host, now.host_base) == ((80 - taken) * GIB, coming * GIB)


@pytest.mark.parametrize(("host", "reserve"), [(10 * GIB, GIB), (1000 * GIB, 30 * GIB)])
def test_the_reserve_is_a_share_and_a_gib_at_least(
    monkeypatch: pytest.MonkeyPatch, host: int, reserve: int
) -> None:
    monkeypatch.setattr(memory_probe, "host_memory_pools", lambda: {"machine": host})
    limits = MemoryProbe(LAYERS, CPU).limits(SolverConfig(), 0, 0, ALONE)
    assert limits.host_reserve == reserve
    assert limits.gpu_reserve == GIB


class FakeAllocator:
    """What torch.cuda says of memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = 0
        self.peak = 0
        self.reserved = 0
        self.free, self.total, self.fraction = 0, 0, 1.0
        self.is_integrated = False
        for name, value in {
            "memory_stats_as_nested_dict": lambda _device: {
                "allocated_bytes": {"all": {"current": self.allocated, "peak": self.peak}}
            },
            "memory_reserved": lambda _device: self.reserved,
            "mem_get_info": lambda _device: (self.free, self.total),
            "get_per_process_memory_fraction": lambda _device: self.fraction,
            "get_device_properties": lambda _device: self,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    return FakeAllocator(monkeypatch)


@pytest.mark.parametrize("shares", [True, False])
def test_what_a_gpu_without_memory_of_its_own_has_is_the_hosts(
    shares: bool, allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DGX Spark with 60 GiB left, 50 of them free for the driver, 20 reserved by torch."""
    monkeypatch.setattr(memory_probe, "host_memory_pools", lambda: {"machine": 60 * GIB})
    allocator.is_integrated = shares
    allocator.free, allocator.total, allocator.reserved = 50 * GIB, 128 * GIB, 20 * GIB
    limits = MemoryProbe(LAYERS, GPU).limits(SolverConfig(), 0, 7 * GIB, ALONE)
    assert limits.shares_host is shares
    assert limits.host == (87 if shares else 67) * GIB
    assert limits.gpu == 70 * GIB


def test_usable_is_what_is_free_what_is_held_and_what_is_allowed(allocator: FakeAllocator) -> None:
    assert usable_gpu_bytes(CPU) is None
    allocator.free, allocator.total, allocator.reserved = 30, 100, 20
    assert usable_gpu_bytes(GPU) == 50  # others hold the rest
    allocator.fraction = 0.4
    assert usable_gpu_bytes(GPU) == 40


@pytest.mark.parametrize(("reserved", "is_near"), [(50, False), (60, False), (61, True)])
def test_cached_blocks_are_given_back_near_the_limit_only(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch, reserved: int, is_near: bool
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(1))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    allocator.total, allocator.reserved = 100, reserved
    allocator.free = 100 - reserved
    give_back_cached(GPU, 10)
    assert bool(given_back) is is_near
    give_back_cached(CPU, 1000)
    assert bool(given_back) is is_near


def probe_step(
    probe: MemoryProbe, allocator: FakeAllocator, at: list[int], begin: int, peak: int, k: int
) -> None:
    allocator.allocated = begin
    probe.begin_backward()
    for index in reversed(range(len(at))):
        allocator.allocated = at[index]
        probe.gradient(index, 2_000 * max(0, k - index), 0)
    allocator.peak = max(allocator.peak, peak)
    probe.end_step(k, 0)


def test_the_base_is_what_is_neither_state_nor_waiting_gradient(allocator: FakeAllocator) -> None:
    allocator.peak = 1000
    probe = MemoryProbe(LAYERS, GPU)
    assert probe.wanted
    state, gradient = 2 * 12_000, 2_000
    # Activations go as backward comes down; the gradients of the first two layers stay.
    activations = [100, 200, 300, 400]
    waiting = [2 * gradient, gradient, 0, 0]
    at = [state + a + g for a, g in zip(activations, waiting, strict=True)]
    probe_step(probe, allocator, at, begin=state + 500, peak=0, k=2)
    assert probe.base_at == (100, 200, 300, 500)
    assert probe.transient is None
    # The peak shows what was allocated and freed in between.
    probe_step(probe, allocator, at, begin=state + 500, peak=max(at) + 70, k=2)
    assert probe.base_at == (170, 270, 370, 570)
    assert probe.transient == 70
    # A step without every gradient tells nothing.
    probe.begin_backward()
    probe.gradient(3, 0, 0)
    probe.end_step(2, 0)
    assert probe.base_at == (170, 270, 370, 570)


def test_of_gradients_in_flight_the_base_has_those_that_every_placement_leaves_room(
    allocator: FakeAllocator,
) -> None:
    """A worker that is slower than backward had left more of them there."""
    probe = MemoryProbe(LAYERS, GPU, kept_in_flight=3_000)
    activations, in_flight = [100, 200, 300, 600], [8_000, 6_000, 4_000, 2_000]
    allocator.allocated = 1_000
    probe.begin_backward()
    for index in reversed(range(4)):
        allocator.allocated = activations[index] + in_flight[index]
        probe.gradient(index, 0, in_flight[index])
    allocator.peak = 8_100 + 70
    probe.end_step(0, 0)
    assert probe.transient == 70
    assert probe.base_at == (3_170, 3_270, 3_370, 2_670)
    # What the last layer's forward, with the loss, had left to its backward: 1000 - 600.
    assert probe.growth == 400


def test_state_on_its_way_out_is_no_base(allocator: FakeAllocator) -> None:
    probe = MemoryProbe(LAYERS, GPU)
    allocator.allocated = 24_000 + 7
    probe.begin_backward()
    for index in reversed(range(4)):
        probe.gradient(index, 2_000 * (index == 0), 0)
    probe.end_step(1, 12_000)
    assert probe.base_at == (0, 7, 7, 7)  # the first layer's is less than its own gradient


def test_limits_go_by_the_measured_base(allocator: FakeAllocator) -> None:
    allocator.free = allocator.total = 1000 * GIB
    probe = MemoryProbe(LAYERS, GPU)
    before = probe.limits(SolverConfig(host_memory_reserve_bytes=0), 12345, 0, ALONE)
    assert (before.gpu_base, before.gpu_base_at) == (12345, ())
    assert before.gpu_reserve == 40 * GIB
    probe_step(probe, allocator, [1, 2, 3, 4], begin=9, peak=0, k=0)
    after = probe.limits(SolverConfig(host_memory_reserve_bytes=0), 12345, 0, ALONE)
    assert (after.gpu_base, after.gpu_base_at) == (9, (1, 2, 3, 9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_allocated_bytes_are_torchs() -> None:
    """The short way to the allocator's numbers gives torch's own."""
    device = torch.device("cuda", torch.cuda.current_device())
    large = torch.empty(1 << 20, device=device)
    small = torch.empty(1 << 10, device=device)
    del large
    now, peak = allocated_bytes(device)
    assert now == torch.cuda.memory_allocated(device)
    assert peak == torch.cuda.max_memory_allocated(device)
    assert peak >= now + (4 << 20)
    assert now >= small.nbytes


# -- calibrations ------------------------------------------------------------------------------


def test_the_real_updates_are_timed() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert 1e-12 < gpu_seconds_per_parameter(CPU, dtype) < 1e-6
    assert 1e-11 < threads.measure_threads(1, 1).seconds_per_parameter < 1e-6


def timed_kernel(
    monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]
) -> tuple[list[int], dict[int, int]]:
    """The kernel takes so long with so many threads; the first run of each takes far longer."""
    now = [0.0]
    runs: dict[int, int] = {}
    order: list[int] = []

    def kernel(*_state: object, rounding: object, out: torch.Tensor, num_threads: int) -> None:
        del rounding
        runs[num_threads] = runs.get(num_threads, 0) + 1
        order.append(num_threads)
        now[0] += seconds[num_threads] * (1000.0 if runs[num_threads] == 1 else 1.0)

    monkeypatch.setattr(update_arrays, "commit_then_preview", kernel)
    monkeypatch.setattr(update_arrays, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(threads, "measured_elements", lambda *_, **__: 1 << 10)
    return order, runs


def test_the_fewest_threads_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    order, _ = timed_kernel(monkeypatch, {8: 1.05, 10: 1.02, 12: 1.0, 15: 1.01})
    choice = threads.measure_threads(16, None)
    assert choice.num_threads == 10
    assert choice.seconds_per_parameter == pytest.approx(1.02 / 1024)
    assert order[:4] == [8, 10, 12, 15]  # in turns: a slow moment hits them all


def test_a_given_count_is_timed_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, runs = timed_kernel(monkeypatch, {3: 2.0})
    assert threads.measure_threads(1, 3) == threads.ThreadChoice(3, 2.0 / 1024, candidates=(3,))
    assert set(runs) == {3}


@pytest.mark.parametrize(
    ("cores", "gib_left", "compares", "wanted"),
    [
        (16, 128, True, 3 * 300 * 2**20),  # beyond the caches: what is compared is memory's speed
        (8, 128, True, 3 * 150 * 2**20),  # a rank of two: its share
        (16, 8, True, 2**29),  # a sixteenth of what is left
        (16, 1, True, 2**28),
        (16, 128, False, 2**28),  # a first guess
    ],
)
def test_counts_are_compared_beyond_the_caches(
    cores: int, gib_left: int, compares: bool, wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "last_level_cache_bytes", lambda: 300 * 2**20)
    monkeypatch.setattr(threads, "available_host_bytes", lambda: gib_left * GIB)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: set(range(16)))
    elements = threads.measured_elements(cores, "fp32", compares=compares)
    if wanted == 2**28:
        assert elements == 2**24
    else:
        assert 0 <= wanted - 18 * elements < 18 * 64
    # Of moments in fewer bytes more elements.
    fewer = threads.measured_elements(cores, "8bit", compares=compares)
    assert fewer > elements if wanted > 2**28 else fewer == elements
    assert fewer % 64 == 0


@pytest.mark.parametrize("given", [None, 3])
@pytest.mark.parametrize("near", [None, NearCores(frozenset({0}), 1)])
def test_what_measuring_takes_is_known_before(
    near: NearCores | None, given: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a node of one core, which is all of its caches' share."""
    taken: list[int] = []
    timed_kernel(monkeypatch, dict.fromkeys((1, 3, 8, 10, 12, 15), 1.0))

    def elements(cores: int, _moments: str, *, compares: bool) -> int:
        return 1 << (8 + 2 * compares + (cores == 1))

    def take(_purpose: str, num_bytes: int) -> AbstractContextManager[None]:
        taken.append(num_bytes)
        return nullcontext()

    monkeypatch.setattr(threads, "measured_elements", elements)
    monkeypatch.setattr(threads, "taking_host_memory", take)
    host = HostShare(ranks=1, cores=16, pool_ranks={}, near=near, some_near=near is not None)
    alone = cast(ShardCollectives, SimpleNamespace(gather_objects=lambda one, _: [one]))
    for measured in (threads.choose_threads, threads._choose_near):
        measured.cache_clear()
    threads.place_threads(host, given, "bf16", alone, may_bind=True)
    for measured in (threads.choose_threads, threads._choose_near):
        measured.cache_clear()
    assert max(taken) == threads.measuring_bytes(host, given, "bf16", may_bind=True)


def test_only_counts_that_are_compared_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[bool] = []
    timed_kernel(monkeypatch, {3: 2.0, **dict.fromkeys((8, 10, 12, 15), 1.0)})
    monkeypatch.setattr(
        threads, "measured_elements", lambda *_, compares: sizes.append(compares) or 1 << 10
    )
    threads.measure_threads(16, None)
    threads.measure_threads(16, 3)
    threads.measure_threads(16, 3, compared=True)  # with those on another NUMA node
    assert sizes == [True, False, True]


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [2]), (4, [2, 3]), (16, [8, 10, 12, 15])]
)
def test_candidates_leave_a_core_free(cores: int, counts: list[int]) -> None:
    assert threads.candidates(cores) == counts
