"""What a plan is made from: the cluster, the model, the batch. Plain data.

The problem is larger than Cephalo's (tools/uneven/solver.py), since optimizer state may live
on the host and be updated there. For each rank a plan decides the samples b of the global batch,
the micro-batch m, the shard s of the state, how many of the L layers are updated on the GPU (K),
and what becomes of activations between forward and backward. cost_model.py has the times and the
memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from hytrain.errors import PlanError
from hytrain.formats.dtypes import Dtype
from hytrain.formats.moment_kinds import FP32, MomentsName
from hytrain.formats.policies import LAYER_MAJOR, Activations
from hytrain.tools.planner.cluster import Cluster
from hytrain.tools.planner.curves import FREE, Table

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Model:
    """The model, as equal layers.

    Attributes:
        num_layers: L.
        parameters: trained parameters of the whole model.
        frozen: frozen parameters, which have only a training copy, sharded in stage 3.
        boundary_bytes: bytes of activations between two layers, per sample.
        itemsize: bytes per parameter of the training copy, and of its gradient; as many cross to
            the host and come back.
        dtype: of the training copy, for the record; None if not known.
        seq_len: tokens per sample, for the record; None if not known.
        moments: how Adam's moments are kept, for the record.
        outside: trained parameters before the first layer and after the last one. They are among
            ``parameters``, spread evenly over the layers, but training updates them as layers of
            their own.
    """

    name: str
    num_layers: int
    parameters: int
    boundary_bytes: int = 0
    itemsize: int = 2
    dtype: Dtype | None = None
    seq_len: int | None = None
    frozen: int = 0
    moments: MomentsName = FP32
    outside: tuple[int, int] = (0, 0)

    @property
    def block_size(self) -> float:
        """Parameters of each of the L layers."""
        return (self.parameters - sum(self.outside)) / self.num_layers

    @property
    def update_sizes(self) -> list[float]:
        """Parameters of each layer that training updates, in their order."""
        before, after = self.outside
        return [size for size in (before, *[self.block_size] * self.num_layers, after) if size]

    @property
    def num_updates(self) -> int:
        """Layers that training updates: L, and one each for parameters before and after them."""
        return self.num_layers + sum(size > 0 for size in self.outside)

    def gpu_part(self, gpu_layers: int) -> float:
        """Returns the share of state in the first ``gpu_layers`` of :attr:`update_sizes`."""
        if gpu_layers == self.num_updates:
            return 1.0
        blocks, before = gpu_layers, self.outside[0]
        if before and gpu_layers:
            blocks -= 1
        return (before * (gpu_layers > 0) + blocks * self.block_size) / self.parameters

    @property
    def gpu_parts(self) -> npt.NDArray[np.float64]:
        """:meth:`gpu_part` of 0, 1, ..., :attr:`num_updates` layers."""
        return np.array([self.gpu_part(number) for number in range(self.num_updates + 1)])

    @property
    def layer_bytes(self) -> float:
        """Bytes of the training copy of one layer's trained parameters, and of their gradient."""
        return float(self.itemsize) * self.parameters / self.num_layers

    @property
    def layer_weight_bytes(self) -> float:
        """Bytes of one layer's training copy, frozen parameters included."""
        return self.layer_bytes * self.weight_bytes / self.itemsize

    @property
    def weight_bytes(self) -> float:
        """Bytes of the whole training copy, frozen parameters included, per trained parameter."""
        return self.itemsize * (1.0 + self.frozen / self.parameters)


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """A batch and a model's state, to be dealt to the ranks of a cluster.

    Attributes:
        stage: ZeRO stage; 3 shards the training copy too.
        activations: the activation policies that may be used.
        gradient_bytes: bytes per parameter of the gradient before it is reduced. The GPU holds all
            of it while micro-batches pass through the model one by one, and at the end of the first
            backward if there are several ranks, which have not agreed on an order yet, or if that
            goes layer by layer, which is a trial.
        gpu_state_bytes: bytes per GPU-placed parameter, besides the training copy; its gradient at
            the end of backward is :attr:`waiting_bytes`.
        host_state_bytes: bytes per CPU-placed parameter: 14, or 16 with fp32 gradients; fewer with
            moments in fewer bytes.
        update_bytes: bytes of host memory traffic per CPU-placed parameter and step.
        allow_idle: whether a rank may compute nothing and only hold state.
        rounds: number of micro-batches that every rank with samples makes; None: any. If
            micro-batches pass through the model one by one in stage 3, each gathers every layer on
            all ranks: a rank with fewer would wait for those with more. Layer by layer, a layer is
            gathered once per pass, and ranks may differ.
        offload_param: the training copy is kept in pinned host memory (stage 3): a rank's shard of
            it on its host, whole layers on the GPU while they are used. GPU updates send the new
            copy there, CPU updates write it in place.
        clipped_share: share of steps whose gradient is clipped, in [0, 1]: GPU layers are chosen
            and the step is predicted for it. By default 1, so that a plan also holds at the
            beginning of training.
        keeps_gradients: in stage 3 each GPU has room for its shard of all gradients, as the first
            backward keeps them. If not, that backward sends them as later ones do (if each rank
            makes one micro-batch), and waits for the CPU's updates.
        sequence_ranks: ranks that share each sequence; ``batch`` counts as many parts per sample.
        exchange_ms: time of the exchanges of a layer's attention, each way; the layer's times
            include it already.
        splits_master: master weights are split on the GPU, and on the CPU for as few layers as the
            memory of a rank's part of its host demands; the updates of these layers begin when the
            step's outcome is known (late layers). ``host_state_bytes`` is with split ones.
    """

    cluster: Cluster
    model: Model
    batch: int
    stage: Literal[1, 2, 3] = 2
    activations: tuple[Activations, ...] = ("keep", "offload")
    gpu_state_bytes: float = 12
    host_state_bytes: float = 14
    update_bytes: float = 30
    gradient_bytes: int = 0
    allow_idle: bool = True
    rounds: int | None = None
    clipped_share: float = 1.0
    offload_param: bool = False
    keeps_gradients: bool = True
    sequence_ranks: int = 1
    exchange_ms: Table = FREE
    splits_master: bool = False

    @property
    def needs_rounds(self) -> bool:
        """Whether :attr:`rounds`, and one accumulation mode for all ranks, are still undecided.

        With ``offload_param`` also for one rank: :attr:`shard_traffic` depends on how often it
        fetches its weights.
        """
        is_open = self.rounds is None and not set(self.activations) <= set(LAYER_MAJOR)
        is_gathered = self.cluster.num_ranks > 1 or self.offload_param
        return is_open and self.stage == 3 and is_gathered

    @property
    def sharded_bytes(self) -> float:
        """GPU bytes per parameter of a rank's shard, wherever it is updated.

        In stage 3 these are the training copy, unless that is on the host, and the gradient that
        micro-batches add to, or that the first backward keeps (:attr:`keeps_gradients`). It is not
        counted with ``offload_param`` for one rank with one backward (a single micro-batch, or
        layer by layer), which sends each gradient at once.
        """
        if self.stage != 3:
            return 0
        weights = 0.0 if self.offload_param else self.model.weight_bytes
        is_one_pass = (self.rounds or 1) == 1
        is_sent = is_one_pass and self.offload_param and self.cluster.num_ranks == 1
        if is_sent or (is_one_pass and not self.keeps_gradients):
            return weights
        return weights + self.gradient_bytes

    @property
    def waiting_bytes(self) -> int:
        """Bytes per GPU-placed parameter at the end of backward, besides :attr:`gpu_state_bytes`.

        Its reduced gradient waits for the outcome of the step, unless it is among
        :attr:`sharded_bytes`. Activations are gone by then.
        """
        has_gradient = self.sharded_bytes > (0 if self.offload_param else self.model.weight_bytes)
        return 0 if has_gradient else self.model.itemsize

    @property
    def host_weight_bytes(self) -> float:
        """Bytes of host memory per parameter of a rank's shard, wherever it is updated."""
        return self.model.weight_bytes if self.offload_param else 0.0

    @property
    def written_bytes(self) -> int:
        """Bytes that a GPU-placed parameter's update sends to the host."""
        return self.model.itemsize if self.offload_param else 0

    @property
    def state_traffic(self) -> float:
        """Bytes of host memory traffic per CPU-placed parameter and step, besides the shard's.

        With ``offload_param`` the new copy is not sent to the GPU when it is written, and writing
        it is part of :attr:`shard_traffic`.
        """
        return self.update_bytes - (2 * self.model.itemsize if self.offload_param else 0)

    @property
    def shard_traffic(self) -> float:
        """Likewise per parameter of the shard: the new copy is written once, read for gathers."""
        return 2 * (self.rounds or 1) * self.host_weight_bytes + self.written_bytes

    def __post_init__(self) -> None:
        if self.offload_param and self.stage != 3:
            raise PlanError(
                f"offload_param with stage {self.stage}: only stage 3 keeps weights in host "
                "memory; plan with --stage 3, or without --offload-param"
            )
