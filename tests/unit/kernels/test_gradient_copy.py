"""Copying gradients and summing their squares in one pass: against the slow twin."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import INTERPRETED, NEEDS_CUDA

from hytrain.kernels.gradient_copy import GradientCopier, reference_copy

SIZES = [1, 100, 2048, 2049, 70_001, 5_000_003]
EVEN = [16, 2048, 4096 + 64, 64 * 70_001, 3 * 2048]
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
]
ON_A_GPU = [pytest.mark.gpu, NEEDS_CUDA]
GAP = 3.0


def places_of(sizes: list[int], gap: int = 0) -> list[tuple[int, int]]:
    """Parameters one behind the other, so many elements apart."""
    places: list[tuple[int, int]] = []
    begin = 0
    for size in sizes:
        places.append((begin, size))
        begin += size + gap
    return places


def random_gradients(sizes: list[int], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, generator=generator).to(dtype).to(device) for n in sizes]


def check(sizes: list[int], dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    sources = random_gradients(sizes, dtypes[0], device)
    copier = GradientCopier(places_of(sizes), torch.device(device))
    copier.squares.fill_(7.0)  # what an earlier step left
    total = 0.0
    for index, source in enumerate(sources):
        copied = torch.full((source.numel(),), 3.0, dtype=dtypes[1], device=device)
        copier.copy(index, source, copied)
        expected, part = torch.empty_like(copied), torch.empty(3).double().to(device)
        reference_copy(source, expected, part)
        assert torch.equal(copied, expected)
        total += float(part.sum())
    assert float(copier.squares.sum()) == pytest.approx(total, rel=1e-13)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_on_a_cpu(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check(SIZES, dtypes, "cpu")


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("where", [pytest.param("cuda", marks=ON_A_GPU)])
def test_on_a_gpu(where: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check(SIZES, dtypes, where)


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0, 1], ids=["aligned", "not aligned"])
@pytest.mark.parametrize("sizes", [EVEN, SIZES, EVEN[:3] * 12], ids=["even", "odd", "36"])
@pytest.mark.parametrize(
    "how",
    ["cpu", pytest.param("interpreter", marks=INTERPRETED), pytest.param("cuda", marks=ON_A_GPU)],
)
def test_all_at_once(
    how: str, sizes: list[int], shift: int, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    """The bits of one copy for each: elements and sums; nothing else is written."""
    device = "cuda" if how == "cuda" else "cpu"
    gradients = random_gradients(sizes, dtypes[0], device)
    if how == "interpreter":  # it cuts where a GPU rounds
        gradients = [gradient.to(dtypes[1]).to(dtypes[0]) for gradient in gradients]
    gradients = [torch.cat((gradient[:shift], gradient))[shift:] for gradient in gradients]
    places = places_of(sizes, gap=64)
    one, both = (GradientCopier(places, torch.device(device)) for _ in range(2))
    size = places[-1][0] + sizes[-1] + 64
    expected, copied = (torch.full((size,), GAP, dtype=dtypes[1], device=device) for _ in range(2))
    for index, (gradient, (begin, numel)) in enumerate(zip(gradients, places, strict=True)):
        one.copy(index, gradient, expected[begin : begin + numel])
    both.squares.fill_(7.0)  # what an earlier step left
    if how == "interpreter":
        is_even = sizes != SIZES and not shift
        assert both.triton_copy_all(gradients, copied) is is_even
        if not is_even:
            assert (copied == GAP).all()
            return
    else:
        both.copy_all(gradients, copied)
    assert torch.equal(copied, expected)
    if how == "interpreter":  # NumPy adds in another order
        torch.testing.assert_close(both.squares, one.squares, rtol=1e-13, atol=0.0)
    else:
        assert torch.equal(both.squares, one.squares)


def test_all_at_once_of_a_dtype_that_is_no_kernels() -> None:
    copier = GradientCopier([(0, 16)], torch.device("cpu"))
    copied = torch.full((16,), GAP)
    assert not copier.triton_copy_all([torch.ones(16, dtype=torch.float64)], copied)
    assert (copied == GAP).all()
    copier.copy_all([torch.ones(16, dtype=torch.float64)], copied)
    assert (copied == 1.0).all()
    assert float(copier.squares.sum()) == 16.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_all_at_once_of_any_strides(device: str) -> None:
    sources = [torch.arange(12.0, device=device).view(3, 4).t(), torch.ones(4, device=device)]
    copier = GradientCopier([(0, 12), (12, 4)], torch.device(device))
    copied = torch.empty(16, device=device)
    copier.copy_all(sources, copied)
    assert torch.equal(copied[:12].view(4, 3), sources[0])
    assert torch.equal(copied[12:], sources[1])
    assert float(copier.squares.sum()) == float((sources[0] ** 2).sum()) + 4.0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU)])
def test_not_contiguous_and_not_finite(device: str) -> None:
    source = torch.arange(12.0, device=device).view(3, 4).t()
    copied = torch.empty(12, device=device)
    copier = GradientCopier([(0, 12)], torch.device(device))
    copier.copy(0, source, copied)
    assert torch.equal(copied.view(4, 3), source)
    assert float(copier.squares.sum()) == float((source**2).sum())
    source = torch.full((5000,), 1e30, device=device)
    source[4321] = float("inf")
    copied = torch.empty(5000, device=device)
    copier = GradientCopier([(0, 5000)], torch.device(device))
    copier.copy(0, source, copied)
    assert float(copier.squares.sum()) == float("inf")
