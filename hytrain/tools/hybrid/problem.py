"""What is planned for: GPUs of several types, a profiled model, and what the cost model counts.

Times are milliseconds, memory MB (1024 of them a GB), bandwidths GB/s as in the published files.
A layer is a row of the profile: the first is the embedding, the last the head.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hytrain.errors import PlanError
from hytrain.formats.moment_kinds import FP32, state_bytes_each
from hytrain.formats.profile_file import MOST_SAMPLES

TpSpeed = Literal["first", "slowest"]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Host:
    """What the nodes have for optimizer state: what that frees, and how much longer steps are.

    A stage's state is shared out over its GPUs, and each GPU's part kept and updated by its node,
    whose memory and CPU its GPUs share evenly. hytrain's limits apply (docs/internals.md): updates
    begin with the last micro-batch's first final gradient, a layer's backward after that
    micro-batch's backward has begun, and end before the next step's forward of the same layer. So
    of the last backward and the next forward, t of a micro-batch, all but one layer's part hides
    them::

        exposed = max(0, max(P / rate, 2 B * P / copy rate) + t / n - t)

    with P parameters of one GPU's part and n layers. What pipeline bubbles hide besides is not
    counted.
    """

    memory_gb: float
    """Of each node, for state."""

    update_rate: float
    """Parameters a second that a node's CPU updates."""

    copy_rate: float
    """GB/s (10**9 bytes) between a GPU and its node's memory, each way."""

    parameter_size: int = 4
    """Bytes of a parameter in the profile's ``parameters_per_layer_bytes``."""

    copy_bytes: int = 2
    """Of a parameter, each way: its gradient to the host, the new weight back."""

    moments: str = FP32
    """How Adam's moments are kept; `update_rate` is of that kind, too."""

    def state_mb(self, parameter_bytes: Any) -> Any:
        """State of parameters of so many profiled bytes."""
        return parameter_bytes / self.parameter_size * state_bytes_each(self.moments) / 2**20

    def update_ms(self, parameter_bytes: Any, gpus: int, node_gpus: int) -> Any:
        """Of a stage's update, with nothing to hide behind.

        Args:
            parameter_bytes: of the stage, as profiled.
            gpus: of the stage.
            node_gpus: of the node that has most of them.
        """
        part = parameter_bytes / self.parameter_size / gpus
        seconds = max(node_gpus / self.update_rate, self.copy_bytes / (self.copy_rate * 1e9))
        return 1e3 * seconds * part


def exposed_ms(update: Any, time: Any, layers: Any) -> Any:
    """Of an update of so many ms, what the step is longer by."""
    return np.maximum(0.0, update + time / np.maximum(1, layers) - time)


@dataclass(frozen=True)
class Node:
    """A machine with GPUs of one type."""

    name: str
    device: str
    """Type of its GPUs."""

    gpus: int
    machine: str = ""
    """Nodes of one machine, of several types, have the same; empty: a machine of its own."""


@dataclass(frozen=True)
class DeviceType:
    """What the nodes of one type of GPU have in common."""

    name: str
    memory_mb: float
    """Of one GPU."""

    intra_bandwidth: float
    """GB/s within a node."""

    inter_bandwidth: float
    """GB/s between nodes; counted with ``Options.inter_node`` only."""


@dataclass(frozen=True)
class Samples:
    """A device type at one (tensor parallel degree, micro-batch size), by layer."""

    times: tuple[float, ...]
    """Forward and backward of one micro-batch, ms."""

    memory: tuple[float, ...]
    """MB."""

    fb_sync: float
    """Of forward and backward, what belongs to no layer, ms."""

    @cached_property
    def time_sums(self) -> Floats:
        """Times of the layers below each, ``num_layers + 1``."""
        return prefix_sums(self.times)

    @cached_property
    def memory_sums(self) -> Floats:
        """As :attr:`time_sums`, memory."""
        return prefix_sums(self.memory)


@dataclass(frozen=True)
class Constants:
    """What the published model takes from a single profile, whatever the device."""

    optimizer_ms: float
    """Twice the profiled optimizer time: the whole model's update at tp = 1."""

    batch_generator_ms: float
    """Of one micro-batch."""

    parameter_bytes: tuple[float, ...]
    """By layer."""


@dataclass(frozen=True)
class Options:
    """What is counted beyond the published cost model, or otherwise than in it."""

    tp_speed: TpSpeed = "slowest"
    """A tensor-parallel group of unequal GPUs is as fast as its first one (published) or as its
    slowest one."""

    inter_node: bool = False
    """Whoever is not within one node talks at the least *inter*-node bandwidth of the nodes."""

    per_gpu_memory: bool = False
    """Each GPU holds its replica's demand, instead of the group's sum of memory the stage's."""

    host: Host | None = None
    """A stage may keep its optimizer state in host memory."""


@dataclass(frozen=True)
class Problem:
    """Everything that a cost depends on, checked."""

    nodes: tuple[Node, ...]
    devices: tuple[DeviceType, ...]
    """By name, ascending; so are the orders of types that are searched."""

    samples: dict[tuple[str, int, int], Samples] = field(repr=False)
    """By (device type, tensor parallel degree, micro-batch size)."""

    constants: Constants = field(repr=False)
    gbs: int
    """Samples of a step."""

    hidden_size: int
    sequence_length: int
    vocab_size: int
    max_tp: int
    max_batch: int
    """Largest micro-batch of one replica."""

    variance: float = 1.0
    """A group has at least ``max(N // S, S // N) * variance`` GPUs, N in all, S stages."""

    mem_coef: float = 5.0
    options: Options = Options()

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if names != sorted(set(names)) or {node.device for node in self.nodes} != set(names):
            raise PlanError(
                f"devices must be the nodes' types, each once, in alphabetical order, not {names}"
            )
        for what, number in (("samples of a step (gbs)", self.gbs), ("GPUs", self.num_gpus)):
            if number > MOST_SAMPLES:
                raise PlanError(f"{number} {what}: plans are made for {MOST_SAMPLES} at most")

    @property
    def num_layers(self) -> int:
        return len(self.constants.parameter_bytes)

    @cached_property
    def num_gpus(self) -> int:
        return sum(node.gpus for node in self.nodes)

    @cached_property
    def device(self) -> dict[str, DeviceType]:
        return {device.name: device for device in self.devices}

    @cached_property
    def parameter_sums(self) -> Floats:
        """Parameter bytes of the layers below each, ``num_layers + 1``."""
        return prefix_sums(self.constants.parameter_bytes)

    def profiled(self, device: str, tp: int, samples: int) -> Samples:
        """Of a type of GPU, at a tensor parallel degree and micro-batch size.

        Raises:
            PlanError: there is no profile of that.
        """
        try:
            return self.samples[device, tp, samples]
        except KeyError:
            raise PlanError(
                f"there is no profile of {device} at tp {tp} and micro-batch size {samples}"
            ) from None

    @cached_property
    def machines(self) -> tuple[int, ...]:
        """Of each node the first node of its machine."""
        firsts: dict[str, int] = {}
        return tuple(
            firsts.setdefault(node.machine or f"{number}", number)
            for number, node in enumerate(self.nodes)
        )

    def machine_gpus(self, machine: int) -> int:
        """GPUs of a machine."""
        pairs = zip(self.machines, self.nodes, strict=True)
        return sum(node.gpus for number, node in pairs if number == machine)

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """Results of the cost model's functions that are asked for again and again."""
        return {}

    def ranks(self, order: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """(device type, machine) of each rank, where nodes come in that order of types."""
        return tuple(
            (name, self.machines[number])
            for name in order
            for number, node in enumerate(self.nodes)
            if node.device == name
            for _ in range(node.gpus)
        )


def prefix_sums(values: Sequence[float]) -> Floats:
    """0, the first, the first two, ..."""
    return np.concatenate([[0.0], np.cumsum(values)])


@dataclass(frozen=True)
class Plan:
    """Which GPUs form which stage, and what each stage does."""

    order: tuple[str, ...]
    """Of device types; within a type the nodes are as in the hostfile."""

    groups: tuple[int, ...]
    """GPUs of each stage."""

    strategies: tuple[tuple[int, int], ...]
    """(data parallel, tensor parallel) degree of each stage."""

    micro_batches: int
    partition: tuple[int, ...]
    """First layer of each stage, then the number of layers."""

    on_host: tuple[bool, ...] = ()
    """Whether each stage keeps its optimizer state in host memory; empty: none does."""

    @property
    def stages(self) -> int:
        return len(self.groups)

    def offloads(self, stage: int) -> bool:
        return bool(self.on_host) and self.on_host[stage]
