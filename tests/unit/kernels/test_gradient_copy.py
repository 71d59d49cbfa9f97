"""Copying a gradient and summing its squares in one pass: against the slow twin."""

from __future__ import annotations

import pytest
import torch

from hytrain.kernels.gradient_copy import GradientCopier, reference_copy

SIZES = [1, 100, 2048, 2049, 70_001, 5_000_003]
DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
]


def check(sizes: list[int], dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    generator = torch.Generator().manual_seed(1)
    sources = [torch.randn(n, generator=generator).to(dtypes[0]).to(device) for n in sizes]
    copier = GradientCopier(sizes, torch.device(device))
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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_on_a_gpu(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    check(SIZES, dtypes, "cuda")


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
            ],
        ),
    ],
)
def test_not_contiguous_and_not_finite(device: str) -> None:
    source = torch.arange(12.0, device=device).view(3, 4).t()
    copied = torch.empty(12, device=device)
    copier = GradientCopier([12], torch.device(device))
    copier.copy(0, source, copied)
    assert torch.equal(copied.view(4, 3), source)
    assert float(copier.squares.sum()) == float((source**2).sum())
    source = torch.full((5000,), 1e30, device=device)
    source[4321] = float("inf")
    copied = torch.empty(5000, device=device)
    copier = GradientCopier([5000], torch.device(device))
    copier.copy(0, source, copied)
    assert float(copier.squares.sum()) == float("inf")
