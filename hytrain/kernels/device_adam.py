"""Adam on the device, for the layers whose placement is the GPU: one launch a segment.

The clip coefficient and the skip flag are read from device memory, so nothing here waits for the
host. The arithmetic is that of the CPU kernel (same constants, fused multiply-adds, correctly
rounded division and square root). torch's fused AdamW refuses bf16 gradients with fp32 state.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit, commit_split
from hytrain.kernels.moment_codes import part_of
from hytrain.kernels.moments import (
    MOMENT_BLOCK,
    EightBit,
    Moment,
    Rounding,
    check_moments,
    moment_kind,
)
from hytrain.kernels.rounded_runs import RoundedRuns, Run
from hytrain.kernels.split_weights import is_split

_BLOCK, _NUM_WARPS = 2048, 8
_BF16_BLOCK, _BF16_NUM_WARPS = 512, 4
"""Four elements a thread: with eight a thread would need twice the registers."""
_8BIT_BLOCKS, _8BIT_NUM_WARPS = 16, 4
"""Blocks of codes per program: 16 elements a thread, four words of codes and four times four
neighbours, each of which is a load of 8 or 16 bytes."""
_kernel_cache: list[Any] = []


def adam_constants(hyper: AdamHyper) -> dict[str, float]:
    """The kernel's constants, computed in float64 (they are rounded to fp32 once, at the call).

    Kingma and Ba 2015, algorithm 1 with the corrections folded into the step size and the
    denominator; Loshchilov and Hutter 2019, algorithm 2 for the decoupled decay.
    """
    correct = hyper.bias_correction
    correction1 = 1.0 - hyper.beta1**hyper.step if correct else 1.0
    correction2 = 1.0 - hyper.beta2**hyper.step if correct else 1.0
    return {
        "l2": 0.0 if hyper.decoupled_decay else hyper.weight_decay,
        "decay": 1.0 - hyper.lr * hyper.weight_decay if hyper.decoupled_decay else 1.0,
        "one_minus_beta1": 1.0 - hyper.beta1,
        "beta2": hyper.beta2,
        "one_minus_beta2": 1.0 - hyper.beta2,
        "inv_sqrt_correction2": 1.0 / math.sqrt(correction2),
        "eps": hyper.eps,
        "neg_step_size": -hyper.lr / correction1,
    }


def device_adam(
    p: torch.Tensor,
    m: Moment,
    v: Moment,
    gradient: torch.Tensor,
    weights: torch.Tensor,
    outcome: torch.Tensor,
    hyper: AdamHyper,
    rounding: Rounding | RoundedRuns | None = None,
) -> None:
    """Makes one step in place, unless it is skipped: on p, m, v and the training copy.

    Args:
        p: master weights, n elements, on the device: fp32, or int16, the remainders of split ones,
            whose other halves are the training copy.
        m, v: the moments, n elements each, both fp32, bf16 or ``EightBit``, on the device.
        gradient: n elements, fp32, bf16 or fp16, on the device.
        weights: the training copy, n elements, overwritten with the cast of p; bf16 with split p.
        outcome: fp32 tensor of two elements on the device: gradient scale, and 1.0 if the
            step is skipped (then nothing is written).
        hyper: hyper-parameters of the step.
        rounding: what the random bits that round bf16 moments and codes depend on, bitwise as on
            the CPU: of one parameter, of which p is a run, or of several. Not used with fp32
            moments.

    Raises:
        KernelArgumentError: the moments differ in kind, or lack ``rounding``.
    """
    check_moments(m, v, rounding, stores=True)
    if p.device.type == "cuda":
        cuda_adam(p, m, v, gradient, weights, outcome, hyper, rounding)
        return
    scale, skip = (float(value) for value in outcome)
    if skip != 0.0:
        return
    if moment_kind(m) == torch.float32:
        _commit(p, m, v, Gradient(gradient, scale, hyper), None, weights)
        return
    for begin, end, bits in _runs(rounding, p.numel()).runs:
        state = p[begin:end], part_of(m, begin, end), part_of(v, begin, end)
        own = Gradient(gradient[begin:end], scale, hyper)
        _commit(*state, own, bits, weights[begin:end])


def _commit(
    p: torch.Tensor,
    m: Moment,
    v: Moment,
    gradient: Gradient,
    rounding: Rounding | None,
    weights: torch.Tensor,
) -> None:
    if is_split(p):
        commit_split(weights, p, m, v, gradient, rounding=rounding)
    else:
        commit(p, m, v, gradient, rounding=rounding, out=weights)


def cuda_adam(
    p: torch.Tensor,
    m: Moment,
    v: Moment,
    gradient: torch.Tensor,
    weights: torch.Tensor,
    outcome: torch.Tensor,
    hyper: AdamHyper,
    rounding: Rounding | RoundedRuns | None,
) -> None:
    """:func:`device_adam` by Triton; its interpreter (TRITON_INTERPRET) takes CPU tensors."""
    if not _kernel_cache:
        # Triton comes with torch's CUDA builds only; it is imported where a GPU is present.
        from hytrain.kernels import triton_kernels, triton_rounded

        _kernel_cache.extend((triton_kernels, triton_rounded))
    kernels, rounded = _kernel_cache
    n = p.numel()
    if n == 0:
        return
    if is_split(p):
        p, weights = p.view(torch.uint16), weights.view(torch.uint16)
    common = {**adam_constants(hyper), "enable_fp_fusion": False}
    if moment_kind(m) == torch.float32:
        kernels.adam_kernel[(-(-n // _BLOCK),)](
            p, m, v, gradient, weights, outcome, n, **common, BLOCK=_BLOCK, num_warps=_NUM_WARPS
        )
        return
    runs = _runs(rounding, n)
    if isinstance(m, EightBit) and isinstance(v, EightBit):
        table = runs.table(_8BIT_BLOCKS * MOMENT_BLOCK, p.device)
        rounded.adam_8bit_kernel[(runs.num_programs,)](
            p, m.codes.view(torch.uint32), v.codes.view(torch.uint32), gradient, weights, outcome,
            table, hyper.step, **common, m_exponents_ptr=m.exponents, v_exponents_ptr=v.exponents,
            RUNS=table.shape[1], ROWS=_8BIT_BLOCKS, num_warps=_8BIT_NUM_WARPS,
        )  # fmt: skip
        return
    bits = [moment.view(torch.uint16) for moment in (m, v) if isinstance(moment, torch.Tensor)]
    table = runs.table(_BF16_BLOCK, p.device)
    rounded.adam_bf16_kernel[(runs.num_programs,)](
        p, *bits, gradient, weights, outcome, table, hyper.step, **common,
        RUNS=table.shape[1], BLOCK=_BF16_BLOCK, num_warps=_BF16_NUM_WARPS,
    )  # fmt: skip


def _runs(rounding: Rounding | RoundedRuns | None, n: int) -> RoundedRuns:
    assert rounding is not None  # check_moments
    if isinstance(rounding, RoundedRuns):
        return rounding
    return RoundedRuns([Run(0, n, rounding)])
