"""Memory of the host: pinned, cut from one arena, and in slots of the right size."""

from __future__ import annotations

import ctypes
import gc
import io
import logging
import mmap
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hytrain.kernels.host_memory import PAGE
from hytrain.offload import pinning
from hytrain.offload.arena import Arena
from hytrain.offload.host_blocks import HostBlock, HostBlocks, block_bytes, is_dense
from hytrain.offload.slots import MAX_SPARES, MIN_SPARES, NUM_OUTGOING, RING_BYTES, plan_slots

# -- memory that cannot be pinned is used all the same -----------------------------------------

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


class Driver:
    """Registers so many mappings, and refuses all others."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.registered: list[int] = []

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        assert address % PAGE == length % PAGE == flags
        if len(self.registered) == self.most:
            return 2
        self.registered.append(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.registered.remove(address)
        return 0


def _nothing(*_arguments: object) -> None:
    """In place of what waits for a device."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(1)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "synchronize", _nothing)
    monkeypatch.setattr(pinning, "_warned", set())
    rates = iter([3e9, 25e9])
    plain = torch.zeros

    def zeros(*sizes: int, dtype: torch.dtype | None = None, **_elsewhere: object) -> torch.Tensor:
        return plain(*sizes, dtype=dtype)

    monkeypatch.setattr(pinning, "torch", SimpleNamespace(**{**vars(torch), "zeros": zeros}))

    def rate(here: torch.Tensor, host: torch.Tensor) -> float:
        del here, host
        return next(rates)

    monkeypatch.setattr(pinning, "copy_rate", rate)
    pinning.measured_loss.cache_clear()
    return driver


def test_warns_once_of_a_refusal_with_the_measured_loss(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        arenas = [Arena(PAGE, CUDA, purpose=f"part {number}") for number in range(4)]
    assert [arena.is_pinned for arena in arenas] == [True, False, False, False]
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "memory for part 1 failed (CUDA error 2)" in warning
    assert "3.0 GB/s measured, and 25.0 from pinned memory" in warning
    assert "for part 3 are not pinned" in caplog.messages[-1]
    for arena in arenas:
        ctypes.memset(arena.take(PAGE), 1, PAGE)  # it can be used
        arena.close()
    assert driver.registered == []


def test_large_mappings_are_registered_in_parts_or_not_at_all(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_MAX_REGISTER", 2 * PAGE)
    driver.most = 3
    first = Arena(6 * PAGE, CUDA)
    assert first.is_pinned
    assert len(driver.registered) == 3
    second = Arena(2 * PAGE, CUDA)
    assert not second.is_pinned
    first.close()
    third = Arena(8 * PAGE, CUDA)  # its fourth part is refused
    assert not third.is_pinned
    assert driver.registered == []


def test_what_is_taken_is_registered_then(driver: Driver) -> None:
    driver.most = 2
    arena = Arena(4 * PAGE, CUDA, as_taken=True)
    assert driver.registered == []
    addresses = [arena.take(10), arena.take(2 * PAGE)]
    assert driver.registered == addresses, "whole pages: none is registered twice"
    assert arena.is_pinned
    arena.close()
    assert driver.registered == []


@pytest.mark.parametrize("as_taken", [False, True])
def test_an_arena_that_is_left_to_the_collector_is_unregistered_first(
    driver: Driver, as_taken: bool
) -> None:
    """As a build that fails leaves it; the driver keeps pages that are unmapped before."""
    driver.most = 2
    arena = Arena(4 * PAGE, CUDA, as_taken=as_taken)
    taken = arena.take_tensor(PAGE)
    assert driver.registered == [taken.data_ptr()]
    taken.fill_(1)
    del arena
    gc.collect()
    assert driver.registered == []
    assert taken.sum() == PAGE, "who keeps a part keeps the memory"


def test_blocks_are_cut_to_the_layout_of_tensors() -> None:
    tensors = [
        torch.randn(3, 5).t(),
        torch.randn(7).bfloat16(),
        torch.randn(0),
        torch.randn(2, 3, 4).permute(2, 0, 1),
        torch.tensor(3.0),
    ]
    assert all(is_dense(tensor) for tensor in tensors)
    block = HostBlock(block_bytes(tensors), CPU, pin=True, purpose="a test")
    copies = block.cut(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    for copy, tensor in zip(copies, tensors, strict=True):
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.dtype == tensor.dtype
    block.close()
    del block
    assert torch.equal(copies[0], tensors[0])  # who keeps one keeps its memory


def test_what_is_cut_from_a_block_is_saved_by_itself() -> None:
    tensors = [torch.randn(64, 64).bfloat16(), torch.randn(5)]
    copies = HostBlock(block_bytes(tensors), CPU, pin=True, purpose="a test").cut(tensors)
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor)
    file = io.BytesIO()
    torch.save(copies, file)
    file.seek(0)
    for found, tensor in zip(torch.load(file), tensors, strict=True):
        assert torch.equal(found, tensor)
    assert [copy.untyped_storage().nbytes() for copy in copies] == [8192, 20]


def test_a_block_that_is_left_to_the_collector_is_unregistered_first(driver: Driver) -> None:
    """As slots are that were in use when their engine was destroyed."""
    block = HostBlock(PAGE, CUDA, pin=True, purpose="a test")
    (kept,) = block.cut([torch.zeros(PAGE, dtype=torch.uint8)])
    assert driver.registered == [kept.data_ptr()]
    del block
    gc.collect()
    assert driver.registered == []
    assert kept.fill_(1).sum() == PAGE, "who keeps a part keeps the memory"


def test_what_is_not_dense_is_known() -> None:
    base = torch.zeros(4, 6)
    overlapping = base.as_strided((2, 2), (1, 1))
    for tensor in (base[:, ::2], base[:, :3], base[0].expand(4, 6), overlapping):
        assert not is_dense(tensor)
    assert is_dense(base[1:3])


def test_pinned_blocks_are_used_again_and_others_given_back(driver: Driver) -> None:
    driver.most = 100
    blocks = HostBlocks(CUDA, "a test")
    large, small = [torch.zeros(40 * PAGE, dtype=torch.uint8)], [torch.zeros(3 * PAGE // 4)]
    for _ in range(50):
        blocks.take(large, pin=True)
        blocks.take(small, pin=True)
        blocks.give_back()
    assert len(driver.registered) == 2
    assert blocks.num_bytes == 43 * PAGE
    blocks.take(small, pin=False)
    assert len(driver.registered) == 2
    blocks.give_back()
    assert blocks.num_bytes == 43 * PAGE
    blocks.take([torch.zeros(20 * PAGE, dtype=torch.uint8)], pin=True)  # of another size
    assert blocks.num_bytes == 20 * PAGE
    blocks.close()
    blocks.close()
    assert driver.registered == []
    assert blocks.num_bytes == 0


# -- host memory of an exact size --------------------------------------------------------------


def test_takes_do_not_overlap_and_are_aligned() -> None:
    arena = Arena(1000, CPU)
    assert arena.num_bytes == mmap.PAGESIZE
    first, second = arena.take(100), arena.take(10)
    assert first % 64 == second % 64 == 0
    assert first + 100 <= second
    ctypes.memset(first, 1, 100)
    assert ctypes.string_at(second, 10) == bytes(10)
    assert not arena.is_pinned
    arena.close()


def test_more_than_it_has_is_refused() -> None:
    arena = Arena(mmap.PAGESIZE, CPU)
    arena.take(mmap.PAGESIZE)
    with pytest.raises(MemoryError, match="cannot give 1 more"):
        arena.take(1)
    arena.close()


def test_close_twice() -> None:
    arena = Arena(1, CPU)
    arena.close()
    arena.close()


def test_what_the_machine_has_not_is_a_clear_error() -> None:
    with pytest.raises(MemoryError, match=r'raise "hytrain\.gpu_fraction"'):
        Arena(1 << 60, CPU)


# -- pinned buffers ----------------------------------------------------------------------------

sizes = st.lists(st.integers(min_value=64, max_value=64 << 20), min_size=1, max_size=60)


def test_nothing_needs_nothing() -> None:
    plan = plan_slots([], [])
    assert (plan.classes, plan.pinned_bytes([])) == ((), 0)


@given(sizes)
def test_every_chunk_fits_its_class(gradient_bytes: list[int]) -> None:
    plan = plan_slots(gradient_bytes, gradient_bytes)
    assert len(plan.class_of_chunk) == len(gradient_bytes)
    for size, number in zip(gradient_bytes, plan.class_of_chunk, strict=True):
        assert size <= plan.classes[number].slot_bytes
    assert plan.outgoing_bytes == max(gradient_bytes)
    counts = plan.counts([True] * len(gradient_bytes))
    for number, slots in enumerate(plan.classes):
        members = plan.class_of_chunk.count(number)
        assert counts[number] == members + slots.spares
        assert MIN_SPARES <= slots.spares <= MAX_SPARES


@given(sizes, st.randoms(use_true_random=False))
def test_chunks_elsewhere_need_no_slots(gradient_bytes: list[int], rng: random.Random) -> None:
    plan = plan_slots(gradient_bytes, gradient_bytes)
    on_host = [rng.random() < 0.5 for _ in gradient_bytes]
    counts = plan.counts(on_host)
    for number, slots in enumerate(plan.classes):
        chunks = zip(plan.class_of_chunk, on_host, strict=True)
        members = sum(here for of, here in chunks if of == number)
        assert counts[number] == (members + slots.spares if members else 0)
    if any(on_host):
        outgoing = NUM_OUTGOING * plan.outgoing_bytes
        assert plan.pinned_bytes(on_host) == plan.slot_bytes(counts) + outgoing
    else:
        assert plan.pinned_bytes(on_host) == 0


def test_direct_commit_needs_the_ring_alone() -> None:
    plan = plan_slots([4 << 20] * 100, [4 << 20] * 100, keeps_pending=False)
    assert plan.counts([True] * 100) == [plan.classes[0].spares]


@given(sizes)
def test_waste_is_an_eighth_of_a_slot_but_for_small_ones(gradient_bytes: list[int]) -> None:
    plan = plan_slots(gradient_bytes, gradient_bytes)
    for size, number in zip(gradient_bytes, plan.class_of_chunk, strict=True):
        slot = plan.classes[number].slot_bytes
        assert slot - size <= max(slot // 8, 65536)


@given(sizes)
def test_the_ring_is_bounded(gradient_bytes: list[int]) -> None:
    plan = plan_slots(gradient_bytes, gradient_bytes)
    for slots in plan.classes:
        assert slots.spares * slots.slot_bytes <= max(RING_BYTES, MIN_SPARES * slots.slot_bytes)


def test_equal_chunks_share_one_class() -> None:
    plan = plan_slots([4 << 20] * 100, [4 << 20] * 100)
    assert plan.counts([True] * 100) == [100 + RING_BYTES // (4 << 20)]
