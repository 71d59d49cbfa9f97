"""GPU kernels. Imported only where CUDA and Triton are."""
# Triton's language is untyped, its functions are objects made by a decorator, and it comes with
# torch's wheels for GPUs only.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adam_kernel(
    p_ptr, m_ptr, v_ptr, g_ptr, w_ptr, outcome_ptr, n,
    l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, neg_step_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One Adam step over n elements; outcome holds the gradient's scale and the skip flag."""
    scale = tl.load(outcome_ptr)
    skip = tl.load(outcome_ptr + 1)
    if skip == 0.0:
        # 64-bit: a segment may have more than 2**31 elements.
        offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        p = tl.load(p_ptr + offsets, mask=mask, other=0.0)
        m = tl.load(m_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        g = tl.fma(l2, p, g)
        m = tl.fma(one_minus_beta1, g - m, m)
        v = tl.fma(one_minus_beta2 * g, g, beta2 * v)
        denominator = tl.fma(tl.sqrt_rn(v), inv_sqrt_correction2, eps)
        p = tl.fma(neg_step_size, tl.div_rn(m, denominator), p * decay)
        tl.store(p_ptr + offsets, p, mask=mask)
        tl.store(m_ptr + offsets, m, mask=mask)
        tl.store(v_ptr + offsets, v, mask=mask)
        tl.store(w_ptr + offsets, p.to(w_ptr.dtype.element_ty), mask=mask)


@triton.jit
def sum_of_squares_kernel(x_ptr, partial_ptr, n, per_program, BLOCK: tl.constexpr):
    """Each program sums its own run of x in float64, in order, into its slot of `partial`."""
    begin = tl.program_id(0).to(tl.int64) * per_program
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, per_program, BLOCK):
        offsets = begin + start + tl.arange(0, BLOCK)
        mask = (offsets < n) & (offsets < begin + per_program)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32).to(tl.float64)
        total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def copy_squares_kernel(
    x_ptr, y_ptr, partial_ptr, n, per_program, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = x in y's dtype; each program sums y's squares over its own run, in order, in float64."""
    begin = tl.program_id(0).to(tl.int64) * per_program
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, per_program, BLOCK):
        offsets = begin + start + tl.arange(0, BLOCK)
        mask = (offsets < n) & (offsets < begin + per_program)
        y = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + offsets, y, mask=mask)
        wide = y.to(tl.float32).to(tl.float64)
        total += wide * wide
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, axis=0))
