"""Takes gradients over: a pass that copies them into a layer's flat buffer and sums their squares.

Done apart, the norm would read every gradient once more. If a gradient is final as it was copied
(one rank, one micro-batch, one use of each parameter) the partial sums are all that the norm needs.
A layer's parameters are copied one by one, or all in one launch: the same values, and the same
sums, bit for bit. If they are so small that even that launch takes the host longer than the GPU
needs for all, torch joins them, and the norm reads them once more.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from hytrain.kernels.cpu_adam import sum_of_squares
from hytrain.kernels.launch_tables import (
    ADDRESSES,
    SUM_BLOCK,
    TRITON_DTYPES,
    VECTOR,
    RowTable,
    elements_of_partial,
    num_partials,
    row_tables,
    triton_dtypes,
)


class _Kernels(NamedTuple):
    """Triton's kernels and dtypes."""

    one: Any
    all: Any
    dtypes: dict[torch.dtype, Any]


@functools.cache
def _kernels() -> _Kernels:
    # Triton comes with torch's CUDA builds only; it is imported where a GPU is present.
    from hytrain.kernels.triton_kernels import copy_squares_grouped_kernel, copy_squares_kernel

    return _Kernels(copy_squares_kernel, copy_squares_grouped_kernel, triton_dtypes())


class GradientCopier:
    """Copies one layer's gradients, and sums the squares of what was copied.

    Attributes:
        squares: float64 partial sums of all parameters, on the device; valid for parameters that
            were copied since.
    """

    def __init__(self, places: Sequence[tuple[int, int]], device: torch.device) -> None:
        """
        Args:
            places: for each parameter, its first element in the layer and its number of elements.
            device: where gradients are.
        """
        is_cuda = device.type == "cuda"
        counts = [num_partials(numel) if is_cuda else 1 for _, numel in places]
        self.squares = torch.zeros(sum(counts), dtype=torch.float64, device=device)
        self._parts = list(self.squares.split(counts))
        self._places = places
        self._is_even = all(word % VECTOR == 0 for place in places for word in place)
        self._tables: list[RowTable] = []

    def copy(self, index: int, gradient: torch.Tensor, destination: torch.Tensor) -> None:
        """Copies, and sums the squares of the destination's new values, in the current stream.

        Args:
            index: number of the parameter in the layer.
            gradient: any shape and dtype, dense.
            destination: contiguous, as many elements, the layer's gradient dtype.
        """
        # One part per parameter: kernels of different parameters never write to the same sums. The
        # next backward overwrites them, after they were read on the same stream.
        part = self._parts[index]
        if gradient.device.type != "cuda":
            reference_copy(gradient, destination, part)
            return
        if not gradient.is_contiguous():
            gradient = gradient.contiguous()
        n, programs = gradient.numel(), part.numel()
        _kernels().one[(programs,)](
            gradient, destination, part, n, elements_of_partial(n, programs),
            BLOCK=SUM_BLOCK, num_warps=8,
        )  # fmt: skip

    def copy_all(self, gradients: Sequence[torch.Tensor], layer: torch.Tensor) -> None:
        """:meth:`copy` of every parameter, with one launch for each 16 of them if possible.

        Args:
            gradients: one for each parameter, of one dtype, dense.
            layer: the layer's gradient, 1-D and contiguous; between parameters nothing is written.
        """
        if layer.device.type == "cuda" and self.triton_copy_all(gradients, layer):
            return
        for index, (gradient, (begin, numel)) in enumerate(
            zip(gradients, self._places, strict=True)
        ):
            self.copy(index, gradient, layer[begin : begin + numel])

    def triton_copy_all(self, gradients: Sequence[torch.Tensor], layer: torch.Tensor) -> bool:
        """:meth:`copy_all` by Triton; its interpreter (TRITON_INTERPRET) takes CPU tensors.

        Returns:
            False if it did nothing: not all lengths, places and addresses are multiples of VECTOR,
            so that Triton sums some parameters in another order than others; or Triton has no such
            dtype.
        """
        if not self._is_even or gradients[0].dtype not in TRITON_DTYPES:
            return False
        # Kept to the end: what is contiguous may be a copy, whose memory the launch still reads. On
        # this stream what takes that memory next comes after the launch.
        gradients = [gradient.contiguous() for gradient in gradients]
        addresses = [gradient.data_ptr() for gradient in gradients]
        if functools.reduce(operator.or_, addresses, layer.data_ptr()) % VECTOR:
            return False
        kernels = _kernels()
        if not self._tables:
            self._tables = self._make_tables()
        for table in self._tables:
            kernels.all[(table.programs,)](
                *table.addresses(addresses), table.words, layer, self.squares,
                GRADIENT=kernels.dtypes[gradients[0].dtype], ROWS=ADDRESSES, BLOCK=SUM_BLOCK,
                num_warps=8,
            )  # fmt: skip
        return True

    def _make_tables(self) -> list[RowTable]:
        """Tables with the fields elements, first element, elements of a program, first sum."""
        programs = [part.numel() for part in self._parts]
        fields = [
            (n, begin, elements_of_partial(n, count), partial)
            for (begin, n), count, partial in zip(
                self._places, programs, accumulate(programs, initial=0), strict=False
            )
        ]
        return row_tables(programs, fields, self.squares.device)


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
