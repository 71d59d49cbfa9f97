"""Activations in host memory: the values come back, the device's memory goes, slots are reused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.engines import environment

from hytrain.errors import HyTrainError
from hytrain.layer_major.activations import (
    LEAVING,
    Kept,
    Offloaded,
    OffloadedActivations,
    ThreadCopyStream,
)
from hytrain.layer_major.graph_cut import NotLayerMajor
from hytrain.testing.faults import DELAYS_VARIABLE

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["", "5:3000"], ids=["at once", "delayed"])
def store(request: pytest.FixtureRequest) -> Iterator[OffloadedActivations]:
    with environment(DELAYS_VARIABLE, request.param):
        made = OffloadedActivations(torch.device("cpu"))
    yield made
    made.close()
    made.close()


def test_values_come_back_in_any_order(store: OffloadedActivations) -> None:
    shapes = [(3, 5), (7,), (2, 3, 4), (1, 1), (64, 64)]
    for _ in range(3):
        store.begin_step()
        tensors = [torch.randn(shape).to(torch.bfloat16) for shape in shapes]
        expected = [t.clone() for t in tensors]
        held = [store.put(t, is_boundary=True) for t in tensors]
        del tensors
        for index in (4, 0, 3, 1, 2):
            store.expect(held[index : index + 2])
            assert torch.equal(held[index].take(), expected[index])


def test_strides_are_kept(store: OffloadedActivations) -> None:
    turned = torch.randn(4, 6).t()
    held = store.put(turned, is_boundary=True)
    for _ in range(LEAVING + 1):
        store.put(torch.randn(2), is_boundary=True)
    back = held.take()
    assert back.stride() == turned.stride()
    assert back.data_ptr() != turned.data_ptr()
    assert torch.equal(back, turned)


def test_the_devices_memory_goes(store: OffloadedActivations) -> None:
    held = [store.put(torch.randn(1000), is_boundary=True) for _ in range(8)]
    here = [part for part in held if isinstance(part, Offloaded) and part.is_here]
    assert len(here) == LEAVING
    assert here == held[-LEAVING:]


def test_what_has_not_left_does_not_come_back(store: OffloadedActivations) -> None:
    tensor = torch.randn(10)
    held = store.put(tensor, is_boundary=True)
    assert held.take().data_ptr() == tensor.data_ptr()


def test_slots_are_used_again(store: OffloadedActivations) -> None:
    sizes: list[int] = []
    for step in range(4):
        store.begin_step()
        held = [
            store.put(torch.full((50_000,), float(i + step)), is_boundary=True) for i in range(6)
        ]
        for index in reversed(range(6)):
            assert float(held[index].take()[-1]) == index + step
        sizes.append(store.host_bytes)
    assert len(set(sizes)) == 1
    assert sizes[0] >= 6 * 200_000
    assert sizes[0] < 6 * (200_000 + 2 * 4096), "exact to a page"


def test_batches_that_change_in_size_leave_no_slots_behind(store: OffloadedActivations) -> None:
    for elements in (10_000, 20_000, 15_000, 40_000, 1_000):
        store.begin_step()
        held = [store.put(torch.randn(elements), is_boundary=True) for _ in range(4)]
        for part in held:
            part.take()
    assert store.host_bytes <= 4 * (160_000 + 4096)


def test_a_step_that_was_given_up_gives_its_slots_back(store: OffloadedActivations) -> None:
    for _ in range(3):
        store.begin_step()
        held = [store.put(torch.randn(10_000), is_boundary=True) for _ in range(4)]
        held[1].take()
        store.expect(held[2:3])
    assert store.host_bytes <= 4 * (40_000 + 4096)


def test_a_tensor_that_is_written_to_before_it_has_left_is_noticed(
    store: OffloadedActivations,
) -> None:
    tensor = torch.randn(10)
    held = store.put(tensor, is_boundary=True)
    tensor.add_(1.0)
    with pytest.raises(NotLayerMajor, match="in place"):
        held.take()


def test_what_is_no_boundary_stays(store: OffloadedActivations) -> None:
    side = torch.randn(10)
    assert isinstance(store.put(side, is_boundary=False), Kept)
    spread = torch.randn(10).expand(3, 10)
    held = store.put(spread, is_boundary=True)
    assert isinstance(held, Kept), "its memory is not its own"
    assert torch.equal(held.take(), spread)


def test_kept_activations_notice_writes() -> None:
    tensor = torch.randn(3)
    held = Kept(tensor)
    tensor.mul_(2.0)
    with pytest.raises(NotLayerMajor, match="in place"):
        held.take()


def test_a_copy_that_fails_is_raised_where_it_is_waited_for() -> None:
    lane = ThreadCopyStream()
    ticket = lane.copy(torch.zeros(3), torch.zeros(4), None)
    with pytest.raises(HyTrainError, match="copy of an activation failed"):
        ticket.wait()
    lane.close()
