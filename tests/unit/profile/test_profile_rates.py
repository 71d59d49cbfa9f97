"""What is measured of copies, the CPU's update and collectives is what was done in the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hytrain.formats.moment_kinds import MomentsName
from hytrain.kernels.cpu_adam import commit_then_preview
from hytrain.model.state_format import StateArrays
from hytrain.offload import update_arrays
from hytrain.offload.update_arrays import UpdateArrays
from hytrain.tools.profiler import copies, ranks, rates
from hytrain.tools.profiler.collective_profile import collective_samples, uneven_sizes
from hytrain.tools.profiler.copies import TrainingLoad
from hytrain.tools.profiler.ranks import Ranks

CPU = torch.device("cpu")
ALONE = Ranks(alone=True)


@pytest.mark.parametrize(
    ("cores", "counts"),
    [(1, [1]), (2, [1, 2]), (4, [1, 2, 3, 4]), (16, [1, 2, 4, 8, 10, 12, 15, 16])],
)
def test_thread_counts_go_up_to_the_cores(cores: int, counts: list[int]) -> None:
    assert rates.thread_counts(cores) == counts


class _Time:
    """A clock that the work moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        for module in (update_arrays, ranks):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def take(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("swept", [0.4, 2.0], ids=["as fast as updates", "in slow seconds"])
@pytest.mark.parametrize(("kind", "copied"), [("cpu", 0), ("cuda", 2)])
def test_rates_against_threads(
    monkeypatch: pytest.MonkeyPatch, kind: str, copied: int, swept: float
) -> None:
    """A loop that hit slow seconds does not say that memory moves less than updates have moved."""
    clock, threads = _Time(monkeypatch), threading.active_count()
    runs: list[tuple[str, int]] = []

    def update(*arrays: object, rounding: object, out: torch.Tensor, num_threads: int) -> None:
        runs.append(("update", num_threads))
        clock.take(0.8 / num_threads)

    def sweep(p: int, moments: object, n: int, num_threads: int) -> None:
        runs.append(("sweep", num_threads))
        clock.take(swept / num_threads)

    class Load(TrainingLoad):
        """What is beside an update makes it half as fast again."""

        def __init__(self, device: torch.device, num_bytes: int) -> None:
            assert device.type == kind
            super().__init__(CPU, num_bytes)

        def beside(self, run: Callable[[], float]) -> float:
            assert threading.active_count() == threads + 1
            taken = run()
            clock.take(0.5 * taken)
            return 1.5 * taken

    monkeypatch.setattr(rates, "TrainingLoad", Load)
    monkeypatch.setattr(update_arrays, "commit_then_preview", update)
    monkeypatch.setattr(update_arrays._C, "read_write", sweep)
    found = rates.cpu_rates(torch.device(kind), [1, 2, 4], 4, ALONE, seconds=1.0, elements=1024)
    assert found.updates == pytest.approx({1: 1280.0, 2: 2560.0, 4: 5120.0})
    assert found.in_training == pytest.approx({1: 1280.0 / 1.5, 2: 2560.0 / 1.5, 4: 5120.0 / 1.5})
    # 1024 parameters: 24 bytes of state each; an update moves 3 times 2 besides, its copies 2 each.
    loop, update_and_copies = 1024 * 24 / swept, 1024 * (30 + 2 * copied) / 1.2
    most = loop if swept == 0.4 else update_and_copies
    assert most == max(loop, update_and_copies)
    assert found.memory == pytest.approx({1: most, 2: 2 * most, 4: 4 * most})
    # Another host has a fourth count: this one measures its last once more, and meets it.
    assert runs.count(("update", 4)) >= 4 * 4
    assert runs.count(("update", 1)) == 2 * (1 + 3)  # one untimed; three, though the time is up


def test_the_median_counts_and_the_first_run_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Time(monkeypatch)
    durations = iter([9.0, 1.0, 5.0, 1.0, 1.0, 1.0, 1.0])

    def run() -> float:
        taken = next(durations)
        clock.take(taken)
        return taken

    assert ALONE.median_seconds(run, 8.0) == 1.0


def test_a_trainings_load() -> None:
    """A core is busy and all bytes are copied both ways, each time, and nothing is left behind."""
    before = threading.active_count()
    load = TrainingLoad(CPU, 3 * copies._LOAD_BYTES - 5)
    assert load._times == 3
    for number in (1, 2):
        for _, source in load.copies.ways:
            source.fill_(number)
        with load.launching():
            began = time.thread_time(), time.process_time()
            others, patience = 0.0, time.perf_counter() + 60.0  # of a busy machine
            while others <= 0.05 and time.perf_counter() < patience:
                time.sleep(0.01)
                others = time.process_time() - began[1] - (time.thread_time() - began[0])
            assert others > 0.05, "nothing runs beside"
            assert load.beside(lambda: 7.0) == 7.0
            assert all(int(target.min()) == number for target, _ in load.copies.ways)
        assert threading.active_count() == before


@pytest.mark.parametrize("world_size", [2, 3, 4, 7, 64])
@pytest.mark.parametrize("elements", [2048, 10**6])
def test_uneven_shards_differ_and_fit(world_size: int, elements: int) -> None:
    sizes = uneven_sizes(elements, world_size)
    assert len(sizes) == world_size
    assert min(sizes) > 0
    assert sizes[-1] >= 2 * sizes[0]
    assert 0.9 * elements <= sum(sizes) <= elements


def test_one_rank_has_no_collectives() -> None:
    assert collective_samples(CPU, ALONE) == ()


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_an_update_is_of_chunks_as_in_training(
    monkeypatch: pytest.MonkeyPatch, moments: MomentsName
) -> None:
    """One after the other they are all of it, in memory that a single pass would update alike."""
    sizes: list[int] = []

    def update(*arrays: Any, **options: Any) -> None:
        sizes.append(arrays[0].numel())
        commit_then_preview(*arrays, **options)

    monkeypatch.setattr(update_arrays, "commit_then_preview", update)
    gradients = torch.linspace(-1.0, 2.0, 3008, dtype=torch.bfloat16)
    ends: list[StateArrays] = []
    for most in (1 << 10, 1 << 20):
        arrays = UpdateArrays(3000, moments, most)
        for gradient in arrays.gradients:
            gradient.copy_(gradients)
        arrays.update(2)
        assert arrays.state.master.any()
        assert arrays.out.any()
        ends.append(arrays.state)
    assert sizes == [1024, 1024, 960, 3008]
    if moments == "fp32":  # random bits follow the place in a pass
        one, other = ends
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_as_many_elements_as_the_shard_has_and_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "available_host_bytes", lambda: 200 << 30)
    monkeypatch.setattr(rates, "last_level_cache_bytes", lambda: 300 << 20)
    beyond_caches, most = 4 * (300 << 20) // 12, (8 << 30) // 18
    assert rates.update_elements(1) == beyond_caches
    assert rates.update_elements(1, 370_000_000) == 370_000_000
    assert rates.update_elements(1, 950_000_000) == most
    assert rates.update_elements(4, 950_000_000) == (8 << 30) // (4 * 18)  # four ranks together
    monkeypatch.setattr(rates, "available_host_bytes", lambda: 1 << 30)
    assert rates.update_elements(1, 950_000_000) == int(0.3 * (1 << 30)) // 18
