"""The hardware: types of GPUs, as they were measured, hosts, and what connects them.

Plain data: numbers are checked where files and options are read.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hytrain.formats.policies import Activations
from hytrain.formats.profile_file import LAUNCH_BOUND_SHARE, UpdateLaunches
from hytrain.offload.update_groups import LIMITS, group_begins
from hytrain.tools.planner.curves import FREE, Table

UNEVEN_FACTOR = 1.25
"""Factor of unequal shards on the time of collectives if not measured (Cephalo's number)."""


@dataclass(frozen=True, slots=True)
class UpdateLaunchTimes:
    """What training adds to a host's launches of the model itself, in milliseconds.

    Attributes:
        each: the measured times.
        shares: whether neighbouring layers share launches; if not, each has its own.
    """

    each: UpdateLaunches
    shares: bool = True

    def on_gpu(self, sizes: Sequence[int]) -> list[float]:
        """Returns the times to launch updates of the first 0, 1, ... layers, given shard sizes."""
        # If launches count, the host sets the pace: fewer groups of updates, which leave room.
        limits = LIMITS.leaving_room()
        begins = set(group_begins(sizes, [self.shares] * len(sizes), limits))
        found, launches = [0.0], 0
        for number in range(len(sizes)):
            launches += number in begins
            layers = (number + 1) * self.each.gpu_layer_ms
            found.append(self.each.gpu_step_ms + launches * self.each.launch_ms + layers)
        return found

    def in_passes(self, on_gpu: int, on_cpu: int) -> float:
        """Returns what training adds to launching a step's passes, by layers on each side."""
        each = self.each
        return each.passes_ms + on_gpu * each.gpu_layer_passes_ms + on_cpu * each.cpu_layer_ms


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """A host's times to launch a GPU's work, in milliseconds.

    Attributes:
        layer_ms: to launch one layer's forward and backward, against samples.
        outside_ms: the same for what is outside of the layers.
        slowdown: ratio of launching beside updates on the CPU to launching alone.
        updates: launch times of updates.
        layer_device_ms: one layer's forward and backward on the device if all of it was launched
            before; None if that was not measured.
        outside_device_ms: the same for what is outside of the layers.
        spread: share by which launching took longer in some seconds than in others.
    """

    layer_ms: Table
    outside_ms: Table
    slowdown: float
    updates: UpdateLaunchTimes
    layer_device_ms: Table | None = None
    outside_device_ms: Table | None = None
    spread: float = 0.0

    def device(self, samples: int, taken: float) -> float:
        """Returns the device's own ms for one layer's passes, which took ``taken`` ms in all."""
        return taken if self.layer_device_ms is None else self.layer_device_ms.at(samples)

    def outside_device(self, samples: int, taken: float) -> float:
        """Returns the same for what is outside of the layers."""
        return taken if self.outside_device_ms is None else self.outside_device_ms.at(samples)


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """A type of GPU, as measured with the model to be planned. Equal profiles are one type.

    Times and bytes must not fall with more samples: the bound on the best plan relies on it.

    Attributes:
        memory_bytes: what the process may use of it, reserve taken off.
        forward_ms: one layer's forward against the samples of a micro-batch.
        backward_ms: one layer's backward without recompute.
        peak_bytes: C, against the samples of a micro-batch: peak of all but the training copy, the
            optimizer state and the activations that other layers have left.
        idle_bytes: C if no sample is computed.
        update_rate: parameters/s that the GPU updates.
        copy_rate: bytes/s to the host, and at the same time from it.
        outside_ms: time of one micro-batch outside of the layers (embedding, head, loss), both
            passes.
        recompute_ms: what recomputing a checkpointed layer adds to its backward; None: as much as
            its forward. Layer by layer it is always the forward.
        stored_bytes: C if all activations of all layers are stored; None if that was not measured.
        multiprocessors: to tell it apart from others of its name; 0 if not known.
        limit_bytes: likewise, memory of the device or the process's part of it; None:
            memory_bytes.
        sizes: micro-batches that may be chosen, 1 and more, ascending; None: all. A rank's last
            one, which has the remainder, may have any size below.
        accumulation_ms: time to add a further micro-batch's gradient, per layer, against the
            micro-batch's samples.
        fetch_rate: bytes/s from the host while nothing is copied to it; None: copy_rate.
        layer_peak_bytes: C during a layer's passes; None: the same as peak_bytes.
        launches: the host's times to launch its work; None if they were not measured.
    """

    name: str
    memory_bytes: int
    forward_ms: Table
    backward_ms: Table
    peak_bytes: Table
    idle_bytes: int
    update_rate: float
    copy_rate: float
    outside_ms: Table = FREE
    recompute_ms: Table | None = None
    stored_bytes: Table | None = None
    multiprocessors: int = 0
    limit_bytes: int | None = None
    sizes: tuple[int, ...] | None = None
    accumulation_ms: Table = FREE
    fetch_rate: float | None = None
    layer_peak_bytes: Table | None = None
    launches: LaunchTimes | None = None

    def layer_peak(self, samples: int) -> float:
        """Returns C in a layer's passes, without what is outside of the layers (the logits)."""
        return (self.layer_peak_bytes or self.peak_bytes).at(samples)

    def fetch_rates(self, activations: Activations) -> tuple[float, float]:
        """Returns the bytes/s from the host in forward, and in backward, when gradients go to it.

        In forward, activations go to it if they are offloaded.
        """
        is_alone = self.fetch_rate is not None and activations != "offload"
        return (self.fetch_rate or 0.0) if is_alone else self.copy_rate, self.copy_rate

    def is_launch_bound(self, size: int) -> bool:
        """Whether the GPU waits for its host to launch a micro-batch of ``size`` samples."""
        if self.launches is None or size < 1:
            return False
        passes = self.forward_ms.at(size) + self.backward_ms.at(size)
        return self.launches.layer_ms.at(size) > LAUNCH_BOUND_SHARE * passes

    def micro_sizes(self, batch: int) -> Sequence[int]:
        """Returns the micro-batches that may be used for ``batch`` samples."""
        if self.sizes is None:
            return range(1, batch + 1)
        return tuple(size for size in self.sizes if size <= batch)

    def micro_batches(self, samples: int) -> Sequence[int]:
        """Returns the sizes to compute ``samples`` in: :meth:`micro_sizes`, or all at once.

        All at once is the remainder of a larger micro-batch, so that must be one to choose.
        """
        sizes = self.micro_sizes(samples)
        is_rest = self.sizes is not None and samples < self.sizes[-1] and samples not in sizes
        return (*sizes, samples) if is_rest else sizes


@dataclass(frozen=True, slots=True)
class Host:
    """A machine. Its ranks divide the cores equally, and share memory and bandwidth as needed.

    Attributes:
        gpus: one per rank, in order.
        cores: cores that the ranks may use together.
        memory_bytes: bytes that the ranks may use together.
        bandwidth: bytes/s of its memory.
        update_rates: parameters/s of a CPU update against the number of cores.
    """

    name: str
    gpus: tuple[GpuProfile, ...]
    cores: int
    memory_bytes: int
    bandwidth: float
    update_rates: Table

    @property
    def rank_update_rate(self) -> float:
        """Parameters/s of a CPU update with one rank's part of the cores."""
        return self.update_rates.at(self.cores / len(self.gpus))


@dataclass(frozen=True, slots=True)
class Cluster:
    """All ranks, and what their collectives cost.

    Attributes:
        hosts: in rank order.
        all_gather_ms: all-gather of an evenly sharded layer over all ranks, against its bytes.
        reduce_scatter_ms: its reduce-scatter, likewise.
        uneven_factors: factors of unequal shards on the two.
        contention: share of a collective's time by which it delays what is computed beside it:
            it takes multiprocessors and bandwidth.
    """

    hosts: tuple[Host, ...]
    all_gather_ms: Table
    reduce_scatter_ms: Table
    uneven_factors: tuple[float, float] = (UNEVEN_FACTOR, UNEVEN_FACTOR)
    contention: float = 0.0

    @property
    def num_ranks(self) -> int:
        """GPUs of all hosts."""
        return sum(len(host.gpus) for host in self.hosts)

    def collective_seconds(
        self, gathered: float, reduced: float, *, even: bool
    ) -> tuple[float, float]:
        """Returns the seconds of an all-gather and a reduce-scatter of so many bytes.

        ``even``: whether shards are equal.
        """
        if self.num_ranks == 1:
            return 0.0, 0.0
        of_gather, of_scatter = (1.0, 1.0) if even else self.uneven_factors
        gather, scatter = self.all_gather_ms.at(gathered), self.reduce_scatter_ms.at(reduced)
        return of_gather * gather / 1e3, of_scatter * scatter / 1e3

    @property
    def host_ranks(self) -> list[tuple[Host, range]]:
        """The ranks of each host."""
        ends = list(itertools.accumulate((len(host.gpus) for host in self.hosts), initial=0))
        pairs = itertools.pairwise(ends)
        return [(host, range(*pair)) for host, pair in zip(self.hosts, pairs, strict=True)]

    @property
    def ranks(self) -> list[tuple[Host, GpuProfile]]:
        """Host and GPU of each rank."""
        return [(host, gpu) for host in self.hosts for gpu in host.gpus]
