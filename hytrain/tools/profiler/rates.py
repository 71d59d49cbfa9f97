"""Rates of the CPU's update and of its host's memory, all ranks of a host working at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.hardware.machine import last_level_cache_bytes
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.model.state_format import StateFormat
from hytrain.offload.threads import candidates
from hytrain.offload.update_arrays import UpdateArrays, array_bytes
from hytrain.tools.profiler.copies import TrainingLoad
from hytrain.tools.profiler.ranks import Ranks

_ELEMENTS = 1 << 24
_LLC_MULTIPLE = 4
"""The state of all ranks together is this many times the last-level cache."""
_MEMORY_SHARE = 0.3
_MAPPED_BYTES = 8 << 30
"""Most bytes of a host's arrays, if the model has as many. Updates of 15 GB reached 0.95 of the
rate of 2 GB (one H200's host, 15 threads of 16), probably because its TLB does not map as much."""


@dataclass(frozen=True, slots=True)
class CpuRates:
    """Rates that one rank reached while all of its host's ranks did the same.

    Attributes:
        updates: parameters/s of an update by number of threads, with nothing beside it.
        in_training: the same, beside training's copies and launching thread.
        memory: bytes/s of the host's memory by number of threads: of a loop over the state that
            computes nothing, or of the update with its copies if these moved more. A host's speed
            drifts from one second to the next, and the loop may have run in a slow one.
    """

    updates: dict[int, float]
    in_training: dict[int, float]
    memory: dict[int, float]


def thread_counts(cores: int) -> list[int]:
    """Thread counts to try with a rank's cores: doublings, and those that training tries."""
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
        device: sends gradients and receives weights beside an update.
        counts: thread counts of this rank.
        rounds: the length of the longest list of counts of all ranks: each begins at a barrier.
        ranks_on_host: ranks that share the host's caches and memory.
        elements: number of elements to update; None: see :func:`update_elements`.
        parameters: of the rank's shard in training.
        between: called after each round.
    """
    wanted = elements or update_elements(ranks_on_host, parameters)
    arrays = UpdateArrays(wanted, moments, threads=max(counts))
    n = arrays.elements
    state_bytes = StateFormat(moments).state_bytes(n)
    load = TrainingLoad(device, arrays.out.nbytes)
    updates: dict[int, float] = {}
    in_training: dict[int, float] = {}
    memory: dict[int, float] = {}
    for number in range(rounds):
        # A host with fewer counts than another repeats its last one, so that barriers meet.
        threads = counts[min(number, len(counts) - 1)]
        update = partial(arrays.update, threads)
        updates[threads] = n / ranks.median_seconds(update, seconds)
        with load.launching():
            loaded = ranks.median_seconds(partial(load.beside, update), seconds)
        in_training[threads] = n / loaded
        swept = ranks.median_seconds(partial(arrays.sweep, threads), seconds)
        # Both read and write all of the state. An update also reads two gradients and writes the
        # training copy; one of its copies writes a gradient, the other reads the training copy. A
        # GPU's copies end before the update; a CPU's may not, and are not counted.
        copied = 2 if device.type == "cuda" else 0
        moved = 2 * state_bytes + (3 + copied) * arrays.out.nbytes
        memory[threads] = max(2 * state_bytes / swept, moved / loaded)
        between()
    return CpuRates(updates, in_training, memory)


def update_elements(ranks_on_host: int, parameters: int = 0) -> int:
    """Elements to update: as in training up to a limit, but more than caches hold, if they fit."""
    beyond_caches = max(_ELEMENTS, _LLC_MULTIPLE * last_level_cache_bytes() // 12 // ranks_on_host)
    each = array_bytes(FP32) * ranks_on_host
    most, fits = int(_MAPPED_BYTES / each), int(_MEMORY_SHARE * available_host_bytes() / each)
    return max(1 << 16, min(max(beyond_caches, min(parameters, most)), fits))
