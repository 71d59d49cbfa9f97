"""Adam in plain torch: the slow twin that the CPU kernel is tested against.

Adam is algorithm 1 of Kingma and Ba, "Adam: A Method for Stochastic Optimization" (ICLR 2015,
arXiv:1412.6980); decoupled decay is algorithm 2 of Loshchilov and Hutter, "Decoupled Weight Decay
Regularization" (ICLR 2019, arXiv:1711.05101), with the decay multiplied by the learning rate as
torch.optim.AdamW does. With g the scaled gradient and t the step:

    L2:         g  = g + weight_decay * p          decoupled:  p = p * (1 - lr * weight_decay)
    moments:    m' = beta1 * m + (1 - beta1) * g               v' = beta2 * v + (1 - beta2) * g^2
    correction: m^ = m' / (1 - beta1^t)                        v^ = v' / (1 - beta2^t)
    step:       p' = p - lr * m^ / (sqrt(v^) + eps)
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hytrain.kernels.cpu_adam import Gradient

__all__ = ["AdamState", "adam_step_float32", "adam_step_float64"]


class AdamState(NamedTuple):
    """Master weights and moments, n elements each, of one dtype."""

    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor


def adam_step_float64(state: AdamState, gradient: Gradient) -> AdamState:
    """One step in float64: the truth, to within what fp32 can tell.

    Args:
        state: Any floating dtype; not modified.
        gradient: Its tensor may be of any floating dtype; its scale is rounded to fp32 as the
            kernel's argument is, everything else is exact.

    Returns:
        New float64 tensors.
    """
    return _adam_step(state, gradient, torch.float64)


def adam_step_float32(state: AdamState, gradient: Gradient) -> AdamState:
    """One step in fp32 with separate roundings: close to the kernel, which fuses some of them.

    Args and result as for ``adam_step_float64``, in fp32.
    """
    return _adam_step(state, gradient, torch.float32)


def _adam_step(state: AdamState, gradient: Gradient, dtype: torch.dtype) -> AdamState:
    hyper = gradient.hyper
    p, m, v = (tensor.to(dtype) for tensor in state)
    scale = torch.tensor(gradient.scale, dtype=torch.float32).to(dtype)
    g = gradient.tensor.to(dtype) * scale
    if hyper.decoupled_decay:
        p = p * (1.0 - hyper.lr * hyper.weight_decay)
    else:
        g = g + hyper.weight_decay * p
    m = m + (1.0 - hyper.beta1) * (g - m)
    v = hyper.beta2 * v + (1.0 - hyper.beta2) * g * g
    correction1 = 1.0 - hyper.beta1**hyper.step if hyper.bias_correction else 1.0
    correction2 = 1.0 - hyper.beta2**hyper.step if hyper.bias_correction else 1.0
    denominator = v.sqrt() / math.sqrt(correction2) + hyper.eps
    return AdamState(p - (hyper.lr / correction1) * (m / denominator), m, v)
