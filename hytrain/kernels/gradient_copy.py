"""Takes a gradient over: one pass that copies it into a layer's flat buffer and sums its squares.

Separately, the norm would read every gradient once more. Where a gradient is final as it was copied
(one rank, one micro-batch, one use of each parameter) the partial sums are all that the norm needs.
Many small gradients are taken over together instead, and read once more: a launch for each of them
would take the host longer than the GPU needs for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hytrain.kernels.cpu_adam import sum_of_squares

_BLOCK = 2048
_MAX_PROGRAMS = 1024
_kernel_cache: list[Any] = []


def num_partials(numel: int, device: torch.device) -> int:
    """Partial sums that a gradient of ``numel`` elements leaves; fixed, and so is their order."""
    if device.type != "cuda":
        return 1
    return min(_MAX_PROGRAMS, max(1, -(-numel // _BLOCK)))


class GradientCopier:
    """Copies of one layer's gradients, and the squares of what was copied.

    Attributes:
        squares: float64 partial sums of all parameters, on the device; valid for parameters that
            were copied since.
    """

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        """
        Args:
            numels: elements of each parameter of the layer.
            device: where gradients are.
        """
        counts = [num_partials(numel, device) for numel in numels]
        self.squares = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        self._parts = list(self.squares.split(counts))

    def copy(self, index: int, gradient: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies, and sums the squares of the destination's new values, in the current stream.

        Args:
            index: number of the parameter in the layer.
            gradient: any shape and dtype, dense.
            destination: contiguous, as many elements, the layer's gradient dtype.
        """
        # A part a parameter: kernels of different parameters never write to the same sums. The
        # next backward overwrites them, behind the read of them on the same stream.
        part = self._parts[index]
        if gradient.device.type != "cuda":
            reference_copy(gradient, destination, part)
            return
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        if not _kernel_cache:
            from hytrain.kernels.triton_kernels import copy_squares_kernel

            _kernel_cache.append(copy_squares_kernel)
        n, programs = gradient.numel(), part.numel()
        per_program = -(-n // (programs * _BLOCK)) * _BLOCK
        _kernel_cache[0][(programs,)](
            gradient, destination, part, n, per_program, BLOCK=_BLOCK, num_warps=8
        )


def reference_copy(gradient: torch.Tensor, destination: torch.Tensor, part: torch.Tensor) -> None:
    """The slow twin of :meth:`GradientCopier.copy`, on any device: the whole sum in one element."""
    destination.view(gradient.shape).copy_(gradient)
    part.zero_()
    part[0] = (
        sum_of_squares(destination.view(-1))
        if destination.device.type == "cpu"
        else destination.double().pow(2).sum()
    )


def copy_together(destinations: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Copies each gradient to its destination, of the same shape, in as few launches as can be."""
    torch._foreach_copy_(list(destinations), list(gradients))  # pyright: ignore


def joined(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """Two or more gradients of one dtype one after the other, 1-D, in one call and one launch."""
    return torch._utils._flatten_dense_tensors(list(gradients))  # pyright: ignore


def add_together(destinations: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Adds each gradient to its destination, of the same shape, in as few launches as can be."""
    torch._foreach_add_(list(destinations), list(gradients))  # pyright: ignore
