"""Moments in bf16 and 8-bit codes: bitwise against the reference, and against themselves."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import DTYPES, HYPERS, ISAS, error_bound, forced_isa, same_bits
from moment_cases import KINDS, LENGTHS, RoundedCase, make_rounded, same_moment, same_state
from support.covering import everyday
from support.reference_adam import AdamState, adam_step_float64, stored_moments

from hytrain.errors import KernelArgumentError
from hytrain.kernels.cpu_adam import (
    AdamHyper,
    Gradient,
    commit,
    commit_then_preview,
    preview,
    publish,
)
from hytrain.kernels.moments import MOMENT_BLOCK, EightBit, Moment, Rounding, zero_moment

SCALE = 0.37
ROUNDING = Rounding(2**63 + 11, 5)
# The last one is cut within the run, where the upper half of the index changes.
FIRSTS = (0, 7 * MOMENT_BLOCK, 2**32 - 3 * MOMENT_BLOCK)


def at(first_index: int) -> Rounding:
    return Rounding(ROUNDING.seed, ROUNDING.parameter, first_index)


@everyday({"isa": ISAS, "kind": KINDS, "hyper_name": list(HYPERS)})
def test_commit_is_the_fp32_step_and_the_defined_rounding(
    isa: str, kind: torch.dtype, hyper_name: str
) -> None:
    hyper = HYPERS[hyper_name]
    for n in LENGTHS:
        for first in FIRSTS:
            case = make_rounded(n, kind, torch.bfloat16)
            gradient = Gradient(case.current, SCALE, hyper)
            p, (m, v) = case.p.clone(), case.read()
            with forced_isa(isa):
                commit(p, m, v, gradient)
                commit(*case.state, gradient, rounding=at(first))
            expected = stored_moments(m, v, kind, at(first), hyper.step)
            assert same_bits(case.p, p), (n, first)
            assert same_moment(case.m, expected[0]), (n, first)
            assert same_moment(case.v, expected[1]), (n, first)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_commit_is_near_float64(kind: torch.dtype) -> None:
    """Within fp32's bound for p, and for moments that plus one spacing of their code."""
    n = 4096
    case = make_rounded(n, kind, torch.float32)
    before = AdamState(case.p.clone(), *case.read())
    gradient = Gradient(case.current, SCALE, HYPERS["adamw"])
    exact, bound = adam_step_float64(before, gradient), error_bound(before, gradient)
    commit(*case.state, gradient, rounding=ROUNDING)
    m, v = case.read()
    if kind == torch.bfloat16:
        spacings = [t.abs() * 2.0**-7 for t in (exact.m, exact.v)]
        errors = [(m - exact.m).abs() - bound.m, (v - exact.v).abs() - bound.v]
    else:
        # y = |x| / factor + offset has spacing 2**-4 of itself at most; offsets are 2**-7 of m and
        # 2**-15 of v, which goes up to the first code.
        factors = [
            torch.exp2(moment.exponents.double() - 127).repeat_interleave(MOMENT_BLOCK)
            for moment in (case.m, case.v)
            if isinstance(moment, EightBit)
        ]
        spacings = [
            (exact.m.abs() + factors[0] * 2.0**-7) * 2.0**-4,
            (exact.v + factors[1] * 2.0**-15) * 2.0**-4,
        ]
        errors = [(m - exact.m).abs() - bound.m, (v - exact.v).abs() - bound.v]
    assert bool(((case.p - exact.p).abs() <= bound.p).all())
    for error, spacing in zip(errors, spacings, strict=True):
        assert bool((error <= spacing * (1 + 1e-6)).all())
        assert float((error / spacing).max()) > 0.5  # it was rounded, and not only to the nearest


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_instruction_sets_threads_splits_and_alignment_change_no_bit(
    kind: torch.dtype, dtype: torch.dtype
) -> None:
    n = 3 * 16384 + 77
    hypers = HYPERS["adamw"], HYPERS["adam_l2"]

    def run(case: RoundedCase, out: torch.Tensor, first: int, threads: int) -> None:
        commit_then_preview(
            *case.state,
            Gradient(case.previous, SCALE, hypers[0]),
            Gradient(case.current, 1.0, hypers[1]),
            rounding=at(first),
            out=out,
            num_threads=threads,
        )

    results: list[tuple[RoundedCase, torch.Tensor]] = []
    for isa in ISAS:
        for offset, threads, cuts in ((0, 1, ()), (1, 3, ()), (3, 2, (64, 192, 20032))):
            case = make_rounded(n, kind, dtype, offset=offset)
            out = torch.zeros(n + 1, dtype=torch.bfloat16)[offset % 2 :][:n]
            with forced_isa(isa):
                for begin, end in zip((0, *cuts), (*cuts, n), strict=True):
                    run(case.part(begin, end), out[begin:end], 128 + begin, threads)
            results.append((case, out))
    for case, out in results[1:]:
        assert same_state(case, results[0][0])
        assert same_bits(out, results[0][1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("current_dtype", DTYPES, ids=str)
def test_preview_is_what_commit_gives(
    isa: str, kind: torch.dtype, current_dtype: torch.dtype
) -> None:
    """Also after a commit in the same sweep: the preview sees the moments as they are stored."""
    for n in (1, 64, 1000, 16384 + 33):
        case, twin = (make_rounded(n, kind, torch.bfloat16) for _ in range(2))
        previous = Gradient(case.previous, SCALE, HYPERS["adamw"])
        current = Gradient(case.current.to(current_dtype), 1.5, HYPERS["adam_l2"])
        seen, both, written, published = (torch.zeros(n, dtype=torch.float32) for _ in range(4))
        with forced_isa(isa):
            commit_then_preview(*case.state, previous, current, rounding=ROUNDING, out=both)
            commit(*twin.state, previous, rounding=ROUNDING)
            assert same_state(case, twin)
            preview(*case.state, current, out=seen)
            assert same_state(case, twin)
            commit(*case.state, current, rounding=ROUNDING, out=written)
            publish(case.p, out=published)
        for other in (both, written, published):
            assert same_bits(seen, other)


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_not_finite(isa: str) -> None:
    """bf16: the element alone; codes: the moment of its whole block reads as NaN. p: as in fp32."""
    n = 3 * MOMENT_BLOCK
    for bad in (float("nan"), float("inf"), float("-inf")):
        g = torch.ones(n)
        g[70] = bad
        for kind in KINDS:
            case = make_rounded(n, kind, torch.float32)
            p, (m, v) = case.p.clone(), case.read()
            gradient = Gradient(g, 1.0, HYPERS["adamw"])
            with forced_isa(isa):
                commit(*case.state, gradient, rounding=ROUNDING)
                commit(p, m, v, gradient)
            assert same_bits(case.p, p)
            lost = torch.zeros(n, dtype=torch.bool)
            lost[70 if kind == torch.bfloat16 else slice(64, 128)] = True
            for moment in case.read():
                assert torch.equal(~moment.isfinite(), lost)
            if kind == torch.bfloat16:
                assert case.read()[1][70].isinf() == v[70].isinf()


def stored_of(values: torch.Tensor, kind: torch.dtype, step: int) -> RoundedCase:
    """A step from zeros after which m was ``values`` and v their square, before rounding."""
    n = values.numel()
    hyper = AdamHyper(lr=1e-3, beta1=0.0, beta2=0.0, step=step)
    m, v = zero_moment(kind, n), zero_moment(kind, n)
    case = RoundedCase(torch.zeros(n), m, v, values, values)
    commit(*case.state, Gradient(values, 1.0, hyper), rounding=ROUNDING)
    return case


def test_the_finite_stays_finite_and_zero_stays_zero() -> None:
    values = torch.zeros(256)
    values[:64] = 3.4e38  # the next bf16 is infinite; the square is
    values[64:128] = -3.39e38
    for step in range(1, 50):
        m, _ = stored_of(values, torch.bfloat16, step).read()
        assert bool(m.isfinite().all())
        assert bool((m[128:] == 0).all())
    for kind in KINDS:
        values = torch.zeros(256)
        values[3::7] = 1e-3
        for moment in stored_of(values, kind, 1).read():
            assert torch.equal(moment == 0, values == 0)


def test_a_small_element_of_a_block_keeps_its_denominator() -> None:
    """m / (sqrt(v) + eps) cannot blow up because a code became zero."""
    values = 10.0 ** torch.linspace(-9, 0, 6400).view(100, 64).t().reshape(-1)
    for step in range(1, 20):
        case = stored_of(values, torch.uint8, step)
        m, v = case.read()
        assert bool((v > 0).all())
        # Here |m| = sqrt(v): at most one first code over the other, with factors twice apart.
        assert float((m.abs() / v.sqrt()).max()) <= 4.0


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rounding_is_unbiased(kind: torch.dtype) -> None:
    """Means over many steps are the value within their standard error."""
    num_steps, n = 600, 2048
    rng = torch.Generator().manual_seed(1)
    values = torch.randn(n, generator=rng) * 10 ** (torch.rand(n, generator=rng) * 2 - 3)
    values[::MOMENT_BLOCK] = 1.0  # what is rounded to the first code from below is biased: few are
    exact = [values.double(), values.double().square()]
    sums = [torch.zeros(n, dtype=torch.float64) for _ in range(4)]
    for step in range(1, num_steps + 1):
        m, v = (moment.double() for moment in stored_of(values, kind, step).read())
        for index, moment in enumerate((m, v)):
            sums[index] += moment
            sums[2 + index] += moment.square()
    usable = exact[1] > (2.0**-19 if kind == torch.uint8 else 0.0)
    for index in range(2):
        mean = sums[index] / num_steps
        variance = (sums[2 + index] / num_steps - mean.square()).clamp(min=0)
        error = (variance / num_steps).sqrt()
        known = usable & (variance > 1e-8 * exact[index].square())
        z = ((mean - exact[index]) / error)[known]
        assert known.sum() > n // 2
        assert abs(float(z.mean())) < 5 / float(known.sum()) ** 0.5
        assert 0.8 < float(z.std()) < 1.25


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_second_moment_follows_a_gradient_that_drops_tenfold(kind: torch.dtype) -> None:
    """As fp32's does; rounded to nearest it would stand still (that is checked too)."""
    n, num_steps = 2048, 3000
    rng = torch.Generator().manual_seed(2)
    scale = 10 ** (torch.randn(n, generator=rng) * 0.3)
    rounded = RoundedCase(torch.zeros(n), zero_moment(kind, n), zero_moment(kind, n), scale, scale)
    p, m, v = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    nearest = torch.zeros(n, dtype=torch.bfloat16)
    ratios: list[float] = []
    for step in range(1, 2 * num_steps + 1):
        g = scale * torch.randn(n, generator=rng) * (1.0 if step <= num_steps else 0.1)
        gradient = Gradient(g, 1.0, AdamHyper(lr=1e-3, step=step))
        commit(*rounded.state, gradient, rounding=ROUNDING)
        commit(p, m, v, gradient)
        nearest = (0.999 * nearest.float() + 0.001 * g * g).bfloat16()
        if step % 250 == 0:
            ratios.append(float((rounded.read()[1].sqrt() / v.sqrt()).mean()))
    assert all(abs(ratio - 1) < 0.03 for ratio in ratios), ratios
    assert float((nearest.float().sqrt() / v.sqrt()).median()) > 1.5
    moved = rounded.p - p
    assert float(moved.norm() / p.norm()) < (0.05 if kind == torch.bfloat16 else 0.12)


def test_bad_moments_are_refused() -> None:
    n = 100
    p, g = torch.zeros(n), torch.zeros(n)
    gradient = Gradient(g, 1.0, AdamHyper(lr=1e-3))
    fp32, bf16 = torch.zeros(n), torch.zeros(n, dtype=torch.bfloat16)
    codes = zero_moment(torch.uint8, n)
    assert isinstance(codes, EightBit)
    short = EightBit(codes.codes[:n], codes.exponents)
    few = EightBit(torch.zeros(128, dtype=torch.uint8), codes.exponents[:1])
    bad: list[tuple[Moment, Moment, str]] = [
        (bf16, fp32, "m is torch.bfloat16 but v is torch.float32"),
        (bf16, codes, "m is torch.bfloat16 but v is torch.uint8"),
        (bf16, bf16.clone(), "pass rounding="),
        (codes.codes[:n], codes, "m is torch.uint8; allowed"),
        (short, zero_moment(torch.uint8, n), "codes of m has 100 elements .* it needs 128"),
        (few, zero_moment(torch.uint8, n), "exponents of m has 1 elements .* it needs 2"),
        (codes, codes, "codes of m and codes of v overlap"),
    ]
    for m, v, message in bad:
        rounding = None if "rounding" in message else ROUNDING
        with pytest.raises(KernelArgumentError, match=message):
            commit(p, m, v, gradient, rounding=rounding)
        with pytest.raises(KernelArgumentError, match=message):
            commit_then_preview(p, m, v, gradient, gradient, rounding=rounding, out=fp32.clone())
    with pytest.raises(KernelArgumentError, match="begin at a multiple of 64"):
        Rounding(0, 0, 65)
    with pytest.raises(KernelArgumentError, match="seed is -1"):
        Rounding(-1, 0)
