"""Sums of squares in few launches, and the decision in one: what the slow ones give."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_cases import INTERPRETED, NEEDS_CUDA

from hytrain.kernels.clipping import ClipSettings, GradientNorm, reference_decision
from hytrain.kernels.square_sums import SquareSums

ON_A_GPU = [pytest.mark.gpu, NEEDS_CUDA]
HOW = [
    pytest.param("interpreter", marks=INTERPRETED),
    pytest.param("cuda", marks=ON_A_GPU),
]
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
# More than a launch takes, of one block and of several, even and odd ones, and none.
SIZES = (64, 2048, 6400, 1, 2047, 4099, 0, 20_480, *([96] * 20), 33)


def home(how: str) -> str:
    return "cuda" if how == "cuda" else "cpu"


def gradients_of(how: str, dtype: torch.dtype, shift: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(n + shift, generator=generator).to(home(how), dtype)[shift:] for n in SIZES]


def measured(how: str, layers: list[int], gradients: list[torch.Tensor]) -> torch.Tensor:
    sums = SquareSums(len(SIZES), torch.device(home(how)))
    sums.triton_measure(layers, gradients)
    return sums.values.cpu()


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
def test_each_layers_sum_is_that_of_its_squares(how: str, dtype: torch.dtype, shift: int) -> None:
    gradients = gradients_of(how, dtype, shift)
    found = measured(how, list(range(len(SIZES))), gradients)
    expected = [math.fsum(g.double().square().tolist()) for g in gradients]
    assert found.tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("how", HOW)
def test_a_sum_does_not_depend_on_the_others(how: str) -> None:
    """Bit for bit: a layer's is taken alone where it is updated on the CPU, with others else."""
    gradients = gradients_of(how, torch.float32)
    together = measured(how, list(range(len(SIZES))), gradients)
    backwards = measured(how, list(reversed(range(len(SIZES)))), gradients[::-1])
    assert torch.equal(together, backwards)
    for number, gradient in enumerate(gradients):
        assert measured(how, [number], [gradient])[number] == together[number]


@pytest.mark.parametrize("how", HOW)
def test_layers_of_several_dtypes_and_addresses_are_measured_together(how: str) -> None:
    kinds = [(dtype, shift) for dtype in DTYPES for shift in (0, 1)]
    whole = {kind: gradients_of(how, *kind) for kind in kinds}
    mixed = [whole[kinds[i % len(kinds)]][i] for i in range(len(SIZES))]
    found = measured(how, list(range(len(SIZES))), mixed)
    for number, gradient in enumerate(mixed):
        assert measured(how, [number], [gradient])[number] == found[number]


@pytest.mark.parametrize("how", HOW)
def test_other_layers_keep_their_sums_and_the_next_step_has_its_own(how: str) -> None:
    sums = SquareSums(3, torch.device(home(how)))
    ones = torch.ones(100, device=home(how))
    sums.triton_measure([0, 2], [ones, 2 * ones])
    sums.triton_measure([1], [3 * ones])
    assert sums.values.tolist() == [100.0, 900.0, 400.0]
    sums.triton_measure([0, 2], [ones[:90], 0 * ones])  # one of another length, as after a resume
    assert sums.values.tolist() == [90.0, 900.0, 0.0]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", HOW)
def test_what_is_not_finite_shows(how: str, dtype: torch.dtype, value: float) -> None:
    gradients = gradients_of(how, dtype)
    gradients[5][4098] = value
    found = measured(how, list(range(len(SIZES))), gradients)
    assert torch.isfinite(found).tolist() == [number != 5 for number in range(len(SIZES))]


@pytest.mark.parametrize("max_norm", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("check_overflow", [False, True])
@pytest.mark.parametrize("how", HOW)
def test_the_decision_in_one_launch(how: str, max_norm: float, check_overflow: bool) -> None:
    """Bit for bit; the scale may change from step to step."""
    settings = ClipSettings(max_norm, check_overflow)
    device = torch.device(home(how))
    norm = GradientNorm(1, device, settings, lambda _tensor: None)
    totals = [0.0, 1e-60, 0.09, 0.7, 1.0, 1.5, 3e5, 1e300, math.inf, math.nan]
    for total in totals:
        for unscale in (1.0, 1.0 / 3.0, 2.0**-16):
            x = torch.tensor([total], dtype=torch.float64, device=device)
            expected = torch.zeros(4, dtype=torch.float64, device=device), torch.zeros(2).to(device)
            reference_decision(x, unscale, settings, *expected)
            outcome = torch.full((2,), 7.0, device=device)
            norm.triton_decision(x, unscale, outcome)
            found = norm._result, outcome
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.isnan(), other.isnan())
                assert torch.equal(one.nan_to_num(), other.nan_to_num()), (total, unscale)
