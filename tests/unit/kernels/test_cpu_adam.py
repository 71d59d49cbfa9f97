"""The CPU kernel's numbers: against float64, against torch, and bitwise against itself."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    DTYPES,
    HYPERS,
    ISAS,
    LENGTHS,
    Case,
    canaries_intact,
    error_bound,
    forced_isa,
    make_case,
    placed,
    same_bits,
    ulp,
)
from support.reference_adam import AdamState, adam_step_float32, adam_step_float64

from hytrain.kernels.cpu_adam import (
    AdamHyper,
    Gradient,
    commit,
    commit_then_preview,
    preview,
    publish,
    sum_of_squares,
)

SCALE = 0.37


def within(result: AdamState, exact: AdamState, bound: AdamState) -> bool:
    """Whether each element of the state lies within its bound of the reference."""
    pairs = zip(result, exact, bound, strict=True)
    return all(bool(((r.double() - e).abs() <= b).all()) for r, e, b in pairs)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hyper_name", HYPERS)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_commit_is_within_the_bound_of_float64(
    isa: str, dtype: torch.dtype, hyper_name: str, offset: int
) -> None:
    for n in LENGTHS:
        case = make_case(n, dtype, offset=offset)
        gradient = Gradient(case.current, SCALE, HYPERS[hyper_name])
        exact, bound = adam_step_float64(case.state, gradient), error_bound(case.state, gradient)
        with forced_isa(isa):
            commit(*case.state, gradient)
        assert within(case.state, exact, bound), n
        assert all(canaries_intact(t) for t in (*case.state, case.current)), n


def test_the_bound_is_a_few_ulp_and_can_fail() -> None:
    """AdamW: 2 ulp of max(|m|, |g|), 6 ulp of v, 4 ulp of p plus 16 ulp of the update's size.

    A result that is moved by twice as much is told apart.
    """
    hyper = HYPERS["adamw"]
    case = make_case(4096, torch.float32)
    gradient = Gradient(case.current, SCALE, hyper)
    before = AdamState(*(t.clone() for t in case.state))
    exact, bound = adam_step_float64(before, gradient), error_bound(before, gradient)
    largest = torch.maximum(before.m.abs(), (case.current * SCALE).abs())
    denominator = (exact.v / (1 - hyper.beta2**hyper.step)).sqrt() + hyper.eps
    update = hyper.lr / (1 - hyper.beta1**hyper.step) * largest / denominator
    stated = AdamState(
        4 * ulp(torch.maximum(before.p.abs(), exact.p.abs())) + 16 * ulp(update),
        2 * ulp(largest),
        6 * ulp(exact.v),
    )
    assert all(bool((b <= s).all()) for b, s in zip(bound, stated, strict=True))

    commit(*case.state, gradient)
    assert within(case.state, exact, bound)
    for index in range(3):
        moved = [t.clone() for t in case.state]
        moved[index][77] += 2 * stated[index][77].float()
        assert not within(AdamState(*moved), exact, bound)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_sets_agree_bitwise(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    n = 2 * 16384 + 77
    results: list[tuple[torch.Tensor, ...]] = []
    for isa in ISAS:
        case = make_case(n, dtype, offset=1)
        out = placed(torch.zeros(n, dtype=out_dtype), 1)
        hypers = HYPERS["adamw"], HYPERS["adam_l2"]
        with forced_isa(isa):
            commit_then_preview(
                *case.state,
                Gradient(case.previous, SCALE, hypers[0]),
                Gradient(case.current, 1.0, hypers[1]),
                out=out,
                num_threads=2,
            )
            total = torch.tensor([sum_of_squares(case.current)])
        results.append((*case.state, out, total.float()))
        assert canaries_intact(out)
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_every_bit_pattern_converts_as_torch_does(isa: str, out_dtype: torch.dtype) -> None:
    patterns = torch.arange(2**16, dtype=torch.int32)
    # All upper halves, each with lower halves around the ties of bf16 and of fp16.
    lower = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    p = ((patterns[:, None] << 16) | lower.to(torch.int32)[None, :]).flatten().view(torch.float32)
    out = torch.empty(p.numel(), dtype=out_dtype)
    with forced_isa(isa):
        publish(p, out=out)
    assert same_bits(out, p.to(out_dtype))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_gradient_bit_pattern_is_read_as_torch_does(isa: str, dtype: torch.dtype) -> None:
    gradient = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    n = gradient.numel()
    p, m, v = torch.zeros(n), torch.zeros(n), torch.zeros(n)
    with forced_isa(isa):
        commit(p, m, v, Gradient(gradient, 1.0, AdamHyper(lr=1e-3, beta1=0.0)))
    assert torch.equal(m[m.isfinite()], gradient[gradient.isfinite()].float())
    assert torch.equal(m.isfinite(), gradient.isfinite())


def test_nan_stays_nan_in_half_precision() -> None:
    # The payload of this NaN lies in bits that bf16 and fp16 drop: a careless cast gives infinity.
    p = torch.tensor([0x7F800001, 0x7F800000, -1], dtype=torch.int64).to(torch.int32)
    for out_dtype in (torch.bfloat16, torch.float16):
        for isa in ISAS:
            out = torch.zeros(3, dtype=out_dtype)
            with forced_isa(isa):
                publish(p.view(torch.float32), out=out)
            assert out.isnan().tolist() == [True, False, True]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("non_temporal", [False, True])
def test_preview_is_what_commit_gives(
    isa: str, dtype: torch.dtype, out_dtype: torch.dtype, non_temporal: bool
) -> None:
    for n in (0, 1, 17, 1000, 16384 + 33):
        case = make_case(n, dtype)
        before = case.clone()
        gradient = Gradient(case.current, SCALE, HYPERS["adamw"])
        seen, written, published = (torch.zeros(n, dtype=out_dtype) for _ in range(3))
        with forced_isa(isa):
            preview(*case.state, gradient, out=seen, non_temporal=non_temporal)
            assert all(same_bits(a, b) for a, b in zip(case.state, before.state, strict=True))
            commit(*case.state, gradient, out=written, non_temporal=non_temporal)
            publish(case.p, out=published, non_temporal=non_temporal)
        assert same_bits(seen, case.p.to(out_dtype))
        assert same_bits(seen, written)
        assert same_bits(seen, published)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("current_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("previous_dtype", DTYPES, ids=str)
def test_both_passes_at_once_equal_their_halves(
    isa: str, previous_dtype: torch.dtype, current_dtype: torch.dtype
) -> None:
    for n in (0, 5, 16, 2500, 16384 * 2 + 1):
        case = make_case(n, torch.float32, offset=1)
        previous = Gradient(case.previous.to(previous_dtype), SCALE, HYPERS["adam_l2"])
        current = Gradient(case.current.to(current_dtype), 1.5, HYPERS["adamw"])
        twin: Case = case.clone()
        out, twin_out = (torch.zeros(n, dtype=torch.bfloat16) for _ in range(2))
        with forced_isa(isa):
            commit_then_preview(*case.state, previous, current, out=out, num_threads=2)
            commit(*twin.state, previous)
            preview(*twin.state, current, out=twin_out)
        assert all(same_bits(a, b) for a, b in zip(case.state, twin.state, strict=True)), n
        assert same_bits(out, twin_out), n


@pytest.mark.parametrize("num_threads", [2, 3, 4, 5])
def test_thread_count_changes_no_bit(num_threads: int) -> None:
    n = 7 * 16384 + 321
    serial, team = (make_case(n, torch.bfloat16) for _ in range(2))
    outs = [torch.zeros(n, dtype=torch.bfloat16) for _ in range(2)]
    for case, out, threads in ((serial, outs[0], 1), (team, outs[1], num_threads)):
        previous = Gradient(case.previous, SCALE, HYPERS["adamw"])
        current = Gradient(case.current, 1.0, HYPERS["adamw"])
        commit_then_preview(*case.state, previous, current, out=out, num_threads=threads)
        commit(*case.state, current, num_threads=threads)
    assert all(same_bits(a, b) for a, b in zip(serial.state, team.state, strict=True))
    assert same_bits(*outs)
    for tensor in (serial.p, serial.previous):
        assert sum_of_squares(tensor, num_threads=num_threads) == sum_of_squares(tensor)


def test_flushed_subnormals_of_the_caller_change_nothing() -> None:
    """Threads inherit that mode when they start; a result must not depend on which thread ran."""
    tiny = torch.full((64,), 1e-40)
    results: list[torch.Tensor] = []
    for flush in (False, True):
        v = tiny.clone()
        supported = torch.set_flush_denormal(flush)
        commit(torch.zeros(64), torch.zeros(64), v, Gradient(tiny, 1.0, AdamHyper(lr=0.1)))
        torch.set_flush_denormal(False)
        if not supported:
            pytest.skip("this CPU cannot flush subnormals")
        results.append(v)
    assert results[0].view(torch.int32).count_nonzero() == 64
    assert same_bits(*results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_gradient_stays_in_its_element(isa: str, bad: float) -> None:
    for n in (16, 100, 33):
        for position in (0, n // 2, n - 1):
            case = make_case(n, torch.float32)
            clean = case.clone()
            case.current[position] = bad
            with forced_isa(isa):
                commit(*case.state, Gradient(case.current, 1.0, HYPERS["adamw"]))
                commit(*clean.state, Gradient(clean.current, 1.0, HYPERS["adamw"]))
            others = torch.arange(n) != position
            for got, expected in zip(case.state, clean.state, strict=True):
                assert same_bits(got[others], expected[others])
            assert not case.p[position].isfinite()
            assert not torch.tensor(sum_of_squares(case.current)).isfinite()


@pytest.mark.parametrize("decoupled", [True, False])
def test_agrees_with_torch_over_many_steps(decoupled: bool) -> None:
    num_steps, n, lr = 30, 5000, 1e-2
    rng = torch.Generator().manual_seed(5)
    start = torch.randn(n, generator=rng)
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = torch.nn.Parameter(start.clone())
    optimizer = kind([theirs], lr=lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    p, m, v = start.clone(), torch.zeros(n), torch.zeros(n)
    for step in range(1, num_steps + 1):
        g = torch.randn(n, generator=rng)
        theirs.grad = g.clone()
        optimizer.step()
        hyper = AdamHyper(lr=lr, beta2=0.95, weight_decay=0.1, step=step, decoupled_decay=decoupled)
        commit(p, m, v, Gradient(g, 1.0, hyper))
        # Each side makes at most 1 ulp of error in p and 4 in the update, a step.
        bound = step * (2 * ulp(theirs.detach()) + 8 * 2.0**-23 * lr)
        assert bool(((p - theirs.detach()).double().abs() <= bound).all()), step
    assert bool(((p - start).abs() > 0.01).any())  # it did move, far beyond the bound


def test_both_references_agree() -> None:
    case = make_case(4096, torch.bfloat16)
    gradient = Gradient(case.current, SCALE, HYPERS["adamw"])
    exact = adam_step_float64(case.state, gradient)
    rough = adam_step_float32(case.state, gradient)
    bound = error_bound(case.state, gradient)
    # No fused operations there: up to twice the roundings.
    assert within(rough, exact, AdamState(*(2 * b for b in bound)))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_squares(isa: str, dtype: torch.dtype) -> None:
    for n in (0, 1, 31, 32, 33, 1000, 16384, 16384 * 3 + 7):
        tensor = make_case(n, dtype, offset=1).current
        with forced_isa(isa):
            total = sum_of_squares(tensor)
        # All terms are positive: float64 summation in any order errs by < n * 2^-53 of the sum.
        assert total == pytest.approx(float(tensor.double().square().sum()), rel=1e-11, abs=0.0)
    huge = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    with forced_isa(isa):
        assert torch.tensor(sum_of_squares(huge), dtype=torch.float64).isfinite()
