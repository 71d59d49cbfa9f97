"""GPU kernels. Imported only where CUDA and Triton are."""
# Triton's language is untyped, its functions are objects made by a decorator, and it comes with
# torch's wheels for GPUs only.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adam_step(
    p, m, v, g,
    l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, neg_step_size,
):  # fmt: skip
    """New p, m and v; every operation is the CPU kernel's."""
    g = tl.fma(l2, p, g)
    m = tl.fma(one_minus_beta1, g - m, m)
    v = tl.fma(one_minus_beta2 * g, g, beta2 * v)
    root = tl.sqrt_rn(v)
    denominator = tl.fma(root, inv_sqrt_correction2, eps)
    p = tl.fma(neg_step_size, tl.div_rn(m, denominator), p * decay)
    return p, m, v


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
        p, m, v = adam_step(
            p, m, v, g, l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2,
            eps, neg_step_size,
        )  # fmt: skip
        tl.store(p_ptr + offsets, p, mask=mask)
        tl.store(m_ptr + offsets, m, mask=mask)
        tl.store(v_ptr + offsets, v, mask=mask)
        tl.store(w_ptr + offsets, p.to(w_ptr.dtype.element_ty), mask=mask)


@triton.jit
def row_of_program(table_ptr, ROWS: tl.constexpr):
    """Which row of a table this program is of, by the rows' first programs, which come first in it.

    Returns:
        The row, and the program's number among the row's programs.
    """
    program = tl.program_id(0).to(tl.int64)
    firsts = tl.load(table_ptr + tl.arange(0, ROWS))
    row = tl.sum((firsts <= program).to(tl.int32), axis=0) - 1
    return row, program - tl.load(table_ptr + row)


@triton.jit
def address_in(table_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer that a table holds; the compiler cannot see its alignment, and is told of it."""
    pointer = tl.load(table_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def adam_grouped_kernel(
    table_ptr, constants_ptr, outcome_ptr,
    GRADIENT: tl.constexpr, WEIGHTS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """:func:`adam_kernel` over the segments of a table (kernels/grouped_adam.py has its fields).

    With ALIGNED every address is a multiple of 16 bytes and every length one of 16 elements:
    without knowing that, loads and stores would be of single elements.
    """
    scale = tl.load(outcome_ptr)
    skip = tl.load(outcome_ptr + 1)
    row, inside = row_of_program(table_ptr, ROWS)
    if skip == 0.0:
        fields = table_ptr + row
        n = tl.load(fields + ROWS)
        if ALIGNED:
            n = tl.multiple_of(n, 16)
        p_ptr = address_in(fields + 2 * ROWS, tl.float32, ALIGNED)
        m_ptr = address_in(fields + 3 * ROWS, tl.float32, ALIGNED)
        v_ptr = address_in(fields + 4 * ROWS, tl.float32, ALIGNED)
        w_ptr = address_in(fields + 5 * ROWS, WEIGHTS, ALIGNED)
        g_ptr = address_in(fields + 6 * ROWS, GRADIENT, ALIGNED)
        constants = constants_ptr + 8 * tl.load(fields + 7 * ROWS)
        offsets = inside * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        p = tl.load(p_ptr + offsets, mask=mask, other=0.0)
        m = tl.load(m_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        p, m, v = adam_step(
            p, m, v, g,
            tl.load(constants), tl.load(constants + 1), tl.load(constants + 2),
            tl.load(constants + 3), tl.load(constants + 4), tl.load(constants + 5),
            tl.load(constants + 6), tl.load(constants + 7),
        )  # fmt: skip
        tl.store(p_ptr + offsets, p, mask=mask)
        tl.store(m_ptr + offsets, m, mask=mask)
        tl.store(v_ptr + offsets, v, mask=mask)
        tl.store(w_ptr + offsets, p.to(WEIGHTS), mask=mask)


# ---- moments in fewer bytes: csrc/adam/moments_kernel.inl in Triton, operation by operation ----

_SIGN = tl.constexpr(0x80000000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# Of the codes: mantissa bits that a code leaves out, and the bits of the offsets 2**-7 and 2**-15.
_SHIFT = tl.constexpr(19)
_M_OFFSET = tl.constexpr(0x3C000000)
_V_OFFSET = tl.constexpr(0x38000000)
_V_LEAST = tl.constexpr(0x38000000 + (1 << 19))  # of code 1
# What carries a largest magnitude without a code into the next exponent.
_M_CARRY = tl.constexpr((1 << 19) + (1 << 16) - 1)
_V_CARRY = tl.constexpr((1 << 19) + (1 << 8) - 1)


@triton.jit
def lowbias32(h):
    h = (h ^ (h >> 16)) * tl.full((), 0x7FEB352D, tl.uint32)
    h = (h ^ (h >> 15)) * tl.full((), 0x846CA68B, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def random_bits(key, first, offsets):
    """32 bits for each element, from its index and the key."""
    index = offsets.to(tl.uint32) + first.to(tl.uint32)
    start = lowbias32((index >> 6) ^ key.to(tl.uint32))
    h = start * (lowbias32((index & 63) + 1) | 1)
    return h ^ (h >> 16)


@triton.jit
def absorb(state, word):
    """One word of the key's hash: ``_absorb`` of kernels/moments.py."""
    z = (state ^ word) + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def run_of_program(table_ptr, step, ROWS: tl.constexpr):
    """Whose elements this program updates, by the table of ``RoundedRuns``.

    Returns:
        Its number among the run's programs; the run's begin, end and first index; the key.
    """
    row, inside = row_of_program(table_ptr, ROWS)
    begin = tl.load(table_ptr + ROWS + row)
    end = tl.load(table_ptr + 2 * ROWS + row)
    index = tl.load(table_ptr + 3 * ROWS + row)
    state = tl.load(table_ptr + 4 * ROWS + row).to(tl.uint64, bitcast=True)
    state = absorb(absorb(state, step.to(tl.uint64)), (index >> 32).to(tl.uint64))
    return inside, begin, end, index, (state >> 32).to(tl.uint32)


@triton.jit
def to_bf16(value, random):
    """The bits of the stochastically rounded bf16, as uint16."""
    bits = value.to(tl.uint32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    up = tl.minimum(magnitude + random, tl.full((), 0x7F7FFFFF, tl.uint32))
    return ((tl.maximum(up, magnitude) | (bits & _SIGN)) >> 16).to(tl.uint16)


@triton.jit
def from_bf16(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["step"])
def adam_bf16_kernel(
    p_ptr, m_ptr, v_ptr, g_ptr, w_ptr, outcome_ptr, table_ptr, step,
    l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, neg_step_size,
    RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same with moments in bf16 (as uint16), over the runs of a table."""
    scale = tl.load(outcome_ptr)
    skip = tl.load(outcome_ptr + 1)
    if skip == 0.0:
        inside, begin, end, index, key = run_of_program(table_ptr, step, RUNS)
        elements = inside * BLOCK + tl.arange(0, BLOCK)
        offsets = begin + elements
        mask = offsets < end
        p = tl.load(p_ptr + offsets, mask=mask, other=0.0)
        m = from_bf16(tl.load(m_ptr + offsets, mask=mask, other=0))
        v = from_bf16(tl.load(v_ptr + offsets, mask=mask, other=0))
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        p, m, v = adam_step(
            p, m, v, g, l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2,
            eps, neg_step_size,
        )  # fmt: skip
        random = random_bits(key, index, elements)
        tl.store(p_ptr + offsets, p, mask=mask)
        tl.store(m_ptr + offsets, to_bf16(m, random & 0xFFFF), mask=mask)
        tl.store(v_ptr + offsets, to_bf16(v, random >> 16), mask=mask)
        tl.store(w_ptr + offsets, p.to(w_ptr.dtype.element_ty), mask=mask)


@triton.jit
def magnitude_of_code(code, exponent, OFFSET: tl.constexpr):
    """fp32 magnitudes of codes (without a sign); exponents are one a row."""
    y = ((code << _SHIFT) + OFFSET).to(tl.float32, bitcast=True)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    offset = tl.full((), OFFSET, tl.uint32).to(tl.float32, bitcast=True)
    return tl.fma(y, tl.broadcast_to(factor, y.shape), -(factor * offset))


@triton.jit
def exponent_of(magnitude_bits, CARRY: tl.constexpr):
    """The exponent of each row: the least with which its largest magnitude has a code."""
    largest = tl.max(magnitude_bits.to(tl.int32), axis=1)
    exponent = (largest.to(tl.uint32) + CARRY) >> 23
    return tl.where(exponent >= 254, 255, exponent).to(tl.uint32)[:, None]


@triton.jit
def raised(magnitude, exponent, random, OFFSET: tl.constexpr):
    """Bits of the scaled magnitude plus the offset, random bits added."""
    has_codes = (exponent > 0) & (exponent < 255)
    inverse = tl.where(has_codes, (254 - exponent) << 23, 0).to(tl.uint32)
    inverse = tl.broadcast_to(inverse.to(tl.float32, bitcast=True), magnitude.shape)
    offset = tl.full((), OFFSET, tl.uint32).to(tl.float32, bitcast=True)
    y = tl.fma(magnitude, inverse, tl.broadcast_to(offset, magnitude.shape))
    return y.to(tl.uint32, bitcast=True) + random, has_codes


@triton.jit(do_not_specialize=["step"])
def adam_8bit_kernel(
    p_ptr, m_ptr, v_ptr, g_ptr, w_ptr, outcome_ptr, table_ptr, step,
    l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, neg_step_size,
    m_exponents_ptr, v_exponents_ptr,
    RUNS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The same with moments in 8-bit codes; a row is a block of them."""
    scale = tl.load(outcome_ptr)
    skip = tl.load(outcome_ptr + 1)
    if skip == 0.0:
        inside, begin, end, index, key = run_of_program(table_ptr, step, RUNS)
        blocks = inside * ROWS + tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        elements = blocks * COLUMNS + column
        offsets = begin + elements
        rows = begin // COLUMNS + blocks
        # A block's codes are all there, also of a short one; element 16 b + w is at byte 4 w + b.
        codes = rows * COLUMNS + (column % 16) * 4 + column // 16
        mask = offsets < end
        row_mask = rows * COLUMNS < end
        p = tl.load(p_ptr + offsets, mask=mask, other=0.0)
        m_exponent = tl.load(m_exponents_ptr + rows, mask=row_mask, other=0).to(tl.uint32)
        v_exponent = tl.load(v_exponents_ptr + rows, mask=row_mask, other=0).to(tl.uint32)
        code = tl.load(m_ptr + codes, mask=row_mask, other=0).to(tl.uint32)
        m = magnitude_of_code(code & 0x7F, m_exponent, _M_OFFSET)
        m = (m.to(tl.uint32, bitcast=True) & _MAGNITUDE) | ((code & 0x80) << 24)
        m = m.to(tl.float32, bitcast=True)
        code = tl.load(v_ptr + codes, mask=row_mask, other=0).to(tl.uint32)
        v = magnitude_of_code(code, v_exponent, _V_OFFSET)
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        p, m, v = adam_step(
            p, m, v, g, l2, decay, one_minus_beta1, beta2, one_minus_beta2,
            inv_sqrt_correction2, eps, neg_step_size,
        )  # fmt: skip
        tl.store(p_ptr + offsets, p, mask=mask)
        tl.store(w_ptr + offsets, p.to(w_ptr.dtype.element_ty), mask=mask)

        random = random_bits(key, index, elements)
        # Elements after the end must not count for the largest magnitude.
        m_bits = tl.where(mask, m.to(tl.uint32, bitcast=True), 0).to(tl.uint32)
        v_bits = tl.where(mask, v.to(tl.uint32, bitcast=True), 0).to(tl.uint32)
        m_exponent = exponent_of(m_bits & _MAGNITUDE, _M_CARRY)
        v_exponent = exponent_of(v_bits & _MAGNITUDE, _V_CARRY)
        tl.store(m_exponents_ptr + rows, m_exponent.to(tl.uint8), mask=row_mask)
        tl.store(v_exponents_ptr + rows, v_exponent.to(tl.uint8), mask=row_mask)

        magnitude = (m_bits & _MAGNITUDE).to(tl.float32, bitcast=True)
        y, has_codes = raised(magnitude, m_exponent, random >> 13, _M_OFFSET)
        code = ((y >> _SHIFT) & 0x7F) | ((m_bits >> 24) & 0x80)
        tl.store(m_ptr + codes, tl.where(has_codes, code, 0).to(tl.uint8), mask=row_mask)

        # What is not zero has at least code 1.
        magnitude = v_bits.to(tl.float32, bitcast=True)
        y, has_codes = raised(magnitude, v_exponent, random & 0x7FFFF, _V_OFFSET)
        least = tl.where(v_bits != 0, _V_LEAST, 0).to(tl.uint32)
        code = (tl.maximum(y, least) >> _SHIFT) & 0xFF
        tl.store(v_ptr + codes, tl.where(has_codes, code, 0).to(tl.uint8), mask=row_mask)


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
