"""How many threads the CPU kernel gets, and on which cores: short calibrations on the machine."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from hytrain.comm.collectives import ShardCollectives
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.hardware.host_share import HostShare, NearCores, machine_identity
from hytrain.hardware.machine import last_level_cache_bytes
from hytrain.hardware.numa import call_on, prefers_near
from hytrain.kernels.host_limits import available_host_bytes
from hytrain.kernels.host_memory import taking_host_memory
from hytrain.kernels.moments import MOMENT_BLOCK
from hytrain.offload.update_arrays import PURPOSE, UpdateArrays, array_bytes

_LEAST_ELEMENTS = 1 << 24
"""The fewest elements of a measured pass: 288 MiB with moments in fp32. That is enough if the speed
is a first guess, which training replaces by its own."""
_CACHES = 3
"""How many last-level caches the updated data would fill, if speeds are compared. Data in a cache
of 300 MiB was updated 1.7 times as fast as in memory, and how counts compare there says little
about how they compare in training (an H200's host of 16 cores)."""
_MEMORY_SHARE = 1 / 16
"""The largest share of the host's free memory that is taken for it."""
_REPEATS = 5
_NEAR_BEST = 1.03
"""A count within this factor of the fastest is as good; fewer threads leave cores to others."""


def candidates(cores: int) -> list[int]:
    """Thread counts worth trying: the kernel is bound by memory, not by cores."""
    if cores <= 2:
        return [cores]  # two are used in full: the kernel alone needs both
    return sorted({max(1, cores // 2), max(1, cores * 5 // 8), max(1, cores * 3 // 4), cores - 1})


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    """The kernel's threads, and its time per parameter with them.

    Attributes:
        seconds_per_parameter: time of commit_then_preview, with nothing else running.
        cores: the cores that they are bound to; None: they are not bound.
        candidates: the counts that were measured on these cores, in ascending order.
    """

    num_threads: int
    seconds_per_parameter: float
    cores: frozenset[int] | None = None
    candidates: tuple[int, ...] = ()


@cache
def choose_threads(
    cores: int, given: int | None, moments: MomentsName = FP32, *, compared: bool = False
) -> ThreadChoice:
    """Calls :func:`measure_threads` once per process, whose machine stays the same."""
    return measure_threads(cores, given, moments, compared=compared)


def place_threads(
    host: HostShare,
    given: int | None,
    moments: MomentsName,
    collectives: ShardCollectives,
    *,
    may_bind: bool,
) -> ThreadChoice:
    """Chooses the kernel's threads, on the rank's NUMA node if that is as good as all cores.

    A collective if any rank has the choice. All ranks of a machine go to their nodes or none
    does: one alone would share its cores with ranks that run everywhere.

    Args:
        host: this rank's part of its host; for ``near`` see :class:`HostShare`.
        given: see :func:`measure_threads`.
        may_bind: if False, threads are not bound, as if no GPU's node were known; the same on all
            ranks.

    Raises:
        HostMemoryError: see :func:`measure_threads`.
    """
    if not (host.some_near and may_bind):
        return choose_threads(host.cores, given, moments)
    # All measure the same at the same time: they share the machine's memory.
    collectives.gather_objects(None, "the ranks before they measure")
    anywhere = choose_threads(host.cores, given, moments, compared=True)
    collectives.gather_objects(None, "the ranks before they measure on their nodes")
    near = None if host.near is None else _choose_near(host.near, given, moments)
    mine = (
        machine_identity(),
        anywhere.seconds_per_parameter,
        None if near is None else near.seconds_per_parameter,
    )
    found: list[tuple[str, float, float | None]] = collectives.gather_objects(
        mine, "what updates take on the ranks' cores"
    )
    here = [(a, n) for machine, a, n in found if machine == mine[0] and n is not None]
    if near is None or not prefers_near([n for _, n in here], [a for a, _ in here]):
        return anywhere
    return near


def measuring_bytes(
    host: HostShare, given: int | None, moments: MomentsName, *, may_bind: bool
) -> int:
    """Host memory, in bytes, that :func:`place_threads` takes for some milliseconds."""
    compared = host.some_near and may_bind
    compares = compared or len(_counts(host.cores, given)) > 1
    elements = measured_elements(host.cores, moments, compares=compares)
    if compared and (near := host.near) is not None:
        on_node = call_on(
            near.cores, lambda: measured_elements(near.number, moments, compares=True)
        )
        elements = max(elements, on_node)
    return int(array_bytes(moments) * elements)


@cache
def _choose_near(near: NearCores, given: int | None, moments: MomentsName) -> ThreadChoice:
    choice = call_on(
        near.cores, lambda: measure_threads(near.number, given, moments, compared=True)
    )
    return replace(choice, cores=near.cores)


def measure_threads(
    cores: int, given: int | None, moments: MomentsName = FP32, *, compared: bool = False
) -> ThreadChoice:
    """Finds the fewest threads within 3 % of the fastest count, measured on the real kernel.

    Args:
        cores: how many this rank has, without those of other ranks that measure at the same time.
        given: a count that the user chose; only its speed is measured.
        compared: whether the speed will be compared with another: then even a single count is
            measured beyond the caches.

    Raises:
        HostMemoryError: the memory that it takes is refused: at least 288 MiB; if speeds are
            compared, three last-level caches, or a sixteenth of the host's free memory if less.

    The launching thread and autograd's thread need a core as well; they get it because the count
    never exceeds the number of cores less one (but two cores are used in full).
    """
    counts = _counts(cores, given)
    elements = measured_elements(cores, moments, compares=compared or len(counts) > 1)
    medians = _measure(counts, moments, elements)
    best = min(medians.values())
    count = min(count for count, value in medians.items() if value <= best * _NEAR_BEST)
    return ThreadChoice(count, medians[count] / elements, candidates=tuple(counts))


def _counts(cores: int, given: int | None) -> list[int]:
    return candidates(cores) if given is None else [given]


def measured_elements(cores: int, moments: MomentsName, *, compares: bool) -> int:
    """How many elements a measured pass updates.

    ``cores``: how many this rank has, whose share of the last-level caches is to be exceeded;
    ``compares``: whether speeds are compared, which must then be those of memory.
    """
    if not compares:
        return _LEAST_ELEMENTS
    usable = len(os.sched_getaffinity(0))
    caches = _CACHES * last_level_cache_bytes() * min(1.0, cores / usable)
    num_bytes = min(caches, _MEMORY_SHARE * available_host_bytes())
    block_bytes = array_bytes(moments) * MOMENT_BLOCK
    return max(_LEAST_ELEMENTS, int(num_bytes / block_bytes) * MOMENT_BLOCK)


def _measure(counts: Sequence[int], moments: MomentsName, elements: int) -> dict[int, float]:
    """Seconds of a pass over ``elements`` by the number of threads, measured in turns."""
    with taking_host_memory(PURPOSE, int(array_bytes(moments) * elements)):
        arrays = UpdateArrays(elements, moments, threads=max(counts))
    times: dict[int, list[float]] = {count: [] for count in counts}
    for repeat in range(_REPEATS + 1):
        for count in counts:
            seconds = arrays.update(count)
            if repeat:  # the first round wakes the threads
                times[count].append(seconds)
    return {count: statistics.median(values) for count, values in times.items()}
