"""Rates of the CPU's update and of its host's memory, with all ranks of a host at work at once."""

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
"""The state of all ranks together is so many last-level caches."""
_MEMORY_SHARE = 0.3
_MAPPED_BYTES = 8 << 30
"""Of a host's arrays, where the model has as many. Over 15 GB updates reached 0.95 of what they did
over 2 (one H200's host, 15 threads of 16), probably as its TLB does not map as much."""


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
        ranks_on_host: that share its caches and memory.
        elements: that are updated; None: see :func:`update_elements`.
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
        # Both read and write all of the state. An update reads two gradients and writes the copy
        # besides; of its copies one writes a gradient and the other reads the copy. Those of a GPU
        # are over before it; between arrays of a CPU they may not be, and are not counted.
        copied = 2 if device.type == "cuda" else 0
        moved = 2 * state_bytes + (3 + copied) * arrays.out.nbytes
        memory[threads] = max(2 * state_bytes / swept, moved / loaded)
        between()
    return CpuRates(updates, in_training, memory)


def update_elements(ranks_on_host: int, parameters: int = 0) -> int:
    """As many as training updates, up to a limit; at least what caches do not hold, if it fits."""
    beyond_caches = max(_ELEMENTS, _LLC_MULTIPLE * last_level_cache_bytes() // 12 // ranks_on_host)
    each = array_bytes(FP32) * ranks_on_host
    most, fits = int(_MAPPED_BYTES / each), int(_MEMORY_SHARE * available_host_bytes() / each)
    return max(1 << 16, min(max(beyond_caches, min(parameters, most)), fits))
