"""The planning problem: GPUs of several types, a profiled model, options of the cost model.

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
    """Optimizer state in the nodes' memory: what that frees, and how much longer steps are.

    A stage's state is divided among its GPUs, and each GPU's part kept and updated by its node,
    whose memory and CPU its GPUs share evenly. hytrain's limits apply (docs/internals.md): updates
    begin with the last micro-batch's first final gradient, one layer's backward after that
    micro-batch's backward has begun, and end before the next step's forward of the same layer. So
    the last backward and the next forward, together a micro-batch's time t, hide them, except for
    one layer's part::

        exposed = max(0, max(P / rate, 2 B * P / copy rate) + t / n - t)

    with P parameters in one GPU's part and n layers. What pipeline bubbles hide in addition is not
    counted.
    """

    memory_gb: float
    """Memory of each node for state."""

    update_rate: float
    """Parameters a second that a node's CPU updates."""

    copy_rate: float
    """GB/s (10**9 bytes) between a GPU and its node's memory, each way."""

    parameter_size: int = 4
    """Bytes of a parameter in the profile's ``parameters_per_layer_bytes``."""

    copy_bytes: int = 2
    """Bytes copied per parameter, each way: its gradient to the host, the new weight back."""

    moments: str = FP32
    """How Adam's moments are kept; `update_rate` is for that kind."""

    def state_mb(self, parameter_bytes: Any) -> Any:
        """Returns the MB of state of parameters of so many profiled bytes."""
        return parameter_bytes / self.parameter_size * state_bytes_each(self.moments) / 2**20

    def update_ms(self, parameter_bytes: Any, gpus: int, node_gpus: int) -> Any:
        """Returns the ms of a stage's update if nothing hides it.

        Args:
            parameter_bytes: of the stage, as profiled.
            gpus: of the stage.
            node_gpus: GPUs of the largest node that the stage is on.
        """
        part = parameter_bytes / self.parameter_size / gpus
        seconds = max(node_gpus / self.update_rate, self.copy_bytes / (self.copy_rate * 1e9))
        return 1e3 * seconds * part


def exposed_ms(update: Any, time: Any, layers: Any) -> Any:
    """Returns by how many ms an update of so many ms makes the step longer."""
    return np.maximum(0.0, update + time / np.maximum(1, layers) - time)


@dataclass(frozen=True)
class Node:
    """A machine with GPUs of one type."""

    name: str
    device: str
    """Type of its GPUs."""

    gpus: int
    machine: str = ""
    """The same for the nodes of a machine with several types; empty: a machine of its own."""


@dataclass(frozen=True)
class DeviceType:
    """What the nodes of one type of GPU have in common."""

    name: str
    memory_mb: float
    """Memory of one GPU."""

    intra_bandwidth: float
    """GB/s within a node."""

    inter_bandwidth: float
    """GB/s between nodes; counted with ``Options.inter_node`` only."""


@dataclass(frozen=True)
class Samples:
    """The profile of a device type at one (tensor parallel degree, micro-batch size), by layer."""

    times: tuple[float, ...]
    """Forward and backward of one micro-batch, ms."""

    memory: tuple[float, ...]
    """Memory, MB."""

    fb_sync: float
    """The part of forward and backward that belongs to no layer, ms."""

    @cached_property
    def time_sums(self) -> Floats:
        """Summed times of the layers before each, ``num_layers + 1`` values."""
        return prefix_sums(self.times)

    @cached_property
    def memory_sums(self) -> Floats:
        """Summed memory, as :attr:`time_sums`."""
        return prefix_sums(self.memory)


@dataclass(frozen=True)
class Constants:
    """What the published model takes from a single profile, whatever the device."""

    optimizer_ms: float
    """Twice the profiled optimizer time: the whole model's update at tp = 1."""

    batch_generator_ms: float
    """Time to generate one micro-batch."""

    parameter_bytes: tuple[float, ...]
    """Parameter bytes of each layer."""


@dataclass(frozen=True)
class Options:
    """What is counted in addition to the published cost model, or differently."""

    tp_speed: TpSpeed = "slowest"
    """A tensor-parallel group of unequal GPUs is as fast as its first one (published) or as its
    slowest one."""

    inter_node: bool = False
    """Whether GPUs of several nodes communicate at the least *inter*-node bandwidth of these."""

    per_gpu_memory: bool = False
    """Whether each GPU must hold its replica's demand; if not, the group's total memory must hold
    the stage's."""

    host: Host | None = None
    """If given, a stage may keep its optimizer state in host memory."""


@dataclass(frozen=True)
class Problem:
    """Everything that a cost depends on, checked."""

    nodes: tuple[Node, ...]
    devices: tuple[DeviceType, ...]
    """In ascending order of name, as are the orders of types that are searched."""

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
        """Summed parameter bytes of the layers before each, ``num_layers + 1`` values."""
        return prefix_sums(self.constants.parameter_bytes)

    def profiled(self, device: str, tp: int, samples: int) -> Samples:
        """Returns the profile of a type of GPU at a tensor parallel degree and micro-batch size.

        Raises:
            PlanError: there is no such profile.
        """
        try:
            return self.samples[device, tp, samples]
        except KeyError:
            raise PlanError(
                f"there is no profile of {device} at tp {tp} and micro-batch size {samples}"
            ) from None

    @cached_property
    def machines(self) -> tuple[int, ...]:
        """For each node the number of the first node of its machine."""
        firsts: dict[str, int] = {}
        return tuple(
            firsts.setdefault(node.machine or f"{number}", number)
            for number, node in enumerate(self.nodes)
        )

    def machine_gpus(self, machine: int) -> int:
        """Returns the number of GPUs of a machine."""
        pairs = zip(self.machines, self.nodes, strict=True)
        return sum(node.gpus for number, node in pairs if number == machine)

    @cached_property
    def memo(self) -> dict[Hashable, Any]:
        """Results of the cost model's functions that are needed repeatedly."""
        return {}

    def ranks(self, order: Sequence[str]) -> tuple[tuple[str, int], ...]:
        """Returns (device type, machine) of each rank, with the nodes in that order of types."""
        return tuple(
            (name, self.machines[number])
            for name in order
            for number, node in enumerate(self.nodes)
            if node.device == name
            for _ in range(node.gpus)
        )


def prefix_sums(values: Sequence[float]) -> Floats:
    """Returns 0, the first value, the sum of the first two, ..."""
    return np.concatenate([[0.0], np.cumsum(values)])


@dataclass(frozen=True)
class Plan:
    """Which GPUs form which stage, and what each stage does."""

    order: tuple[str, ...]
    """Order of device types; within a type the nodes are in the hostfile's order."""

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
