"""Triton kernels for moments in fewer bytes: each operation of csrc/adam/moments_kernel.inl.

A program updates elements of one run of ``RoundedRuns``. Programs that lie wholly within it take a
path without masks, in which loads and stores are of 8 and 16 bytes.
"""
# Triton's language is untyped, its functions are objects made by a decorator, and it comes with
# torch's wheels for GPUs only.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl

from hytrain.kernels.triton_kernels import adam_step, load_master, row_of_program, store_master

_SIGN = tl.constexpr(0x80000000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
# For the codes: mantissa bits that a code leaves out, and the bits of the offsets 2**-7 and 2**-15.
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
    """Absorbs one word into the key's hash: ``_absorb`` of kernels/moments.py."""
    z = (state ^ word) + tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
    z = (z ^ (z >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def run_of_program(table_ptr, step, ROWS: tl.constexpr):
    """The run whose elements this program updates, by the table of ``RoundedRuns``.

    Returns:
        Its number among the run's programs; the run's begin, end and first index; the key.
    """
    row, inside = row_of_program(table_ptr, tl.program_id(0), ROWS)
    # The compiler cannot see that a run begins at a multiple of 64; a hint outside this function,
    # on what it returns, would be lost where it is inlined.
    begin = tl.multiple_of(tl.load(table_ptr + ROWS + row), 64)
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


@triton.jit
def mask_within(offsets, end, WHOLE: tl.constexpr):
    """Which offsets lie before the end. With WHOLE all do, which the compiler has to see: loads and
    stores whose elements might be masked one by one would not be of 16 bytes."""
    if WHOLE:
        return tl.full(offsets.shape, True, tl.int1)
    else:
        return offsets < end


@triton.jit
def step_of_bf16(
    pointers, begin, end, inside, index, key, scale, constants,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One step of a program's elements of a run, with moments in bf16."""
    p_ptr, m_ptr, v_ptr, g_ptr, w_ptr = pointers
    elements = inside * BLOCK + tl.arange(0, BLOCK)
    offsets = begin + elements
    mask = mask_within(offsets, end, WHOLE)
    p = load_master(p_ptr, w_ptr, offsets, mask)
    m = from_bf16(tl.load(m_ptr + offsets, mask=mask, other=0))
    v = from_bf16(tl.load(v_ptr + offsets, mask=mask, other=0))
    g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    p, m, v = adam_step(
        p, m, v, g, constants[0], constants[1], constants[2], constants[3], constants[4],
        constants[5], constants[6], constants[7],
    )  # fmt: skip
    random = random_bits(key, index, elements)
    tl.store(m_ptr + offsets, to_bf16(m, random & 0xFFFF), mask=mask)
    tl.store(v_ptr + offsets, to_bf16(v, random >> 16), mask=mask)
    store_master(p_ptr, w_ptr, offsets, p, mask)


@triton.jit(do_not_specialize=["step"])
def adam_bf16_kernel(
    p_ptr, m_ptr, v_ptr, g_ptr, w_ptr, outcome_ptr, table_ptr, step,
    l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, neg_step_size,
    RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One Adam step with moments in bf16 (as uint16), over the runs of a table."""
    scale = tl.load(outcome_ptr)
    skip = tl.load(outcome_ptr + 1)
    if skip == 0.0:
        inside, begin, end, index, key = run_of_program(table_ptr, step, RUNS)
        pointers = p_ptr, m_ptr, v_ptr, g_ptr, w_ptr
        constants = (
            l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps,
            neg_step_size,
        )  # fmt: skip
        if begin + (inside + 1) * BLOCK <= end:
            step_of_bf16(pointers, begin, end, inside, index, key, scale, constants, BLOCK, True)
        else:
            step_of_bf16(pointers, begin, end, inside, index, key, scale, constants, BLOCK, False)


@triton.jit
def values_of_codes(words, exponent, SHIFT: tl.constexpr, SIGNED: tl.constexpr):
    """fp32 values of the codes that are the byte SHIFT / 8 of words; one exponent per row."""
    code = (words >> SHIFT) & 0xFF
    offset_bits: tl.constexpr = _M_OFFSET if SIGNED else _V_OFFSET
    magnitude = code & 0x7F if SIGNED else code
    y = ((magnitude << _SHIFT) + offset_bits).to(tl.float32, bitcast=True)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    offset = tl.full((), offset_bits, tl.uint32).to(tl.float32, bitcast=True)
    value = tl.fma(y, tl.broadcast_to(factor, y.shape), -(factor * offset))
    if SIGNED:
        bits = (value.to(tl.uint32, bitcast=True) & _MAGNITUDE) | ((code & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True)
    return value


@triton.jit
def exponent_of(largest_bits, CARRY: tl.constexpr):
    """The exponent of each row: the least with which its largest magnitude has a code."""
    largest = tl.max(largest_bits.to(tl.int32), axis=1)
    exponent = (largest.to(tl.uint32) + CARRY) >> 23
    return tl.where(exponent >= 254, 255, exponent).to(tl.uint32)[:, None]


@triton.jit
def inverse_of(exponent):
    """The factor that scales a row to its codes, zero if it has none, and whether it has any."""
    has_codes = (exponent > 0) & (exponent < 255)
    inverse = tl.where(has_codes, (254 - exponent) << 23, 0).to(tl.uint32)
    return inverse.to(tl.float32, bitcast=True), has_codes


@triton.jit
def raised(magnitude_bits, inverse, random, OFFSET: tl.constexpr):
    """Bits of the scaled magnitude plus the offset, random bits added."""
    magnitude = magnitude_bits.to(tl.float32, bitcast=True)
    offset = tl.full(magnitude.shape, OFFSET, tl.uint32).to(tl.float32, bitcast=True)
    y = tl.fma(magnitude, tl.broadcast_to(inverse, magnitude.shape), offset)
    return y.to(tl.uint32, bitcast=True) + random


@triton.jit
def codes_of_m(bits, inverse, has_codes, random, SHIFT: tl.constexpr):
    """Codes of new first moments, in the byte SHIFT / 8."""
    y = raised(bits & _MAGNITUDE, inverse, random >> 13, _M_OFFSET)
    code = ((y >> _SHIFT) & 0x7F) | ((bits >> 24) & 0x80)
    return tl.where(has_codes, code << SHIFT, 0).to(tl.uint32)


@triton.jit
def codes_of_v(bits, inverse, has_codes, random, SHIFT: tl.constexpr):
    """Codes of new second moments, in the byte SHIFT / 8; what is not zero has at least code 1."""
    y = raised(bits, inverse, random & 0x7FFFF, _V_OFFSET)
    least = tl.where(bits != 0, _V_LEAST, 0).to(tl.uint32)
    code = (tl.maximum(y, least) >> _SHIFT) & 0xFF
    return tl.where(has_codes, code << SHIFT, 0).to(tl.uint32)


@triton.jit
def step_of_quarter(
    pointers, begin, elements, end, words, exponents, scale, constants,
    QUARTER: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One step of the elements whose codes are the byte QUARTER of their words: p and the weights
    are stored.

    Returns:
        Bits of the new m and v, zero past the end: those must not count for the largest.
    """
    p_ptr, g_ptr, w_ptr = pointers
    offsets = begin + elements + 16 * QUARTER
    mask = mask_within(offsets, end, WHOLE)
    p = load_master(p_ptr, w_ptr, offsets, mask)
    m = values_of_codes(words[0], exponents[0], 8 * QUARTER, True)
    v = values_of_codes(words[1], exponents[1], 8 * QUARTER, False)
    g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    p, m, v = adam_step(
        p, m, v, g, constants[0], constants[1], constants[2], constants[3], constants[4],
        constants[5], constants[6], constants[7],
    )  # fmt: skip
    store_master(p_ptr, w_ptr, offsets, p, mask)
    m_bits = tl.where(mask, m.to(tl.uint32, bitcast=True), 0).to(tl.uint32)
    v_bits = tl.where(mask, v.to(tl.uint32, bitcast=True), 0).to(tl.uint32)
    return m_bits, v_bits


@triton.jit
def largest_magnitude(a, b, c, d):
    return tl.maximum(
        tl.maximum(a & _MAGNITUDE, b & _MAGNITUDE), tl.maximum(c & _MAGNITUDE, d & _MAGNITUDE)
    )


@triton.jit
def step_of_blocks(
    pointers, codes, exponents, begin, end, inside, index, key, scale, constants,
    ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One step of ROWS blocks of codes. Byte b of a block's word w is of element 16 b + w, so a
    tile has the words of its blocks as rows, and there are four tiles of elements."""
    blocks = inside * ROWS + tl.arange(0, ROWS)[:, None]
    rows = begin // 64 + blocks
    row_mask = mask_within(rows * 64, end, WHOLE)
    word = tl.arange(0, 16)[None, :]
    words = rows * 16 + word
    elements = blocks * 64 + word
    m_words_ptr, v_words_ptr = codes
    m_exponents_ptr, v_exponents_ptr = exponents
    # All codes of a block are there, also those of a short one.
    mask = mask_within(tl.broadcast_to(rows * 64, words.shape), end, WHOLE)
    old_codes = (
        tl.load(m_words_ptr + words, mask=mask, other=0),
        tl.load(v_words_ptr + words, mask=mask, other=0),
    )
    old_exponents = (
        tl.load(m_exponents_ptr + rows, mask=row_mask, other=0).to(tl.uint32),
        tl.load(v_exponents_ptr + rows, mask=row_mask, other=0).to(tl.uint32),
    )
    m0, v0 = step_of_quarter(
        pointers, begin, elements, end, old_codes, old_exponents, scale, constants, 0, WHOLE
    )
    m1, v1 = step_of_quarter(
        pointers, begin, elements, end, old_codes, old_exponents, scale, constants, 1, WHOLE
    )
    m2, v2 = step_of_quarter(
        pointers, begin, elements, end, old_codes, old_exponents, scale, constants, 2, WHOLE
    )
    m3, v3 = step_of_quarter(
        pointers, begin, elements, end, old_codes, old_exponents, scale, constants, 3, WHOLE
    )

    m_exponent = exponent_of(largest_magnitude(m0, m1, m2, m3), _M_CARRY)
    v_exponent = exponent_of(largest_magnitude(v0, v1, v2, v3), _V_CARRY)
    tl.store(m_exponents_ptr + rows, m_exponent.to(tl.uint8), mask=row_mask)
    tl.store(v_exponents_ptr + rows, v_exponent.to(tl.uint8), mask=row_mask)
    m_inverse, m_has = inverse_of(m_exponent)
    v_inverse, v_has = inverse_of(v_exponent)
    r0 = random_bits(key, index, elements)
    r1 = random_bits(key, index, elements + 16)
    r2 = random_bits(key, index, elements + 32)
    r3 = random_bits(key, index, elements + 48)
    m_new = codes_of_m(m0, m_inverse, m_has, r0, 0) | codes_of_m(m1, m_inverse, m_has, r1, 8)
    m_new |= codes_of_m(m2, m_inverse, m_has, r2, 16) | codes_of_m(m3, m_inverse, m_has, r3, 24)
    v_new = codes_of_v(v0, v_inverse, v_has, r0, 0) | codes_of_v(v1, v_inverse, v_has, r1, 8)
    v_new |= codes_of_v(v2, v_inverse, v_has, r2, 16) | codes_of_v(v3, v_inverse, v_has, r3, 24)
    tl.store(m_words_ptr + words, m_new, mask=mask)
    tl.store(v_words_ptr + words, v_new, mask=mask)


@triton.jit(do_not_specialize=["step"])
def adam_8bit_kernel(
    p_ptr, m_words_ptr, v_words_ptr, g_ptr, w_ptr, outcome_ptr, table_ptr, step,
    l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps, neg_step_size,
    m_exponents_ptr, v_exponents_ptr,
    RUNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One Adam step with 8-bit moments, 4 codes per 32-bit word, ROWS blocks of 64 a program."""
    scale = tl.load(outcome_ptr)
    skip = tl.load(outcome_ptr + 1)
    if skip == 0.0:
        inside, begin, end, index, key = run_of_program(table_ptr, step, RUNS)
        pointers = p_ptr, g_ptr, w_ptr
        codes, exponents = (m_words_ptr, v_words_ptr), (m_exponents_ptr, v_exponents_ptr)
        constants = (
            l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2, eps,
            neg_step_size,
        )  # fmt: skip
        if begin + (inside + 1) * ROWS * 64 <= end:
            step_of_blocks(
                pointers, codes, exponents, begin, end, inside, index, key, scale, constants,
                ROWS, True,
            )  # fmt: skip
        else:
            step_of_blocks(
                pointers, codes, exponents, begin, end, inside, index, key, scale, constants,
                ROWS, False,
            )  # fmt: skip
