"""Pinned buffers: enough of the right size, and little waste."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from hytrain.offload.slots import MAX_SPARES, MIN_SPARES, NUM_OUTGOING, RING_BYTES, plan_slots

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
