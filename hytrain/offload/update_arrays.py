"""Makes the CPU's update as training does, over its own arrays, to measure its speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from hytrain import _C
from hytrain.config import CHUNK_ELEMENTS
from hytrain.formats.moment_kinds import FP32, MomentsName, state_bytes_each
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit_then_preview
from hytrain.kernels.host_memory import host_zeros
from hytrain.kernels.moment_codes import part_of
from hytrain.kernels.moments import Rounding, native_moments
from hytrain.model.partition import align_up
from hytrain.model.state_format import StateFormat

PURPOSE = "measuring the CPU's update, for some milliseconds"


def array_bytes(moments: MomentsName) -> float:
    """Bytes per parameter of :class:`UpdateArrays`: state, two gradients and the outgoing copy."""
    return state_bytes_each(moments) + 3 * 2


class UpdateArrays:
    """State, gradients and outgoing copy of some parameters, which the kernel updates.

    It does so chunk by chunk, as in training: at the end of each the threads wait for the slowest,
    which took 5 to 9 % of an update with 15 threads on 16 cores (one H100's host).
    """

    def __init__(
        self,
        elements: int,
        moments: MomentsName = FP32,
        chunk_elements: int = CHUNK_ELEMENTS,
        *,
        threads: int = 1,
    ) -> None:
        """
        Args:
            elements: how many to update at least; rounded up to whole blocks.
            chunk_elements: the most elements of a pass; a multiple of 64.
            threads: how many touch the memory, each its own part, as a layer's state is touched,
                which decides on which nodes it lies.

        Raises:
            HostMemoryError: there is not enough memory.
        """
        self.elements = n = align_up(elements)  # whole blocks of codes
        # In huge pages, like the memory that training updates.
        how = StateFormat(moments)
        # Touched: memory that is only read would all be one page of zeros, which is in the caches.
        state, *others = (
            host_zeros(num_bytes, dtype=torch.uint8, purpose=PURPOSE, touch_threads=threads)
            for num_bytes in (how.state_bytes(n), 2 * n, 2 * n, 2 * n)
        )
        self.state = how.split(state, n)
        *self.gradients, self.out = (memory.view(torch.bfloat16) for memory in others)
        self._chunks = [
            self._chunk(slice(begin, min(n, begin + chunk_elements)))
            for begin in range(0, n, chunk_elements)
        ]

    def _chunk(self, part: slice) -> Callable[..., None]:
        """Returns the pass over a part of the arrays."""
        hyper = AdamHyper(lr=1e-3)
        return partial(
            commit_then_preview,
            self.state.master[part],
            *(part_of(moment, part.start, part.stop) for moment in self.state[1:]),
            *(Gradient(gradient[part], 1.0, hyper) for gradient in self.gradients),
            rounding=Rounding(0, 0),
            out=self.out[part],
        )

    def update(self, threads: int) -> float:
        """Runs the passes that training makes and returns their seconds."""
        begin = time.perf_counter()
        for chunk in self._chunks:
            chunk(num_threads=threads)
        return time.perf_counter() - begin

    def sweep(self, threads: int) -> float:
        """Runs a loop that only reads and writes the state, and returns its seconds."""
        moments = native_moments(*self.state[1:], None)
        begin = time.perf_counter()
        _C.read_write(self.state.master.data_ptr(), moments, self.elements, threads)
        return time.perf_counter() - begin
