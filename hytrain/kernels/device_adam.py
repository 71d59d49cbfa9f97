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

_BLOCK = 2048
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
    m: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor,
    outcome: torch.Tensor,
    hyper: AdamHyper,
) -> None:
    """One step in place, unless skipped: p, m, v and the training copy.

    Args:
        p, m, v: fp32 state, n elements each, on the device.
        gradient: n elements, fp32, bf16 or fp16, on the device.
        weights: the training copy, n elements, overwritten with the cast of p.
        outcome: fp32 tensor of two elements on the device: gradient scale, and 1.0 where the
            step is skipped (then nothing is written).
        hyper: hyper-parameters of the step.
    """
    if p.device.type == "cuda":
        _cuda_adam(p, m, v, gradient, weights, outcome, hyper)
        return
    scale, skip = (float(value) for value in outcome)
    if skip == 0.0:
        commit(p, m, v, Gradient(gradient, scale, hyper), out=weights)


def _cuda_adam(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor,
    outcome: torch.Tensor,
    hyper: AdamHyper,
) -> None:
    if not _kernel_cache:
        # Triton comes with torch's CUDA builds only; it is imported where a GPU is present.
        from hytrain.kernels.triton_kernels import adam_kernel

        _kernel_cache.append(adam_kernel)
    n = p.numel()
    if n == 0:
        return
    grid = (-(-n // _BLOCK),)
    _kernel_cache[0][grid](
        p, m, v, gradient, weights, outcome, n,
        **adam_constants(hyper), BLOCK=_BLOCK, num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip


def reference_device_adam(
    p: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    weights: torch.Tensor,
    outcome: torch.Tensor,
    hyper: AdamHyper,
) -> None:
    """The slow twin of :func:`device_adam`, in plain torch operations on any device."""
    if float(outcome[1]) != 0.0:
        return
    c = adam_constants(hyper)
    g = gradient.float() * outcome[0] + c["l2"] * p
    m.lerp_(g, c["one_minus_beta1"])
    v.mul_(c["beta2"]).addcmul_(g, g, value=c["one_minus_beta2"])
    denominator = v.sqrt().mul_(c["inv_sqrt_correction2"]).add_(c["eps"])
    p.mul_(c["decay"]).addcdiv_(m, denominator, value=c["neg_step_size"])
    weights.copy_(p)
