"""GPU kernels for the gradient norm and for what follows from it."""
# Triton's language is untyped, its functions are objects made by a decorator, and it comes with
# torch's wheels for GPUs only.
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import triton
import triton.language as tl

from hytrain.kernels.triton_kernels import address_of_row, row_of_program


@triton.jit(do_not_specialize=[f"x{row}" for row in range(16)])
def squares_grouped_kernel(
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15,
    table_ptr, partial_ptr,
    GRADIENT: tl.constexpr, ALIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sums of the squares of up to 16 gradients (a table's fields: square_sums.py).

    x0 to x15 are their addresses. With ALIGNED these are multiples of 16 bytes, and lengths of 16
    elements. Sums are in another order then: each gradient has it always or never.
    """
    row, inside = row_of_program(table_ptr, tl.program_id(0), ROWS)
    address = address_of_row(
        row, x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15
    )
    x_ptr = address.to(tl.pointer_type(GRADIENT))
    fields = table_ptr + row
    n = tl.load(fields + ROWS)
    if ALIGNED:
        x_ptr = tl.multiple_of(x_ptr, 16)
        n = tl.multiple_of(n, 16)
    per_program = tl.multiple_of(tl.load(fields + 2 * ROWS), BLOCK)
    begin = inside * per_program
    total = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, per_program, BLOCK):
        offsets = begin + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + offsets, mask=offsets < n, other=0.0)
        wide = x.to(tl.float32).to(tl.float64)
        total += wide * wide
    tl.store(partial_ptr + tl.load(fields + 3 * ROWS) + inside, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["num_rows"])
def add_partials_kernel(rows_ptr, partial_ptr, sums_ptr, num_rows, PARTIALS: tl.constexpr):
    """Adds up each row's partial sums, at most PARTIALS, in a fixed order.

    rows_ptr holds three times num_rows numbers: first partial sums, how many, where the sum goes.
    """
    fields = rows_ptr + tl.program_id(0)
    partials = tl.load(fields) + tl.arange(0, PARTIALS)
    mask = tl.arange(0, PARTIALS) < tl.load(fields + num_rows)
    total = tl.sum(tl.load(partial_ptr + partials, mask=mask, other=0.0), axis=0)
    tl.store(sums_ptr + tl.load(fields + 2 * num_rows), total)


@triton.jit
def decision_kernel(
    total_ptr, constants_ptr, result_ptr, outcome_ptr, CLIPS: tl.constexpr, CHECKS: tl.constexpr
):
    """``clipping.reference_decision`` for one sum of squares, operation by operation, in float64.

    constants_ptr holds unscale, the threshold and what torch adds to the norm: as arguments they
    would be rounded to fp32.
    """
    total = tl.load(total_ptr)
    unscale = tl.load(constants_ptr)
    norm = tl.sqrt(total) * unscale
    coefficient = tl.full((), 1.0, tl.float64)
    if CLIPS:
        limited = (1.0 / (norm + tl.load(constants_ptr + 2))) * tl.load(constants_ptr + 1)
        # A NaN norm passes none of these comparisons.
        coefficient = tl.where(limited >= 1.0, coefficient, tl.where(limited < 1.0, limited, 0.0))
    skip = tl.full((), 0.0, tl.float64)
    if CHECKS:
        skip = tl.where(total - total != 0.0, skip + 1.0, skip)
    scale = coefficient * unscale
    tl.store(result_ptr, scale)
    tl.store(result_ptr + 1, skip)
    tl.store(result_ptr + 2, norm)
    tl.store(result_ptr + 3, coefficient)
    tl.store(outcome_ptr, scale.to(tl.float32))
    tl.store(outcome_ptr + 1, skip.to(tl.float32))
