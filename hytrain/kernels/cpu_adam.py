"""Adam on the CPU, in passes: commit, preview, commit_then_preview, publish.

State is ``(p, m, v)``: fp32 master weights and the two moments, these in fp32, bf16 or 8-bit codes
(``hytrain.kernels.moments``). ``commit`` makes one step,
``preview`` writes what the weights would be after it and leaves the state alone, and
``commit(g)`` followed by ``publish`` equals ``preview(g)`` bit for bit. Results do not depend on
the number of threads, on alignment or on the instruction set.

Every argument is checked before any memory is touched; the compiled kernels check nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hytrain import _C
from hytrain._C import active_isa, available_isas, set_isa
from hytrain.errors import KernelArgumentError
from hytrain.kernels.moments import (
    MOMENT_BLOCK,
    EightBit,
    Moment,
    Rounding,
    check_moments,
    native_moments,
)
from hytrain.kernels.split_weights import REMAINDER

__all__ = [
    "AdamHyper",
    "Gradient",
    "active_isa",
    "available_isas",
    "commit",
    "commit_split",
    "commit_then_preview",
    "preview",
    "publish",
    "set_isa",
    "sum_of_squares",
]

active_isa()  # a wrong HYTRAIN_CPU_ISA is a ValueError here, not in the middle of a step

_FLOAT32_MAX = torch.finfo(torch.float32).max
_MAX_STEP = 2**53  # beyond this a step number is not exact in float64
MAX_THREADS = 1024

_NATIVE_DTYPES = {
    torch.float32: _C.DType.float32,
    torch.bfloat16: _C.DType.bfloat16,
    torch.float16: _C.DType.float16,
}
_NO_OUT = _C.Outgoing(0, _C.DType.float32, False)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamHyper:
    """Hyper-parameters of one step, as the user wrote them.

    Attributes:
        lr: Learning rate, finite and not negative.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the denominator, finite and not negative.
        weight_decay: Finite and not negative.
        step: Number of this step, 1 for the first.
        decoupled_decay: True for AdamW, False for Adam with L2 added to the gradient.
        bias_correction: Whether the moments are corrected for their start at zero.
        values: If another optimizer updates the group on the device: what that has read from it.
            The kernels then use none of the other values.

    Raises:
        KernelArgumentError: A value is outside its range.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    decoupled_decay: bool = True
    bias_correction: bool = True
    values: Any = None

    def __post_init__(self) -> None:
        for name, value in (
            ("lr", self.lr),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
        ):
            if not 0.0 <= value <= _FLOAT32_MAX:  # a NaN fails this too
                raise KernelArgumentError(
                    f"{name} is {value}; it must be finite in fp32 and not negative: "
                    f"change {name} in the optimizer's parameter group"
                )
        for name, value in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= value < 1.0:
                raise KernelArgumentError(
                    f"{name} is {value}; it must be in [0, 1): "
                    "change betas in the optimizer's parameter group"
                )
        if not 1 <= self.step <= _MAX_STEP:
            raise KernelArgumentError(
                f"step is {self.step}; steps are counted from 1 up to {_MAX_STEP}"
            )
        self._check_derived()

    def _check_derived(self) -> None:
        """Checks that the fp32 constants that the kernel derives from these are finite too."""
        correction = 1.0 - self.beta1**self.step if self.bias_correction else 1.0
        if self.lr / correction > _FLOAT32_MAX or self.lr * self.weight_decay > _FLOAT32_MAX:
            raise KernelArgumentError(
                f"lr {self.lr} with beta1 {self.beta1}, step {self.step} and weight_decay "
                f"{self.weight_decay} gives an update beyond fp32's range: lower lr"
            )

    def native(self) -> _C.AdamHyper:
        """The same values for the compiled extension."""
        return _C.AdamHyper(
            float(self.lr),
            float(self.beta1),
            float(self.beta2),
            float(self.eps),
            float(self.weight_decay),
            int(self.step),
            self.decoupled_decay,
            self.bias_correction,
        )


@dataclass(frozen=True, slots=True)
class Gradient:
    """One gradient and how to apply it: the step uses ``scale * tensor``.

    Attributes:
        tensor: Contiguous CPU tensor, as many elements as the state; fp32, bf16 or fp16.
        scale: Clip coefficient divided by loss scale; rounded to fp32.
        hyper: Hyper-parameters of the step that this gradient belongs to.

    Raises:
        KernelArgumentError: ``scale`` is not finite in fp32.
    """

    tensor: torch.Tensor
    scale: float
    hyper: AdamHyper

    def __post_init__(self) -> None:
        if not abs(self.scale) <= _FLOAT32_MAX:
            raise KernelArgumentError(
                f"scale is {self.scale}; it must be finite in fp32. A step whose norm overflowed "
                "is to be skipped, not applied"
            )

    def native(self) -> _C.GradientStep:
        """The same for the compiled extension; the tensor must outlive it."""
        return _C.GradientStep(
            self.tensor.data_ptr(),
            _NATIVE_DTYPES[self.tensor.dtype],
            float(self.scale),
            self.hyper.native(),
        )


def commit(
    p: torch.Tensor,
    m: Moment,
    v: Moment,
    gradient: Gradient,
    *,
    rounding: Rounding | None = None,
    out: torch.Tensor | None = None,
    num_threads: int = 1,
    non_temporal: bool = False,
) -> None:
    """Makes one Adam step on ``(p, m, v)`` in place.

    Args:
        p: Master weights, n elements, fp32, CPU, contiguous.
        m: First moment, n elements: fp32, bf16 or ``EightBit``; CPU, contiguous.
        v: Second moment, likewise, of the same kind.
        gradient: The gradient, its scale, the step's hyper-parameters.
        rounding: What the random bits that round bf16 moments and codes depend on; the run must
            lie in one parameter. Not used with fp32 moments.
        out: If given, receives the new ``p`` rounded to its dtype (fp32, bf16 or fp16).
        num_threads: Upper bound on the threads; the result does not depend on it.
        non_temporal: Writes ``out`` past the cache, for a copy that the CPU will not read soon.

    Raises:
        KernelArgumentError: A buffer is unusable; nothing was touched.
    """
    check_moments(m, v, rounding, stores=True)
    _check_buffers(_state(p, m, v), [("gradient", gradient.tensor)], out, num_threads)
    _C.commit(
        p.data_ptr(),
        native_moments(m, v, rounding),
        p.numel(),
        gradient.native(),
        _native_out(out, non_temporal),
        num_threads,
    )


def commit_split(
    copy: torch.Tensor,
    remainder: torch.Tensor,
    m: Moment,
    v: Moment,
    gradient: Gradient,
    *,
    rounding: Rounding | None = None,
    num_threads: int = 1,
) -> None:
    """``commit`` of split master weights (``hytrain.kernels.split_weights``), in place.

    Args:
        copy: Training copy, n elements, bf16, CPU, contiguous; receives the new one.
        remainder: The other halves, n elements, int16, CPU, contiguous.
        m, v, gradient, rounding, num_threads: As in ``commit``.

    Raises:
        KernelArgumentError: A buffer is unusable; nothing was touched.
    """
    check_moments(m, v, rounding, stores=True)
    weights: list[_Part] = [
        ("remainder", remainder, (REMAINDER,), 0),
        ("copy", copy, (torch.bfloat16,), 0),
    ]
    state = [*weights, *_moments(m, v)]
    _check_buffers(state, [("gradient", gradient.tensor)], None, num_threads)
    _C.commit_split(
        copy.data_ptr(),
        remainder.data_ptr(),
        native_moments(m, v, rounding),
        remainder.numel(),
        gradient.native(),
        num_threads,
    )


def preview(
    p: torch.Tensor,
    m: Moment,
    v: Moment,
    gradient: Gradient,
    *,
    out: torch.Tensor,
    num_threads: int = 1,
    non_temporal: bool = False,
) -> None:
    """Writes to ``out`` what ``commit`` with this gradient would write; the state stays as it is.

    Arguments and errors are those of ``commit``, but ``out`` is required, and nothing else is
    rounded: a step takes the moments before they are rounded.
    """
    check_moments(m, v, None, stores=False)
    _check_buffers(_state(p, m, v), [("gradient", gradient.tensor)], out, num_threads)
    _C.preview(
        p.data_ptr(),
        native_moments(m, v, None),
        p.numel(),
        gradient.native(),
        _native_out(out, non_temporal),
        num_threads,
    )


def commit_then_preview(
    p: torch.Tensor,
    m: Moment,
    v: Moment,
    previous: Gradient,
    current: Gradient,
    *,
    rounding: Rounding | None = None,
    out: torch.Tensor,
    num_threads: int = 1,
    non_temporal: bool = False,
) -> None:
    """``commit(previous)``, then ``preview(current)`` into ``out``, in one sweep over memory.

    The preview sees the moments as they are stored. The two gradients may be the same memory. Other
    arguments and errors are those of ``commit``.
    """
    check_moments(m, v, rounding, stores=True)
    gradients = [("previous gradient", previous.tensor), ("current gradient", current.tensor)]
    _check_buffers(_state(p, m, v), gradients, out, num_threads)
    _C.commit_then_preview(
        p.data_ptr(),
        native_moments(m, v, rounding),
        p.numel(),
        previous.native(),
        current.native(),
        _native_out(out, non_temporal),
        num_threads,
    )


def publish(
    p: torch.Tensor, *, out: torch.Tensor, num_threads: int = 1, non_temporal: bool = False
) -> None:
    """Writes ``p``, rounded to the dtype of ``out``, to ``out``; errors as for ``commit``."""
    _check_buffers([("p", p, (torch.float32,), 0)], [], out, num_threads)
    _C.publish(p.data_ptr(), p.numel(), _native_out(out, non_temporal), num_threads)


def sum_of_squares(tensor: torch.Tensor, *, num_threads: int = 1) -> float:
    """Sum of squares in float64, in an order that depends on the length alone.

    Args:
        tensor: Contiguous CPU tensor of fp32, bf16 or fp16.
        num_threads: Upper bound on the threads; the result does not depend on it.

    Returns:
        The sum: finite exactly when every element is.

    Raises:
        KernelArgumentError: The tensor or the thread count is unusable.
    """
    _check_tensor("tensor", tensor, tuple(_NATIVE_DTYPES))
    _check_threads(num_threads)
    dtype = _NATIVE_DTYPES[tensor.dtype]
    return _C.sum_of_squares(tensor.data_ptr(), dtype, tensor.numel(), num_threads)


_Named = tuple[str, torch.Tensor]
# Name, tensor, dtypes, and how many elements it has for each block, or 0: as many as p.
_Part = tuple[str, torch.Tensor, tuple[torch.dtype, ...], int]


def _state(p: torch.Tensor, m: Moment, v: Moment) -> list[_Part]:
    return [("p", p, (torch.float32,), 0), *_moments(m, v)]


def _moments(m: Moment, v: Moment) -> list[_Part]:
    parts: list[_Part] = []
    for name, moment in (("m", m), ("v", v)):
        if isinstance(moment, EightBit):
            parts.append((f"codes of {name}", moment.codes, (torch.uint8,), MOMENT_BLOCK))
            parts.append((f"exponents of {name}", moment.exponents, (torch.uint8,), 1))
        else:
            parts.append((name, moment, (torch.float32, torch.bfloat16), 0))
    return parts


def _native_out(out: torch.Tensor | None, non_temporal: bool) -> _C.Outgoing:
    if out is None:
        return _NO_OUT
    return _C.Outgoing(out.data_ptr(), _NATIVE_DTYPES[out.dtype], non_temporal)


def _check_buffers(
    state: Sequence[_Part],
    gradients: Sequence[_Named],
    out: torch.Tensor | None,
    num_threads: int,
) -> None:
    """Refuses whatever the kernel could not run on; reads nothing but the tensors' headers."""
    outgoing = [] if out is None else [("out", out)]
    others = [(*named, tuple(_NATIVE_DTYPES), 0) for named in (*gradients, *outgoing)]
    num_elements = state[0][1].numel()
    for name, tensor, dtypes, _ in (*state, *others):
        _check_tensor(name, tensor, dtypes)
    for name, tensor, _, per_block in (*state, *others):
        wanted = per_block * -(-num_elements // MOMENT_BLOCK) or num_elements
        if tensor.numel() != wanted:
            remedy = f"it needs {wanted}" if per_block else "pass slices of equal length"
            first = state[0][0]
            raise KernelArgumentError(
                f"{name} has {tensor.numel()} elements but {first} has {num_elements}: {remedy}"
            )
    # Two gradients are only read and may share memory; whatever is written may share none.
    written = [*((name, tensor) for name, tensor, _, _ in state), *outgoing]
    for index, (name, tensor) in enumerate(written):
        for other_name, other in (*written[index + 1 :], *gradients):
            _check_apart(name, tensor, other_name, other)
    _check_threads(num_threads)


def _check_tensor(name: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if tensor.device.type != "cpu":
        raise KernelArgumentError(
            f"{name} is on {tensor.device}; the kernel runs on cpu tensors: copy it to the host"
        )
    if tensor.dtype not in dtypes:
        allowed = ", ".join(str(dtype) for dtype in dtypes)
        raise KernelArgumentError(f"{name} is {tensor.dtype}; allowed: {allowed}: convert it")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise KernelArgumentError(
            f"{name} of shape {tuple(tensor.shape)} is not contiguous: "
            f"pass {name}.contiguous() or a flat slice"
        )


def _check_apart(name: str, tensor: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    begin, other_begin = tensor.data_ptr(), other.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    other_end = other_begin + other.numel() * other.element_size()
    if begin < other_end and other_begin < end:
        raise KernelArgumentError(
            f"{name} and {other_name} overlap by {min(end, other_end) - max(begin, other_begin)} "
            "bytes; each needs memory of its own: pass separate buffers"
        )


def _check_threads(num_threads: int) -> None:
    if not 1 <= num_threads <= MAX_THREADS:
        raise KernelArgumentError(
            f"num_threads is {num_threads}; it must be in [1, {MAX_THREADS}]: "
            "set offload.cpu_threads"
        )
