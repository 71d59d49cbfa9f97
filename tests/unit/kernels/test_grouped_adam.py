"""Updates of many segments in one launch: bitwise what one launch for each of them gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import INTERPRETED, NEEDS_CUDA

from hytrain.kernels import grouped_adam
from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.kernels.device_adam import adam_constants, cuda_adam, device_adam
from hytrain.kernels.grouped_adam import GroupedAdam, Segment

DEVICES = [
    "cpu",
    pytest.param("interpreter", marks=INTERPRETED),
    pytest.param("cuda", marks=[pytest.mark.gpu, NEEDS_CUDA]),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HYPERS = (
    AdamHyper(lr=1e-3, weight_decay=0.1, step=3),
    AdamHyper(lr=1e-2, beta1=0.8, weight_decay=0.05, step=3, decoupled_decay=False, eps=1e-6),
)
# Of the gradients; a multiple of 64 as layers have them, and tails of all kinds.
EVEN = (64, 2048, 4160, 6464)
ODD = (1, 2047, 4099, 37)
GAP = 7.0


@dataclass
class Layer:
    """A layer's arrays, whole; segments are parts of them."""

    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor
    gradient: torch.Tensor

    def part(self, begin: int, end: int) -> tuple[torch.Tensor, ...]:
        return tuple(t[begin:end] for t in (self.p, self.m, self.v, self.weights, self.gradient))

    def arrays(self) -> list[torch.Tensor]:
        return [self.p, self.m, self.v, self.weights]


def make_layer(
    n: int, seed: int, gradient: torch.dtype, weights: torch.dtype, device: str, shift: int = 0
) -> Layer:
    """Random arrays; ``shift``: each begins so many elements behind an aligned address."""
    generator = torch.Generator().manual_seed(seed)
    p, m, g = (torch.randn(n + shift, generator=generator) for _ in range(3))
    v = torch.rand(n + shift, generator=generator) * 0.01
    w = torch.full((n + shift,), GAP, dtype=weights)
    home = "cuda" if device == "cuda" else "cpu"
    return Layer(*(t.to(home)[shift:] for t in (p, m * 0.1, v, w, g.to(gradient))))


def segments_of(layers: list[Layer], cuts: list[int]) -> list[Segment]:
    """Two of each layer, one a parameter group; the layer's last element is in none."""
    found: list[Segment] = []
    for number, (layer, cut) in enumerate(zip(layers, cuts, strict=True)):
        for group, (begin, end) in enumerate(((0, cut), (cut, layer.p.numel() - 1))):
            if begin < end:
                p, m, v, weights, _ = layer.part(begin, end)
                found.append(Segment(p, m, v, weights, number, begin, group))
    return found


def update_each(layers: list[Layer], segments: list[Segment], outcome: Any, device: str) -> None:
    """One launch for each segment, as for a layer that is updated alone."""
    for each in segments:
        n = each.p.numel()
        gradient = layers[each.gradient].gradient[each.first : each.first + n]
        arrays = (each.p, each.m, each.v, gradient, each.weights)
        if device == "interpreter":
            cuda_adam(*arrays, outcome, HYPERS[each.group], None)
        else:
            device_adam(*arrays, outcome, HYPERS[each.group])


def update_together(
    grouped: GroupedAdam,
    layers: list[Layer],
    outcome: Any,
    device: str,
    *,
    leaves_room: bool = False,
) -> None:
    grouped.begin_step([layer.gradient for layer in layers], HYPERS)
    for number in range(len(grouped.aligned)):
        if device == "interpreter":
            grouped.triton_launch(number, outcome, leaves_room=leaves_room)
        else:
            grouped.launch(number, outcome, leaves_room=leaves_room)


def assert_same(actual: list[Layer], expected: list[Layer]) -> None:
    for one, other in zip(actual, expected, strict=True):
        for array, twin in zip(one.arrays(), other.arrays(), strict=True):
            assert torch.equal(array, twin)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gradient", DTYPES, ids=str)
@pytest.mark.parametrize("weights", DTYPES, ids=str)
@pytest.mark.parametrize(("sizes", "shift"), [(EVEN, 0), (EVEN, 3), (ODD, 0), (ODD, 1)])
def test_a_group_is_bitwise_its_segments(
    sizes: tuple[int, ...], shift: int, weights: torch.dtype, gradient: torch.dtype, device: str
) -> None:
    """Aligned or not, two parameter groups, other gradients every step; one step is skipped."""
    actual, expected = (
        [make_layer(n + 1, k, gradient, weights, device, shift) for k, n in enumerate(sizes)]
        for _ in range(2)
    )
    cuts = [n // 128 * 64 for n in sizes]
    ours, theirs = segments_of(actual, cuts), segments_of(expected, cuts)
    home = actual[0].p.device
    grouped = GroupedAdam([ours[:3], ours[3:]], [gradient] * len(sizes), 2, home)
    for step, skip in enumerate((0.0, 1.0, 0.0, 0.0)):
        before = [layer.p.clone() for layer in actual]
        outcome = torch.tensor([0.37, skip], device=home)
        for layers in (actual, expected):
            for k, layer in enumerate(layers):  # in other memory
                n = layer.p.numel()
                new = make_layer(n, 100 * step + k, gradient, weights, device, shift)
                layer.gradient = new.gradient
        update_together(grouped, actual, outcome, device)
        update_each(expected, theirs, outcome, device)
        assert_same(actual, expected)
        for layer, old in zip(actual, before, strict=True):
            assert torch.equal(layer.p[:-1], old[:-1]) == bool(skip)
            assert torch.equal(layer.p[-1:], old[-1:])  # in no segment
            assert float(layer.weights[-1]) == GAP


@pytest.mark.parametrize("device", DEVICES)
def test_launches_of_several_dtypes_and_many_rows(device: str) -> None:
    """More rows than the smallest table has, and each launch with dtypes of its own."""
    kinds = [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)]
    dtypes = [kinds[k >= 20] for k in range(24)]
    actual, expected = (
        [make_layer(65 + 64 * (k % 3), k, *dtypes[k], device) for k in range(24)] for _ in range(2)
    )
    cuts = [0] * 24
    ours, theirs = segments_of(actual, cuts), segments_of(expected, cuts)
    home = actual[0].p.device
    grouped = GroupedAdam([ours[:20], ours[20:]], [kind[0] for kind in dtypes], 2, home)
    outcome = torch.tensor([0.37, 0.0], device=home)
    update_together(grouped, actual, outcome, device)
    update_each(expected, theirs, outcome, device)
    assert_same(actual, expected)
    assert all(float(layer.weights[0]) != GAP for layer in actual)


@pytest.mark.parametrize("programs", [1, 3, 6, 100])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [EVEN, ODD])
def test_a_launch_that_leaves_room_is_bitwise_the_same(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], device: str, programs: int
) -> None:
    """Fewer programs than the table has, each with the work of several; or as many as that."""
    monkeypatch.setattr(grouped_adam, "_few_programs", lambda _device: programs)
    dtype = torch.bfloat16
    actual, expected = (
        [make_layer(n + 1, k, dtype, dtype, device) for k, n in enumerate(sizes)] for _ in range(2)
    )
    cuts = [n // 128 * 64 for n in sizes]
    ours, theirs = segments_of(actual, cuts), segments_of(expected, cuts)
    home = actual[0].p.device
    grouped = GroupedAdam([ours[:3], ours[3:]], [dtype] * len(sizes), 2, home)
    for skip in (0.0, 1.0, 0.0):
        outcome = torch.tensor([0.37, skip], device=home)
        update_together(grouped, actual, outcome, device, leaves_room=True)
        update_each(expected, theirs, outcome, device)
        assert_same(actual, expected)


@pytest.mark.gpu
@NEEDS_CUDA
def test_kernels_of_another_stream_get_through_while_a_launch_leaves_room() -> None:
    """Ten in a row, behind which forward's first wait of the host would lie."""
    n = 200_000_000
    state = [torch.zeros(n, device="cuda") for _ in range(3)]
    weights, gradient = (torch.zeros(n, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    layer = Layer(*state, weights, gradient)
    segment = Segment(*layer.part(0, n)[:4], 0, 0, 0)
    update = torch.cuda.Stream(priority=-1)
    outcome = torch.tensor([1.0, 0.0], device="cuda")
    x = torch.zeros(1, device="cuda")
    with torch.cuda.stream(update):
        grouped = GroupedAdam([[segment]], [torch.bfloat16], 1, torch.device("cuda"))

    def share(leaves_room: bool) -> float:
        """Of the update's time, when the others are through."""
        begin, done, updated = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        torch.cuda.synchronize()
        torch.cuda._sleep(40_000_000)  # about 20 ms: all is queued by then
        begin.record()
        with torch.cuda.stream(update):
            update.wait_event(begin)
            grouped.begin_step([layer.gradient], HYPERS[:1])
            grouped.launch(0, outcome, leaves_room=leaves_room)
            updated.record()
        torch.cuda._sleep(200_000)  # the update has begun
        for _ in range(10):
            x.add_(1.0)
        done.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(done) / begin.elapsed_time(updated)

    share(False), share(True)  # compiles them
    assert share(False) > 0.7
    assert share(True) < 0.4


def test_vectors_where_every_address_and_length_allows_them() -> None:
    def is_aligned(n: int, shift: int, gradient_shift: int = 0) -> list[bool]:
        layers = [make_layer(n, k, torch.bfloat16, torch.bfloat16, "cpu", shift) for k in range(2)]
        segments = [
            Segment(*layer.part(0, n)[:4], number, 0, 0) for number, layer in enumerate(layers)
        ]
        grouped = GroupedAdam([[s] for s in segments], [torch.bfloat16] * 2, 2, torch.device("cpu"))
        last = torch.zeros(n + gradient_shift, dtype=torch.bfloat16)[gradient_shift:]
        grouped.begin_step([layers[0].gradient, last], HYPERS)
        return grouped.aligned

    assert is_aligned(2048, 0) == [True, True]
    assert is_aligned(2048, 0, 1) == [True, False]
    assert is_aligned(2048, 0, 8) == [True, True]
    assert is_aligned(2048, 1) == [False, False]
    assert is_aligned(2040, 0) == [False, False]


def test_constants_are_those_of_a_kernel_argument() -> None:
    """Made in float64 and rounded once."""
    layer = make_layer(64, 0, torch.float32, torch.float32, "cpu")
    segment = Segment(*layer.part(0, 64)[:4], 0, 0, 1)
    grouped = GroupedAdam([[segment]], [torch.float32], 2, torch.device("cpu"))
    for step in (1, 17):
        hypers = [replace(hyper, step=step) for hyper in HYPERS]
        grouped.begin_step([layer.gradient], hypers)
        expected = np.array([list(adam_constants(h).values()) for h in hypers]).astype(np.float32)
        assert torch.equal(grouped.constants, torch.from_numpy(expected).reshape(-1))


@pytest.mark.gpu
@NEEDS_CUDA
def test_a_table_is_not_rewritten_before_it_is_read() -> None:
    """The stream is held up while the host prepares one step after another."""
    layers, twins = (
        [make_layer(4096, k, torch.bfloat16, torch.bfloat16, "cuda") for k in range(4)]
        for _ in range(2)
    )
    ours = [Segment(*x.part(0, 4096)[:4], k, 0, k % 2) for k, x in enumerate(layers)]
    theirs = [Segment(*x.part(0, 4096)[:4], k, 0, k % 2) for k, x in enumerate(twins)]
    grouped = GroupedAdam([ours], [torch.bfloat16] * 4, 2, torch.device("cuda"))
    outcome = torch.tensor([0.37, 0.0], device="cuda")
    gradients = [
        [torch.randn(4096, device="cuda").bfloat16() for _ in range(4)] for _step in range(8)
    ]
    torch.cuda.synchronize()
    for step in range(8):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        grouped.begin_step(gradients[step], HYPERS)
        grouped.launch(0, outcome)
    for step in range(8):
        for layer, gradient in zip(twins, gradients[step], strict=True):
            layer.gradient = gradient
        update_each(twins, theirs, outcome, "cuda")
    assert_same(layers, twins)
