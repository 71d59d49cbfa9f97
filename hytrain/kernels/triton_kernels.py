"""GPU kernels for fp32 moments and for norms. Imported only if CUDA and Triton are present."""
# Triton's language is untyped, its functions are objects made by a decorator, and it comes with
# torch's wheels for GPUs only.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl

_SIGN = tl.constexpr(0x80000000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
# For split master weights: what is added before they are cut, and a NaN.
_HALF = tl.constexpr(0x8000)
_NAN = tl.constexpr(0x7FC08000)


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
def load_master(p_ptr, w_ptr, offsets, mask):
    """Loads master weights: fp32, or split if uint16 (csrc/adam/weights_kernel.inl)."""
    if p_ptr.dtype.element_ty == tl.float32:
        return tl.load(p_ptr + offsets, mask=mask, other=0.0)
    else:
        upper = tl.load(w_ptr + offsets, mask=mask, other=0).to(tl.uint32) << 16
        both = upper | tl.load(p_ptr + offsets, mask=mask, other=0).to(tl.uint32)
        magnitude = tl.maximum(both & _MAGNITUDE, _HALF) - _HALF
        return (magnitude | (both & _SIGN)).to(tl.float32, bitcast=True)


@triton.jit
def store_master(p_ptr, w_ptr, offsets, p, mask):
    """Stores master weights and their training copy."""
    if p_ptr.dtype.element_ty == tl.float32:
        tl.store(p_ptr + offsets, p, mask=mask)
        tl.store(w_ptr + offsets, p.to(w_ptr.dtype.element_ty), mask=mask)
    else:
        bits = p.to(tl.uint32, bitcast=True)
        is_nan = (bits & _MAGNITUDE) > _INFINITY
        both = tl.where(is_nan, (bits & _SIGN) | _NAN, bits + _HALF).to(tl.uint32)
        tl.store(p_ptr + offsets, (both & 0xFFFF).to(tl.uint16), mask=mask)
        tl.store(w_ptr + offsets, (both >> 16).to(tl.uint16), mask=mask)


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
        p = load_master(p_ptr, w_ptr, offsets, mask)
        m = tl.load(m_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        p, m, v = adam_step(
            p, m, v, g, l2, decay, one_minus_beta1, beta2, one_minus_beta2, inv_sqrt_correction2,
            eps, neg_step_size,
        )  # fmt: skip
        tl.store(m_ptr + offsets, m, mask=mask)
        tl.store(v_ptr + offsets, v, mask=mask)
        store_master(p_ptr, w_ptr, offsets, p, mask)


@triton.jit
def row_of_program(table_ptr, program, ROWS: tl.constexpr):
    """Finds a program's row in a table by the rows' first programs, the table's first field.

    Args:
        table_ptr: the table.
        program: its number.
        ROWS: rows of the table.

    Returns:
        The row, and the program's number among the row's programs.
    """
    program = program.to(tl.int64)
    firsts = tl.load(table_ptr + tl.arange(0, ROWS))
    row = tl.sum((firsts <= program).to(tl.int32), axis=0) - 1
    return row, program - tl.load(table_ptr + row)


@triton.jit
def address_in(table_ptr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer that a table holds; states its alignment, which the compiler cannot see."""
    pointer = tl.load(table_ptr).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit(do_not_specialize=["programs"])
def adam_grouped_kernel(
    table_ptr, constants_ptr, outcome_ptr, programs,
    GRADIENT: tl.constexpr, MASTER: tl.constexpr, WEIGHTS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """:func:`adam_kernel` over the segments of a table (kernels/grouped_adam.py has its fields).

    With ALIGNED every address is a multiple of 16 bytes and every length one of 16 elements:
    without knowing that, loads and stores would be of single elements. With LOOPS fewer programs
    are launched than the table has, and each does the work of several.
    """
    if LOOPS:
        program = tl.program_id(0)
        while program < programs:
            adam_of_program(
                table_ptr, constants_ptr, outcome_ptr, program,
                GRADIENT, MASTER, WEIGHTS, ALIGNED, ROWS, BLOCK,
            )  # fmt: skip
            program += tl.num_programs(0)
    else:
        adam_of_program(
            table_ptr, constants_ptr, outcome_ptr, tl.program_id(0),
            GRADIENT, MASTER, WEIGHTS, ALIGNED, ROWS, BLOCK,
        )  # fmt: skip


@triton.jit
def adam_of_program(
    table_ptr, constants_ptr, outcome_ptr, program,
    GRADIENT: tl.constexpr, MASTER: tl.constexpr, WEIGHTS: tl.constexpr, ALIGNED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One Adam step over BLOCK elements of one segment of a table."""
    scale = tl.load(outcome_ptr)
    skip = tl.load(outcome_ptr + 1)
    row, inside = row_of_program(table_ptr, program, ROWS)
    if skip == 0.0:
        fields = table_ptr + row
        n = tl.load(fields + ROWS)
        if ALIGNED:
            n = tl.multiple_of(n, 16)
        p_ptr = address_in(fields + 2 * ROWS, MASTER, ALIGNED)
        m_ptr = address_in(fields + 3 * ROWS, tl.float32, ALIGNED)
        v_ptr = address_in(fields + 4 * ROWS, tl.float32, ALIGNED)
        w_ptr = address_in(fields + 5 * ROWS, WEIGHTS, ALIGNED)
        g_ptr = address_in(fields + 6 * ROWS, GRADIENT, ALIGNED)
        constants = constants_ptr + 8 * tl.load(fields + 7 * ROWS)
        offsets = inside * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < n
        p = load_master(p_ptr, w_ptr, offsets, mask)
        m = tl.load(m_ptr + offsets, mask=mask, other=0.0)
        v = tl.load(v_ptr + offsets, mask=mask, other=0.0)
        g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        p, m, v = adam_step(
            p, m, v, g,
            tl.load(constants), tl.load(constants + 1), tl.load(constants + 2),
            tl.load(constants + 3), tl.load(constants + 4), tl.load(constants + 5),
            tl.load(constants + 6), tl.load(constants + 7),
        )  # fmt: skip
        tl.store(m_ptr + offsets, m, mask=mask)
        tl.store(v_ptr + offsets, v, mask=mask)
        store_master(p_ptr, w_ptr, offsets, p, mask)


@triton.jit
def copied_squares(x_ptr, y_ptr, begin, per_program, n, BLOCK: tl.constexpr):
    """Copies x to y, in y's dtype; returns the sum of y's squares, in order, in float64.

    Args:
        x_ptr, y_ptr: n elements each.
        begin: first element of this program.
        per_program: how many it copies, or fewer at the end; whole blocks.
        n: elements in all.
    """
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, per_program, BLOCK):
        offsets = begin + start + tl.arange(0, BLOCK)
        mask = offsets < n
        y = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + offsets, y, mask=mask)
        wide = y.to(tl.float32).to(tl.float64)
        total += wide * wide
    return tl.sum(total, axis=0)


@triton.jit
def copy_squares_kernel(
    x_ptr, y_ptr, partial_ptr, n, per_program, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies one gradient; each program leaves the sum of squares of its own run."""
    begin = tl.program_id(0).to(tl.int64) * per_program
    total = copied_squares(x_ptr, y_ptr, begin, per_program, n, BLOCK)
    tl.store(partial_ptr + tl.program_id(0), total)


@triton.jit
def address_of_row(row, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15):
    """The row's address, one of a launch's arguments."""
    address = x0
    address = tl.where(row == 1, x1, address)
    address = tl.where(row == 2, x2, address)
    address = tl.where(row == 3, x3, address)
    address = tl.where(row == 4, x4, address)
    address = tl.where(row == 5, x5, address)
    address = tl.where(row == 6, x6, address)
    address = tl.where(row == 7, x7, address)
    address = tl.where(row == 8, x8, address)
    address = tl.where(row == 9, x9, address)
    address = tl.where(row == 10, x10, address)
    address = tl.where(row == 11, x11, address)
    address = tl.where(row == 12, x12, address)
    address = tl.where(row == 13, x13, address)
    address = tl.where(row == 14, x14, address)
    address = tl.where(row == 15, x15, address)
    return address


@triton.jit(do_not_specialize=[f"x{row}" for row in range(16)])
def copy_squares_grouped_kernel(
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15,
    table_ptr, y_ptr, partial_ptr,
    GRADIENT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """:func:`copy_squares_kernel` for each row of a table (its fields: kernels/gradient_copy.py).

    x0 to x15 are the gradients' addresses. They and y's are multiples of 16 bytes, lengths and
    places of 16 elements: without knowing that, loads and stores would be of single elements, and
    sums in another order.
    """
    row, inside = row_of_program(table_ptr, tl.program_id(0), ROWS)
    address = address_of_row(
        row, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15
    )
    x_ptr = tl.multiple_of(address.to(tl.pointer_type(GRADIENT)), 16)
    fields = table_ptr + row
    n = tl.multiple_of(tl.load(fields + ROWS), 16)
    y_begin = tl.multiple_of(tl.load(fields + 2 * ROWS), 16)
    per_program = tl.multiple_of(tl.load(fields + 3 * ROWS), BLOCK)
    total = copied_squares(x_ptr, y_ptr + y_begin, inside * per_program, per_program, n, BLOCK)
    tl.store(partial_ptr + tl.load(fields + 4 * ROWS) + inside, total)
