"""Pinned memory of activations follows the batches."""

from __future__ import annotations

import torch

from hytrain.kernels.host_memory import PAGE
from hytrain.layer_major.host_slots import HostSlots

KEPT_STEPS = 8


def _step(slots: HostSlots, sizes: list[int]) -> None:
    slots.begin_step()
    taken = [slots.take(size * PAGE) for size in sizes]
    for slot in taken:
        slot.cut([torch.empty(PAGE, dtype=torch.uint8)])[0].fill_(1)
        slots.give_back(slot)


def test_memory_of_a_larger_batch_is_given_back() -> None:
    slots = HostSlots(torch.device("cpu"))
    for _ in range(3):
        _step(slots, [100, 100, 100])
    assert slots.num_bytes == 300 * PAGE
    for _ in range(2 * KEPT_STEPS + 1):
        _step(slots, [10, 10])
    assert slots.num_bytes == 20 * PAGE
    slots.close()


def test_batches_that_alternate_keep_it() -> None:
    slots = HostSlots(torch.device("cpu"))
    _step(slots, [100, 100])
    first = {slot._memory.data_ptr() for slot in slots._free}
    for number in range(4 * KEPT_STEPS):
        _step(slots, [100, 100] if number % 5 == 0 else [10, 10])
        assert slots.num_bytes == 200 * PAGE
    assert {slot._memory.data_ptr() for slot in slots._free} == first
    slots.close()
