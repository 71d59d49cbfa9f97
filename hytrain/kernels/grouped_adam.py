"""Adam on the device for many segments in few launches, with fp32 moments.

A launch reads from a table in device memory where each segment's elements are. Of all that, only
the gradients' addresses and the constants of the step change from one step to the next.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.kernels.device_adam import adam_constants, device_adam
from hytrain.kernels.launch_tables import NEVER, VECTOR, triton_dtypes
from hytrain.kernels.split_weights import REMAINDER

_BLOCK = 2048  # elements of a program, as in device_adam
_PROGRAMS_LEFT_ROOM = 2
"""Programs per multiprocessor of a launch that leaves the rest of it to others. Updates of 52 M
elements took 1.05 times as long, with one program 1.13 times, and ten small kernels of another
stream beside them 0.15 ms instead of 2.5 (one H100, a kernel with the same loads and stores, but no
table)."""
_NUM_FIELDS = 8
_GRADIENT, _GROUP = 6, 7
"""Two of a table's fields, which are: first program, elements, p, m, v, weights, gradient, and
parameter group."""
_FEWEST_ROWS = 16  # so that launches of few segments share a compiled kernel
_NUM_CONSTANTS = 8
_NUM_BUFFERS = 2
_kernel_cache: list[Any] = []


class Segment(NamedTuple):
    """Elements of one parameter group.

    Attributes:
        p: master weights, fp32 or the remainders of split ones, n elements; on the device, like
            all of these.
        m, v: the moments, fp32, n elements each.
        weights: the training copy, n elements.
        gradient: index of its gradient among those given to :meth:`GroupedAdam.begin_step`.
        first: index of its first element in that gradient.
        group: index of its hyper-parameters among those given there.
    """

    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    weights: torch.Tensor
    gradient: int
    first: int
    group: int


@dataclass(frozen=True, slots=True)
class _Launch:
    rows: int
    programs: int
    master_dtype: torch.dtype
    gradient_dtype: torch.dtype
    weights_dtype: torch.dtype
    table: torch.Tensor  # its part of the table on the device


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A table on the host, on its way to the device."""

    words: torch.Tensor
    integers: np.ndarray[Any, np.dtype[np.int64]]
    constants: np.ndarray[Any, np.dtype[np.float32]]
    sent: torch.cuda.Event | None


class GroupedAdam:
    """Launches over segments that stay in place; their gradients may move with every step.

    Addresses are kept, not tensors: these must live for as long as launches are made.
    """

    def __init__(
        self,
        launches: Sequence[Sequence[Segment]],
        gradient_dtypes: Sequence[torch.dtype],
        num_groups: int,
        device: torch.device,
    ) -> None:
        """
        Args:
            launches: each one's segments, at least one, of one gradient dtype and weights dtype.
            gradient_dtypes: the dtype of each gradient.
            num_groups: number of parameter groups.
            device: where all tensors are. On a GPU, call this on the stream of the launches: the
                table's memory is that stream's, and what takes it later follows the last launch.
        """
        self._rows = max(map(len, launches), default=1)
        self._rows = max(_FEWEST_ROWS, 1 << (self._rows - 1).bit_length())
        per_launch = _NUM_FIELDS * self._rows
        num_words = len(launches) * per_launch + num_groups * _NUM_CONSTANTS // 2
        self._device_words = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._few_programs = _few_programs(device)
        self.constants = self._device_words[len(launches) * per_launch :].view(torch.float32)
        """``adam_constants`` of the step for each parameter group, fp32 on the device."""
        self._launches: list[_Launch] = []
        tables = np.zeros((len(launches), _NUM_FIELDS, self._rows), dtype=np.int64)
        for number, segments in enumerate(launches):
            programs = self._fill(tables[number], segments)
            part = self._device_words[number * per_launch : (number + 1) * per_launch]
            dtype = gradient_dtypes[segments[0].gradient]
            master, weights = segments[0].p.dtype, segments[0].weights.dtype
            self._launches.append(_Launch(len(segments), programs, master, dtype, weights, part))
        self._find_gradients(launches, gradient_dtypes)
        self._fixed_bits = np.array(
            [np.bitwise_or.reduce(t[1:_GRADIENT], axis=None) for t in tables], dtype=np.int64
        )
        self._buffers = [self._buffer(tables, num_words, device) for _ in range(_NUM_BUFFERS)]
        self._next = 0
        self.aligned: list[bool] = []
        """For each launch of the step, whether it moves vectors."""
        self._hyper: Sequence[AdamHyper] = ()

    def _fill(self, table: np.ndarray[Any, Any], segments: Sequence[Segment]) -> int:
        """Writes what never changes; returns the number of programs."""
        table[0] = NEVER  # rows after the last one are never reached
        program = 0
        for row, segment in enumerate(segments):
            addresses = [t.data_ptr() for t in (*segment[:3], segment.weights)]
            n = segment.p.numel()
            table[:_GRADIENT, row] = program, n, *addresses
            table[_GROUP, row] = segment.group
            program += -(-n // _BLOCK)
        return program

    def _find_gradients(
        self, launches: Sequence[Sequence[Segment]], dtypes: Sequence[torch.dtype]
    ) -> None:
        """Finds where gradients' addresses are written, and what they are computed from."""
        places = [
            ((number * _NUM_FIELDS + _GRADIENT) * self._rows + row, segment)
            for number, segments in enumerate(launches)
            for row, segment in enumerate(segments)
        ]
        self._places = np.array([place for place, _ in places], dtype=np.int64)
        self._gradient_of = np.array([s.gradient for _, s in places], dtype=np.int64)
        first_bytes = [s.first * dtypes[s.gradient].itemsize for _, s in places]
        self._first_bytes = np.array(first_bytes, dtype=np.int64)
        self._begins = np.cumsum([0, *map(len, launches[:-1])])

    def _buffer(
        self, tables: np.ndarray[Any, Any], num_words: int, device: torch.device
    ) -> _Buffer:
        is_cuda = device.type == "cuda"
        words = torch.zeros(num_words, dtype=torch.int64, pin_memory=is_cuda)
        integers = words.numpy()
        integers[: tables.size] = tables.reshape(-1)
        constants = integers[tables.size :].view(np.float32).reshape(-1, _NUM_CONSTANTS)
        return _Buffer(words, integers, constants, torch.cuda.Event() if is_cuda else None)

    def begin_step(self, gradients: Sequence[torch.Tensor], hyper: Sequence[AdamHyper]) -> None:
        """Sends the table of a step to the device, on the current stream, which launches follow.

        Args:
            gradients: 1-D, contiguous, of ``gradient_dtypes``. Their memory must not be given to
                another stream before the launches have read them (``record_stream``).
            hyper: each parameter group's hyper-parameters.
        """
        if not self._launches:
            return
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        if buffer.sent is not None:
            # The copy reads the buffer when the stream has come to it: without this wait the
            # addresses of this step could go to the launches of the step before the last one.
            buffer.sent.synchronize()
        bases = np.array([gradient.data_ptr() for gradient in gradients], dtype=np.int64)
        addresses = bases[self._gradient_of] + self._first_bytes
        buffer.integers[self._places] = addresses
        # Computed in float64, rounded to fp32 here as a kernel's argument is at the call.
        buffer.constants[:] = [list(adam_constants(each).values()) for each in hyper]
        # One table on the device is enough: launches of the last step come before on this stream.
        self._device_words.copy_(buffer.words, non_blocking=True)
        if buffer.sent is not None:
            buffer.sent.record()
        bits = np.bitwise_or.reduceat(addresses, self._begins) | self._fixed_bits
        self.aligned = (bits % VECTOR == 0).tolist()
        self._hyper = hyper

    def launch(self, number: int, outcome: torch.Tensor, *, leaves_room: bool = False) -> None:
        """Makes one launch of the step that was begun: updates p, m, v and weights in place.

        Args:
            number: the launch's index.
            outcome: fp32 tensor of two elements on the device: gradient scale, and 1.0 if the
                step is skipped (then nothing is written).
            leaves_room: kernels of other streams need not wait until all of its programs have
                begun: a GPU begins a kernel after it has begun all of the one before.
        """
        if self._device_words.device.type == "cuda":
            self.triton_launch(number, outcome, leaves_room=leaves_room)
        else:
            self.reference_launch(number, outcome)

    def triton_launch(
        self, number: int, outcome: torch.Tensor, *, leaves_room: bool = False
    ) -> None:
        """:meth:`launch` by Triton; its interpreter (TRITON_INTERPRET) takes CPU tensors."""
        if not _kernel_cache:
            # Triton comes with torch's CUDA builds only; it is imported where a GPU is present.
            from hytrain.kernels import triton_kernels

            _kernel_cache.extend((triton_kernels.adam_grouped_kernel, triton_dtypes()))
        kernel, dtypes = _kernel_cache
        launch = self._launches[number]
        loops = leaves_room and launch.programs > self._few_programs
        master, weights = launch.master_dtype, launch.weights_dtype
        if master == REMAINDER:
            master = weights = torch.uint16
        kernel[(self._few_programs if loops else launch.programs,)](
            launch.table, self.constants, outcome, launch.programs,
            GRADIENT=dtypes[launch.gradient_dtype], MASTER=dtypes[master], WEIGHTS=dtypes[weights],
            ALIGNED=self.aligned[number], ROWS=self._rows, BLOCK=_BLOCK, LOOPS=loops,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip

    def reference_launch(self, number: int, outcome: torch.Tensor) -> None:
        """The slow twin of :meth:`launch` in host memory: ``device_adam``, segment by segment.

        It finds the tensors by the table, as the kernel does.
        """
        launch = self._launches[number]
        table = launch.table.view(_NUM_FIELDS, self._rows)
        for row in range(launch.rows):
            _first, n, *addresses, group = table[:, row].tolist()
            moments = [torch.float32] * 2
            dtypes = [launch.master_dtype, *moments, launch.weights_dtype, launch.gradient_dtype]
            p, m, v, weights, gradient = (
                _tensor_at(address, n, dtype)
                for address, dtype in zip(addresses, dtypes, strict=True)
            )
            device_adam(p, m, v, gradient, weights, outcome, self._hyper[group])


def _few_programs(device: torch.device) -> int:
    """Programs of a launch that leaves room."""
    if device.type != "cuda":
        return _PROGRAMS_LEFT_ROOM
    return _PROGRAMS_LEFT_ROOM * torch.cuda.get_device_properties(device).multi_processor_count


def _tensor_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of the elements at a host address, not a copy."""
    memory = (ctypes.c_byte * (numel * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)
