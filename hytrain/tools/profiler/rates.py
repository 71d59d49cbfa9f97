"""Rates of copies and of CPU updates, with all ranks of a host at work at once.

Ranks of one host share its memory and its links, so each measurement begins at a barrier and lasts
for a time, not for a number of repeats: nobody's last repeats run undisturbed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from hytrain import _C
from hytrain.config import CHUNK_ELEMENTS
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.formats.profile_file import CopyRates
from hytrain.hardware.machine import last_level_cache_bytes
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit_then_preview
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.kernels.host_memory import host_zeros
from hytrain.kernels.moment_codes import part_of
from hytrain.kernels.moments import Rounding, native_moments
from hytrain.model.moment_format import MomentFormat, StateArrays
from hytrain.model.partition import align_up
from hytrain.offload.threads import candidates
from hytrain.tools.profiler.ranks import Ranks
from hytrain.tools.profiler.training_load import TrainingLoad

_COPY_BYTES = 64 * 2**20
_COPIES = 4
_FEWEST_REPEATS = 3

_ARRAY_BYTES = 18
"""A parameter: fp32 state, two gradients and the outgoing copy in bf16."""
_ELEMENTS = 1 << 24
_LLC_MULTIPLE = 4
"""The state of all ranks together is so many last-level caches."""
_MEMORY_SHARE = 0.3
_MAPPED_BYTES = 8 << 30
"""Of a host's arrays, where the model has as many. Over 15 GB updates reached 0.95 of what they did
over 2 (one H200's host, 15 threads of 16), probably as its TLB does not map as much."""


def _repeat(run: Callable[[], float], ranks: Ranks, seconds: float) -> float:
    """The median of what ``run`` returns, over some seconds of repeats on all ranks at once."""
    run()  # touches pages, wakes threads
    ranks.barrier()
    end = time.perf_counter() + seconds
    values = [run()]
    while len(values) < _FEWEST_REPEATS or time.perf_counter() < end:
        values.append(run())
    return statistics.median(values)


# ---- copies ----


def copy_rates(
    device: torch.device, ranks: Ranks, *, seconds: float = 0.3, num_bytes: int = _COPY_BYTES
) -> CopyRates:
    """Between pinned host memory and a device, each way alone and both at once.

    Args:
        device: a GPU; of a CPU its own memory is copied.
        ranks: all measure at once.
        seconds: of each of the three measurements.
        num_bytes: of a copy.
    """
    is_cuda = device.type == "cuda"
    host = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=is_cuda) for _ in range(2)]
    there = [torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    ways = [(host[0], there[0]), (there[1], host[1])]  # (to, from)
    run = _CudaCopies(device, ways) if is_cuda else _host_copies(ways)
    moved = num_bytes * _COPIES
    alone = [moved / _repeat(lambda w=way: run([w])[0], ranks, seconds) for way in range(2)]
    both = moved / _repeat(lambda: max(run([0, 1])), ranks, seconds)
    return CopyRates(to_host=alone[0], from_host=alone[1], to_host_both=both, from_host_both=both)


_Way = tuple[torch.Tensor, torch.Tensor]


class _CudaCopies:
    """Copies on a stream a way."""

    def __init__(self, device: torch.device, ways: Sequence[_Way]) -> None:
        self._ways = ways
        self._streams = [torch.cuda.Stream(device) for _ in ways]
        torch.cuda.synchronize(device)

    def __call__(self, chosen: Sequence[int]) -> list[float]:
        """Seconds of some copies each way, all ways at once."""
        events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for _ in chosen:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            events.append(pair)
        for way, (begin, _) in zip(chosen, events, strict=True):
            begin.record(self._streams[way])
        for _ in range(_COPIES):
            for way in chosen:
                target, source = self._ways[way]
                with torch.cuda.stream(self._streams[way]):
                    target.copy_(source, non_blocking=True)
        for way, (_, end) in zip(chosen, events, strict=True):
            end.record(self._streams[way])
        for _, end in events:
            end.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]


def _host_copies(ways: Sequence[_Way]) -> Callable[[Sequence[int]], list[float]]:
    def run(chosen: Sequence[int]) -> list[float]:
        begin = time.perf_counter()
        for _ in range(_COPIES):
            for way in chosen:
                target, source = ways[way]
                target.copy_(source)
        return [time.perf_counter() - begin]

    return run


# ---- updates on the CPU ----


class UpdateArrays:
    """State, gradients and outgoing copy of some parameters, which the kernel updates.

    Chunk by chunk, as in training: at the end of each the threads wait for the last of them, and
    with 15 of them on 16 cores that took 5 to 9 % of an update (one H100's host).
    """

    def __init__(
        self,
        elements: int,
        moments: MomentsName = FP32,
        chunk_elements: int = CHUNK_ELEMENTS,
        *,
        parts: int = 1,
    ) -> None:
        """
        Args:
            elements: at least, of an update.
            moments: how Adam's moments are kept.
            chunk_elements: of a pass, at most; a multiple of 64.
            parts: as many elements each, which updates take in turns.
        """
        self.elements = align_up(elements)  # whole blocks of codes
        n = parts * self.elements
        # In huge pages, like the memory that training updates.
        how = MomentFormat(moments)
        self._state = how.split(host_zeros(how.state_bytes(n), dtype=torch.uint8), n)
        self._moments = native_moments(*self._state[1:], None)
        previous, current, out = (host_zeros(-(-n // 2)).view(torch.bfloat16)[:n] for _ in range(3))
        self.out_bytes = self.elements * out.itemsize
        hyper = AdamHyper(lr=1e-3)
        self._parts: list[list[_Chunk]] = [[] for _ in range(parts)]
        for part, begin in itertools.product(range(parts), range(0, self.elements, chunk_elements)):
            first = part * self.elements + begin
            end = part * self.elements + min(self.elements, begin + chunk_elements)
            here = slice(first, end)
            m, v = (part_of(moment, first, end) for moment in self._state[1:])
            steps = Gradient(previous[here], 1.0, hyper), Gradient(current[here], 1.0, hyper)
            state = StateArrays(self._state.master[here], m, v)
            self._parts[part].append(_Chunk(state, steps, out[here]))
        self._turns = itertools.cycle(self._parts)

    def update(self, threads: int) -> float:
        """Seconds of the passes that training makes, over the next part."""
        chunks = next(self._turns)
        begin = time.perf_counter()
        rounding = Rounding(0, 0)
        for chunk in chunks:
            commit_then_preview(
                *chunk.state, *chunk.steps, rounding=rounding, out=chunk.out, num_threads=threads
            )
        return time.perf_counter() - begin

    def sweep(self, threads: int) -> float:
        """Seconds of a loop that reads and writes the first part and computes nothing."""
        begin = time.perf_counter()
        _C.read_write(self._state.master.data_ptr(), self._moments, self.elements, threads)
        return time.perf_counter() - begin


class _Chunk(NamedTuple):
    """What one pass works on."""

    state: StateArrays
    steps: tuple[Gradient, Gradient]
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class CpuRates:
    """What one rank reached while all of its host's ranks did the same.

    Attributes:
        updates: parameters/s of an update against threads, with nothing beside it.
        in_training: the same with a training's copies and launching thread beside it.
        memory: bytes/s of the host's memory against threads: of a loop over the state that computes
            nothing, or of the update with its copies where these moved more. A host's speed drifts
            from one second to the next, and a slow one may have hit the loop.
    """

    updates: dict[int, float]
    in_training: dict[int, float]
    memory: dict[int, float]


def thread_counts(cores: int) -> list[int]:
    """Counts to try with so many cores of a rank: doublings, and what training tries."""
    doublings = [2**power for power in range(cores.bit_length()) if 2**power <= cores]
    return sorted({*doublings, *candidates(cores), cores})


def cpu_rates(
    device: torch.device,
    counts: Sequence[int],
    rounds: int,
    ranks: Ranks,
    *,
    ranks_on_host: int = 1,
    seconds: float = 0.2,
    elements: int | None = None,
    moments: MomentsName = FP32,
    parameters: int = 0,
    between: Callable[[], None] = lambda: None,
) -> CpuRates:
    """Rates of the kernel that training runs, and of its host's memory.

    Args:
        device: whose gradients come and whose weights leave beside an update.
        counts: of threads, of this rank.
        rounds: the length of the longest list of counts of all ranks: each begins at a barrier.
        ranks: all measure at once.
        ranks_on_host: that share its caches and memory.
        seconds: of each measurement.
        elements: of each array; None: beyond the caches.
        moments: how Adam's moments are kept.
        parameters: of the rank's shard in training, over as many of which updates go, up to a
            limit.
        between: called after each round.
    """
    each = elements or update_elements(ranks_on_host)
    parts = update_parts(each, parameters, ranks_on_host)
    arrays = UpdateArrays(each, moments, parts=parts)
    n = arrays.elements
    state_bytes = MomentFormat(moments).state_bytes(n)
    for _ in range(parts):
        arrays.update(max(counts))  # touches pages
    load = TrainingLoad(device, arrays.out_bytes)
    updates: dict[int, float] = {}
    in_training: dict[int, float] = {}
    memory: dict[int, float] = {}
    for number in range(rounds):
        # A host with fewer counts than another repeats its last one, so that barriers meet.
        threads = counts[min(number, len(counts) - 1)]
        updates[threads] = n / _repeat(partial(arrays.update, threads), ranks, seconds)
        with load:
            beside = partial(load.beside, partial(arrays.update, threads))
            loaded = _repeat(beside, ranks, seconds)
        in_training[threads] = n / loaded
        swept = _repeat(partial(arrays.sweep, threads), ranks, seconds)
        # Both read and write all of the state. An update reads two gradients and writes the copy
        # besides; of its copies one writes a gradient and the other reads the copy. Those of a GPU
        # are over before it; between arrays of a CPU they may not be, and are not counted.
        copied = 2 if device.type == "cuda" else 0
        moved = 2 * state_bytes + (3 + copied) * arrays.out_bytes
        memory[threads] = max(2 * state_bytes / swept, moved / loaded)
        between()
    return CpuRates(updates, in_training, memory)


def update_elements(ranks_on_host: int = 1) -> int:
    """Of arrays that lie beyond the caches, with those of the host's other ranks, and fit."""
    wanted = max(_ELEMENTS, _LLC_MULTIPLE * last_level_cache_bytes() // 12 // ranks_on_host)
    return max(1 << 16, min(wanted, _fitting_elements(ranks_on_host)))


def update_parts(elements: int, parameters: int, ranks_on_host: int = 1) -> int:
    """How many arrays of so many elements are as many parameters, up to a limit and what fits.

    Args:
        elements: of one.
        parameters: of the rank.
        ranks_on_host: that measure at once.
    """
    most = min(_MAPPED_BYTES // (_ARRAY_BYTES * ranks_on_host), _fitting_elements(ranks_on_host))
    return max(1, min(parameters, most) // elements)


def _fitting_elements(ranks_on_host: int) -> int:
    return int(_MEMORY_SHARE * available_host_bytes()) // (_ARRAY_BYTES * ranks_on_host)
