"""Pinned memory follows what is needed; host state goes when it goes."""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import random
from typing import Any

import pytest
import torch

from hytrain.kernels import host_memory
from hytrain.kernels.host_memory import PAGE, host_zeros
from hytrain.offload import arena
from hytrain.offload import pinned as pinned_module
from hytrain.offload.arena import Arena
from hytrain.offload.pinned import PinnedMemory
from hytrain.offload.slots import NUM_OUTGOING, SlotPlan, plan_slots

CPU = torch.device("cpu")
MIB = 1 << 20
GRADIENTS = [4 * MIB] * 6 + [MIB] * 4 + [1000] * 2
NUM = len(GRADIENTS)
SIZES = [slots.slot_bytes for slots in plan_slots(GRADIENTS, [2 * MIB] * NUM).classes]


class FakeWorker:
    """Keeps what it is given."""

    outgoing = -1

    def __init__(self) -> None:
        self.slots: dict[int, int] = {}
        self.ranges: list[tuple[int, int]] = []
        self.busy: set[int] = set()
        """Where retired slots begin that are still used."""

    def retire_slots(self, number: int, base: int, num_bytes: int) -> None:
        (begin, end), *others = [r for r in self.ranges if base <= r[0] < base + num_bytes]
        assert not others
        self.ranges.remove((begin, end))
        self.slots[number] -= (end - begin) // SIZES[number]
        self.busy.add(base)

    def is_retiring(self, base: int) -> bool:
        return base in self.busy

    def add_slots(self, number: int, base: int, size: int, count: int) -> None:
        self.slots[number] = self.slots.get(number, 0) + count
        self.ranges.append((base, base + size * count))


def make(*, keeps_pending: bool = True) -> tuple[SlotPlan, PinnedMemory, Any]:
    plan = plan_slots(GRADIENTS, [2 * MIB] * NUM, keeps_pending=keeps_pending)
    return plan, PinnedMemory(plan, 3, CPU), FakeWorker()


def test_nothing_on_the_host_takes_nothing() -> None:
    _, pinned, worker = make()
    before = pinned.num_bytes
    pinned.grow(worker, [False] * NUM)
    assert worker.slots == {}
    assert pinned.num_bytes == before == PAGE
    pinned.close()


@pytest.mark.parametrize("keeps_pending", [True, False])
def test_it_grows_with_what_comes_and_is_used_again(keeps_pending: bool) -> None:
    plan, pinned, worker = make(keeps_pending=keeps_pending)
    rng = random.Random(1)
    most = [0] * len(plan.classes)
    arenas = len(pinned._arenas)
    for _ in range(200):
        here = [rng.random() < 0.4 for _ in range(NUM)]
        before = pinned.num_bytes
        pinned.grow(worker, here)
        needed = plan.counts(here)
        grows = any(n > m for n, m in zip(needed, most, strict=True)) or (
            any(here) and before == PAGE
        )
        assert grows == (pinned.num_bytes > before)
        most = [max(n, m) for n, m in zip(needed, most, strict=True)]
        assert [worker.slots.get(c, 0) for c in range(len(most))] == most
    assert worker.slots[worker.outgoing] == NUM_OUTGOING
    # Once everything has been here it is enough for ever.
    pinned.grow(worker, [True] * NUM)
    enough = pinned.num_bytes
    for _ in range(50):
        pinned.grow(worker, [rng.random() < 0.5 for _ in range(NUM)])
    assert pinned.num_bytes == enough
    assert len(pinned._arenas) < arenas + 20
    ranges = sorted(worker.ranges)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))
    pinned.close()
    pinned.close()
    assert all(part._mapping is None for part in pinned._arenas)


@pytest.mark.parametrize("part", [MIB, 64 * MIB])
def test_it_shrinks_when_the_worker_has_let_go(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinned_module, "_ARENA_BYTES", part)
    plan, pinned, worker = make()
    rng = random.Random(2)
    for share in (1.0, *(rng.random() for _ in range(60)), 0.0):
        here = [rng.random() < share for _ in range(NUM)]
        pinned.grow(worker, here)
        before = pinned.num_bytes
        going = pinned.retire(worker, here)
        for number, needed in enumerate(plan.counts(here)):
            found = worker.slots.get(number, 0)
            assert needed <= found
            # What is more shares its part with what is needed.
            assert (found - needed) * SIZES[number] < max(part, SIZES[number])
        pinned.release(worker)
        assert pinned.num_bytes == before  # the worker uses all of it
        closed = 0
        while pinned.is_retiring:
            worker.busy.discard(rng.choice(sorted(worker.busy)))
            pinned.release(worker)
            closed += 1
        assert pinned.num_bytes == before - going
        assert not closed or going
    assert set(worker.slots.values()) == {0, NUM_OUTGOING}
    assert pinned.num_bytes == PAGE + NUM_OUTGOING * 2 * MIB
    pinned.close()


def test_memory_that_cannot_be_had_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, pinned, worker = make()
    pinned.grow(worker, [i < 2 for i in range(NUM)])
    before, slots = pinned.num_bytes, dict(worker.slots)

    def refuse(_num_bytes: int, **_named: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(arena, "map_anonymous", refuse)
        with pytest.raises(MemoryError, match=r"no memory of \d+\.\d MiB for pinned gradients"):
            pinned.grow(worker, [True] * NUM)
    assert (pinned.num_bytes, worker.slots) == (before, slots)
    pinned.grow(worker, [True] * NUM)
    assert pinned.num_bytes > before
    pinned.close()


def test_norms_lie_apart() -> None:
    _, pinned, _ = make()
    addresses = [pinned.take_norm() for _ in range(3)]
    assert [b - a for a, b in itertools.pairwise(addresses)] == [64, 64]
    pinned.close()


# -- pageable ----------------------------------------------------------------------------------


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * PAGE


def test_host_state_is_zero_and_its_memory_goes_with_it() -> None:
    before = resident_bytes()
    tensor = host_zeros(16 * MIB)
    assert tensor.dtype == torch.float32
    assert tensor.shape == (16 * MIB,)
    assert resident_bytes() - before < 8 * MIB  # nobody has touched it
    assert tensor.min() == tensor.max() == 0.0  # any() would take memory, which the heap may keep
    tensor.fill_(1.0)
    assert resident_bytes() - before > 60 * MIB
    part = tensor.split(4 * MIB)[1]
    del tensor
    assert part.sum() == 4 * MIB  # a part keeps the whole
    assert resident_bytes() - before > 60 * MIB
    del part
    assert resident_bytes() - before < 8 * MIB


@pytest.mark.parametrize("numel", [0, 1, PAGE // 4 + 1])
def test_host_state_of_any_size(numel: int) -> None:
    tensor = host_zeros(numel)
    assert tensor.shape == (numel,)
    tensor += 1.0
    assert tensor.sum() == numel


def test_host_state_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_num_bytes: int, **_named: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_memory, "map_anonymous", refuse)
    with pytest.raises(MemoryError, match=r"no memory of 256\.0 MiB for optimizer state"):
        host_zeros(64 * MIB)


def test_forked_children_get_what_users_may_have() -> None:
    kept, given = host_zeros(PAGE), host_zeros(PAGE, inherited=True)
    kept.fill_(2.0)
    given.fill_(3.0)
    for tensor, ended in ((given, 3), (kept, -11)):
        child = os.fork()
        if child == 0:
            # Without torch's threads, which it has not; a segmentation fault for the other one,
            # which nobody needs to read of.
            faulthandler.disable()
            os._exit(int(ctypes.c_float.from_address(tensor.data_ptr() + 4096).value))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ended


def test_a_kernel_that_knows_no_advice_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.mmap, "MADV_HUGEPAGE", 12345)
    mapping = host_memory.map_anonymous(PAGE)
    assert mapping[:4] == bytes(4)
    mapping.close()


def test_an_arena_is_there_at_once_and_goes_back() -> None:
    """A build takes what was said of it, whether its memory is pinned or not."""
    before = resident_bytes()
    block = Arena(64 * MIB, CPU)
    assert resident_bytes() - before > 60 * MIB
    block.close()
    assert resident_bytes() - before < 8 * MIB
