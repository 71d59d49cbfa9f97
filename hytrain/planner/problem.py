"""What a plan is made from: profiles of GPUs, the cluster, the model, the batch. Plain data.

The problem is larger than Cephalo's (uneven.py), since optimizer state may live on the host and be
updated there. For each rank a plan decides the samples b of the global batch, the micro-batch m,
the shard s of the state, how many of the L layers are updated on the GPU (K), and what becomes of
activations between forward and backward. loads.py has the times and the memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hytrain.planner.curves import Table
from hytrain.planner.errors import PlanError

Activations = Literal["store", "recompute", "keep", "offload"]
"""What becomes of activations between forward and backward.

"store" and "recompute": one micro-batch after another passes through the whole model; of each layer
all activations stay, or its input, and the rest is computed again. "keep" and "offload": all
micro-batches pass through one layer after another (layer-major); the inputs of all layers for all
samples stay on the GPU, or go to the host; the rest is computed again.
"""

ACTIVATIONS: tuple[Activations, ...] = ("store", "recompute", "keep", "offload")
UNEVEN_FACTOR = 1.25
"""What unequal shards cost in collectives where nobody measured it (Cephalo's number)."""

LAYER_MAJOR: tuple[Activations, ...] = ("keep", "offload")

Accumulation = Literal["micro_batch_major", "layer_major"]
"""How a step's micro-batches are computed, as the configuration says it."""

MANNERS: dict[Accumulation, tuple[Activations, ...]] = {
    "micro_batch_major": ("store", "recompute"),
    "layer_major": LAYER_MAJOR,
}
"""The policies of each. In stage 3 all ranks are of one manner: they use each layer together."""

STATE_BYTES = 12
"""Of a parameter: its fp32 master copy and two moments."""


def _positive(what: str, **values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < math.inf:
            raise PlanError(f"{what}: {name} must be positive, got {value}")


_UNFILLED = 1.3
"""A GPU that is busy takes 1.7 times as long or more for twice the samples; H200s whose host was
busy took 1.0 to 1.1 times as long (experiments/unequal_gpus, case offload)."""


@dataclass(frozen=True, slots=True)
class GpuProfile:
    """A type of GPU, as measured with the model to be planned. Equal profiles are one type.

    Times and bytes must not fall with more samples: the bound on the best plan counts on it.

    Attributes:
        name: the device's.
        memory_bytes: what the process may use of it, reserve taken off.
        forward_ms: one layer's forward against the samples of a micro-batch.
        backward_ms: one layer's backward without recompute.
        peak_bytes: C, against the samples of a micro-batch: peak of all but the training copy, the
            optimizer state and the activations that other layers have left.
        idle_bytes: C where no sample is computed.
        update_rate: parameters/s that the GPU updates.
        copy_rate: bytes/s to the host, and at the same time from it.
        outside_ms: what one micro-batch takes outside of the layers (embedding, head, loss), both
            passes; None for nothing.
        recompute_ms: what a layer's checkpoint adds to its backward; None for its forward. Layer
            by layer it is the forward always.
        stored_bytes: C with all activations of all layers, where they are stored; None where that
            was not measured.
        multiprocessors: by which it is told apart from others of its name; 0 where not known.
        limit_bytes: likewise, memory of the device or the process's part of it; None for
            memory_bytes.
        most_samples: of a micro-batch; None for no limit.
        sizes: micro-batches that may be chosen, 1 and more, ascending; None for all. The last one
            of a rank, which has what is left, may be of any size below.
        accumulation_ms: what adding a further micro-batch's gradient takes, a layer, against the
            micro-batch's samples; None for the problem's.
        fetch_rate: bytes/s from the host while nothing goes there; None for copy_rate.
        layer_peak_bytes: the part of C that is there in a layer's passes; None for all of it.
    """

    name: str
    memory_bytes: int
    forward_ms: Table
    backward_ms: Table
    peak_bytes: Table
    idle_bytes: int
    update_rate: float
    copy_rate: float
    outside_ms: Table | None = None
    recompute_ms: Table | None = None
    stored_bytes: Table | None = None
    multiprocessors: int = 0
    limit_bytes: int | None = None
    most_samples: int | None = None
    sizes: tuple[int, ...] | None = None
    accumulation_ms: Table | None = None
    fetch_rate: float | None = None
    layer_peak_bytes: Table | None = None

    def layer_peak(self, samples: int) -> float:
        """C in the passes of a layer: what is outside of the layers (the logits) is not there."""
        return (self.layer_peak_bytes or self.peak_bytes).at(samples)

    def fetch_rates(self, activations: Activations) -> tuple[float, float]:
        """Bytes/s from the host in forward, and in backward, where gradients go there.

        In forward activations do, where they are offloaded.
        """
        is_alone = self.fetch_rate is not None and activations != "offload"
        return (self.fetch_rate or 0.0) if is_alone else self.copy_rate, self.copy_rate

    def is_unfilled(self, size: int) -> bool:
        """Whether a micro-batch takes hardly less time than one of twice as many samples.

        The host, which starts the kernels, is what takes the time there, more than the GPU.
        """
        passes = (self.forward_ms, self.backward_ms)
        if min(table.points[-1][0] for table in passes) < 2 * size:
            return False  # not measured
        once, twice = (sum(table.at(samples) for table in passes) for samples in (size, 2 * size))
        return twice < _UNFILLED * once

    def micro_sizes(self, batch: int) -> Sequence[int]:
        """Micro-batches that may be used for so many samples."""
        most = min(batch, self.most_samples or batch)
        if self.sizes is None:
            return range(1, most + 1)
        return tuple(size for size in self.sizes if size <= most)

    def micro_batches(self, samples: int) -> Sequence[int]:
        """In which a rank may compute so many samples: :meth:`micro_sizes`, or all at once.

        All at once is what is left of a larger micro-batch, so that must be one to choose.
        """
        sizes = self.micro_sizes(samples)
        largest = min(
            samples if self.sizes is None else self.sizes[-1], self.most_samples or samples
        )
        return sizes if samples in sizes or samples > largest else (*sizes, samples)

    def __post_init__(self) -> None:
        _positive(
            self.name,
            memory_bytes=self.memory_bytes,
            update_rate=self.update_rate,
            copy_rate=self.copy_rate,
        )
        sizes = self.sizes
        if sizes is not None and (list(sizes) != sorted(set(sizes)) or sizes[:1] != (1,)):
            raise PlanError(f"{self.name}: sizes must ascend from 1, got {sizes}")


@dataclass(frozen=True, slots=True)
class Host:
    """A machine. Its ranks divide the cores equally, and share memory and bandwidth as needed.

    Attributes:
        name: its own.
        gpus: a rank each, in order.
        cores: that the ranks may use.
        memory_bytes: that the ranks may use together.
        bandwidth: bytes/s of its memory.
        update_rates: parameters/s of a CPU update against the number of cores.
    """

    name: str
    gpus: tuple[GpuProfile, ...]
    cores: int
    memory_bytes: int
    bandwidth: float
    update_rates: Table

    def __post_init__(self) -> None:
        if not self.gpus:
            raise PlanError(f"host {self.name} has no GPU")
        _positive(f"host {self.name}", cores=self.cores, bandwidth=self.bandwidth)
        if self.memory_bytes < 0:
            raise PlanError(f"host {self.name}: memory_bytes must not be negative")
        if self.rank_update_rate <= 0.0:
            raise PlanError(f"host {self.name}: update_rates gives no rate for a rank's cores")

    @property
    def rank_update_rate(self) -> float:
        """Parameters/s of a CPU update with one rank's part of the cores."""
        return self.update_rates.at(self.cores / len(self.gpus))


@dataclass(frozen=True, slots=True)
class Cluster:
    """All ranks, and what their collectives cost.

    Attributes:
        hosts: in rank order.
        all_gather_ms: of an evenly split layer over all ranks, against its bytes.
        reduce_scatter_ms: likewise.
        uneven_factor: what unequal shards cost in both.
        contention: share of a collective's time by which it delays what is computed beside it:
            it takes multiprocessors and bandwidth.
    """

    hosts: tuple[Host, ...]
    all_gather_ms: Table
    reduce_scatter_ms: Table
    uneven_factor: float = UNEVEN_FACTOR
    contention: float = 0.0

    def __post_init__(self) -> None:
        if not self.hosts:
            raise PlanError("a cluster needs at least one host")
        if not 1.0 <= self.uneven_factor < math.inf:
            raise PlanError(f"uneven_factor must be at least 1, got {self.uneven_factor}")
        if not 0.0 <= self.contention <= 1.0:
            raise PlanError(f"contention must be in [0, 1], got {self.contention}")

    @property
    def num_ranks(self) -> int:
        """GPUs of all hosts."""
        return sum(len(host.gpus) for host in self.hosts)

    @property
    def ranks(self) -> list[tuple[Host, GpuProfile]]:
        """Host and GPU of each rank."""
        return [(host, gpu) for host in self.hosts for gpu in host.gpus]


@dataclass(frozen=True, slots=True)
class Model:
    """The model, as equal layers.

    Attributes:
        name: its own.
        num_layers: L.
        parameters: of all of it.
        boundary_bytes: activations between two layers, per sample.
        itemsize: bytes of a parameter of the training copy, and of its gradient; so many cross to
            the host and come back.
        dtype: of the training copy, for the record; None where not known.
        seq_len: tokens of a sample, likewise.
    """

    name: str
    num_layers: int
    parameters: int
    boundary_bytes: int = 0
    itemsize: int = 2
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    seq_len: int | None = None

    def __post_init__(self) -> None:
        _positive(
            f"model {self.name}",
            num_layers=self.num_layers,
            parameters=self.parameters,
            itemsize=self.itemsize,
        )

    @property
    def layer_bytes(self) -> float:
        """The training copy of one layer."""
        return float(self.itemsize) * self.parameters / self.num_layers


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """A batch and a model's state, to be dealt to the ranks of a cluster.

    Attributes:
        cluster: who.
        model: what.
        batch: samples of the global batch.
        stage: of ZeRO; 3 shards the training copy too.
        activations: which policies for activations may be used.
        accumulation_ms: what each further micro-batch adds to a layer's backward, on GPUs that
            have no number of their own.
        gradient_bytes: bytes a parameter of the gradient before it is reduced. It is there whole
            while micro-batches pass through the model one by one, and at the end of the first
            backward of several ranks, which have not agreed on an order yet, or layer by layer,
            which is a trial.
        gpu_state_bytes: bytes a GPU-placed parameter, besides the training copy; its gradient at
            the end of backward is :attr:`waiting_bytes`.
        host_state_bytes: bytes a CPU-placed parameter: 14, or 16 with fp32 gradients.
        update_bytes: bytes of host memory traffic a CPU-placed parameter and step.
        allow_idle: whether a rank may compute nothing and only hold state.
        rounds: micro-batches that every rank with samples makes; None: any number. In stage 3,
            where micro-batches pass through the model one by one, each of them gathers every layer
            on all ranks: one with fewer waits for those with more. Layer by layer a layer is
            gathered once a pass, and ranks may differ.
        offload_param: the training copy is kept in pinned host memory (stage 3): a rank's shard of
            it on its host, whole layers on the GPU while they are used. GPU updates send the new
            copy there, CPU updates write it in place.
        clipped_share: of the steps, those whose gradient is clipped, in [0, 1]: GPU layers are
            chosen and the step is predicted for it. By default all of them, so that a plan holds
            also at the beginning of a training.
    """

    cluster: Cluster
    model: Model
    batch: int
    stage: Literal[1, 2, 3] = 2
    activations: tuple[Activations, ...] = ("keep", "offload")
    accumulation_ms: float = 0.0
    gpu_state_bytes: int = 12
    host_state_bytes: int = 14
    update_bytes: int = 30
    gradient_bytes: int = 0
    allow_idle: bool = True
    rounds: int | None = None
    clipped_share: float = 1.0
    offload_param: bool = False

    @property
    def needs_rounds(self) -> bool:
        """Whether :attr:`rounds`, and one manner for all ranks, are still to be decided on.

        With ``offload_param`` for one rank, too: how often it fetches its weights is in
        :attr:`shard_traffic`.
        """
        is_open = self.rounds is None and not set(self.activations) <= set(LAYER_MAJOR)
        is_gathered = self.cluster.num_ranks > 1 or self.offload_param
        return is_open and self.stage == 3 and is_gathered

    @property
    def sharded_bytes(self) -> int:
        """Bytes of GPU a parameter of a rank's shard, whatever is updated where.

        Stage 3 has the training copy there, unless the host has, and the gradient that
        micro-batches add to, or that several ranks keep until the end of their first backward. With
        ``offload_param`` it is not counted where one rank sends each gradient as it comes.
        """
        if self.stage != 3:
            return 0
        if not self.offload_param:
            return self.model.itemsize + self.gradient_bytes
        is_sent = self.cluster.num_ranks == 1 and (self.rounds or 1) == 1
        return 0 if is_sent else self.gradient_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes a GPU-placed parameter at the end of a backward, besides :attr:`gpu_state_bytes`.

        Its reduced gradient waits for the outcome of the step, unless it is among
        :attr:`sharded_bytes`. Activations are gone by then.
        """
        has_gradient = self.sharded_bytes > (0 if self.offload_param else self.model.itemsize)
        return 0 if has_gradient else self.model.itemsize

    @property
    def host_weight_bytes(self) -> int:
        """Bytes of host memory a parameter of a rank's shard, whatever is updated where."""
        return self.model.itemsize if self.offload_param else 0

    @property
    def state_traffic(self) -> int:
        """Bytes of host memory traffic a CPU-placed parameter and step, besides the shard's.

        With ``offload_param`` the new copy does not leave for the GPU when it is written, and that
        it is written counts for the shard.
        """
        return self.update_bytes - (2 * self.model.itemsize if self.offload_param else 0)

    @property
    def shard_traffic(self) -> int:
        """Likewise a parameter of the shard: its new copy is written once, and read for gathers."""
        return (2 * (self.rounds or 1) + 1) * self.host_weight_bytes

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise PlanError(f"a batch of {self.batch} samples: at least 1 is needed")
        if self.stage not in (1, 2, 3):
            raise PlanError(f"stage must be 1, 2 or 3, got {self.stage}")
        if not self.activations or set(self.activations) - set(ACTIVATIONS):
            raise PlanError(f"activations must be of {ACTIVATIONS}, got {self.activations}")
        if "store" in self.activations:
            unknown = {gpu.name for _, gpu in self.cluster.ranks if gpu.stored_bytes is None}
            if unknown:
                raise PlanError(
                    f'activations cannot be "store": what {", ".join(sorted(unknown))} would need '
                    "for them is not known"
                )
        if not 0.0 <= self.clipped_share <= 1.0:
            raise PlanError(
                f"clipped_share must be in [0, 1], got {self.clipped_share}: it is the share of "
                "the steps whose gradient is clipped"
            )
        if self.offload_param and self.stage != 3:
            raise PlanError(
                f"offload_param with stage {self.stage}: only stage 3 keeps weights in host "
                "memory; plan with --stage 3, or without --offload-param"
            )
        if self.gradient_bytes < 0:
            raise PlanError(f"gradient_bytes must not be negative, got {self.gradient_bytes}")
        if not 0.0 <= self.accumulation_ms < math.inf:
            raise PlanError(f"accumulation_ms must not be negative, got {self.accumulation_ms}")
        _positive(
            "bytes a parameter",
            gpu_state_bytes=self.gpu_state_bytes,
            host_state_bytes=self.host_state_bytes,
            update_bytes=self.state_traffic,
        )
