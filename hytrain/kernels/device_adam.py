"""Adam on the device, for the layers whose placement is the GPU: one kernel a segment.

The clip coefficient and the skip flag are read from device memory, so nothing here waits for the
host. The arithmetic is that of the CPU kernel (same constants, fused multiply-adds, correctly
rounded division and square root). torch's fused AdamW refuses bf16 gradients with fp32 state.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit
from hytrain.kernels.moments import (
    MOMENT_BLOCK,
    EightBit,
    Moment,
    Rounding,
    check_moments,
    moment_kind,
    rounding_key,
)

_BLOCK = 2048
_PERIOD = 2**32  # of the lower half of an element's index; the upper half is part of the key
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
    rounding: Rounding | None = None,
) -> None:
    """One step in place, unless skipped: p, m, v and the training copy.

    Args:
        p: fp32 master weights, n elements, on the device.
        m, v: the moments, n elements each, both fp32, bf16 or ``EightBit``, on the device.
        gradient: n elements, fp32, bf16 or fp16, on the device.
        weights: the training copy, n elements, overwritten with the cast of p.
        outcome: fp32 tensor of two elements on the device: gradient scale, and 1.0 where the
            step is skipped (then nothing is written).
        hyper: hyper-parameters of the step.
        rounding: what the random bits depend on that round bf16 moments and codes, bitwise as on
            the CPU; then p is a run of one parameter. With fp32 moments it is not used.

    Raises:
        KernelArgumentError: the moments differ in kind, or lack ``rounding``.
    """
    check_moments(m, v, rounding, stores=True)
    if p.device.type == "cuda":
        cuda_adam(p, m, v, gradient, weights, outcome, hyper, rounding)
        return
    scale, skip = (float(value) for value in outcome)
    if skip == 0.0:
        commit(p, m, v, Gradient(gradient, scale, hyper), rounding=rounding, out=weights)


def cuda_adam(
    p: torch.Tensor,
    m: Moment,
    v: Moment,
    gradient: torch.Tensor,
    weights: torch.Tensor,
    outcome: torch.Tensor,
    hyper: AdamHyper,
    rounding: Rounding | None,
) -> None:
    """:func:`device_adam` by Triton; its interpreter (TRITON_INTERPRET) takes CPU tensors."""
    if not _kernel_cache:
        # Triton comes with torch's CUDA builds only; it is imported where a GPU is present.
        from hytrain.kernels import triton_kernels

        _kernel_cache.append(triton_kernels)
    kernels = _kernel_cache[0]
    n = p.numel()
    if n == 0:
        return
    common = {**adam_constants(hyper), "num_warps": 8, "enable_fp_fusion": False}
    if moment_kind(m) == torch.float32:
        kernels.adam_kernel[(-(-n // _BLOCK),)](
            p, m, v, gradient, weights, outcome, n, **common, BLOCK=_BLOCK
        )
        return
    assert rounding is not None  # check_moments
    for begin, end, key, first in _key_runs(rounding, hyper.step, n):
        arrays = [tensor[begin:end] for tensor in (p, gradient, weights)]
        # As int32, so that the kernel is compiled once.
        bits = {name: (word ^ 2**31) - 2**31 for name, word in (("key", key), ("first", first))}
        _launch_rounded(kernels, arrays, (m, v), begin, outcome, common | bits)


def _key_runs(rounding: Rounding, step: int, n: int) -> list[tuple[int, int, int, int]]:
    """(begin, end, key, lower half of the first index) of the runs that have one key each."""
    runs: list[tuple[int, int, int, int]] = []
    begin = 0
    while begin < n:
        high, low = divmod(rounding.first_index + begin, _PERIOD)
        end = min(n, begin + _PERIOD - low)
        runs.append((begin, end, rounding_key(rounding, step, high), low))
        begin = end
    return runs


def _launch_rounded(
    kernels: Any,
    arrays: list[torch.Tensor],
    moments: tuple[Moment, Moment],
    begin: int,
    outcome: torch.Tensor,
    common: dict[str, Any],
) -> None:
    p, gradient, weights = arrays
    n = p.numel()
    grid = (-(-n // _BLOCK),)
    m, v = moments
    if isinstance(m, EightBit) and isinstance(v, EightBit):
        exponents = [moment.exponents[begin // MOMENT_BLOCK :] for moment in (m, v)]
        kernels.adam_8bit_kernel[grid](
            p, m.codes[begin:], v.codes[begin:], gradient, weights, outcome, n, **common,
            m_exponents_ptr=exponents[0], v_exponents_ptr=exponents[1],
            ROWS=_BLOCK // MOMENT_BLOCK, COLUMNS=MOMENT_BLOCK,
        )  # fmt: skip
        return
    bits = [
        moment[begin:].view(torch.uint16) for moment in moments if isinstance(moment, torch.Tensor)
    ]
    kernels.adam_bf16_kernel[grid](
        p, bits[0], bits[1], gradient, weights, outcome, n, **common,
        BLOCK=_BLOCK,
    )  # fmt: skip
