"""The memory of every layer on one rank, and the limits that a decision obeys. Plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hytrain.formats.moment_kinds import FP32, SPLIT, MasterName, MomentsName, state_bytes

PIECE = ", piece "
"""What follows a large block's name in the names of its pieces, the first one's excepted."""
_SIDES = {"before", "after"}


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """One layer's memory on one rank.

    Attributes:
        parameters: elements of this rank's shard.
        gradient_itemsize: bytes of an element of the gradient that waits for its update.
        keeps_pending: whether a CPU-placed layer's gradient waits on the host for its commit; not
            if updates are committed directly.
        weights_itemsize: bytes of an element of the training copy that comes back.
        moments: how Adam's moments are kept ("hytrain.moments").
        master: how master weights are kept ("hytrain.master").
        host_master: how they are kept on the host, if differently.
        streamed_states: for a layer that is updated on the GPU with state from the host, how many
            tensors its optimizer has beside master weights; None: Adam updates it, on the CPU if
            its state is there.
        piece_bytes: bytes of its state that are copied to the GPU at once.
        work_bytes: bytes on the GPU that its update takes beside state and gradient.
    """

    name: str
    parameters: int
    gradient_itemsize: int = 2
    weights_itemsize: int = 2
    keeps_pending: bool = True
    moments: MomentsName = FP32
    master: MasterName = FP32
    host_master: MasterName | None = None
    streamed_states: int | None = None
    piece_bytes: int = 0
    work_bytes: int = 0

    @property
    def is_streamed(self) -> bool:
        """Whether it is updated on the GPU wherever its state is."""
        return self.streamed_states is not None

    @property
    def may_be_late(self) -> bool:
        """Whether its update can wait until backward has ended, as split master weights on the
        host require."""
        return self.master == SPLIT and self.keeps_pending

    @property
    def state_bytes(self) -> int:
        """Bytes of master weights and both moments, on the GPU."""
        return state_bytes(self.moments, self.parameters, self.master, self.streamed_states)

    @property
    def host_state_bytes(self) -> int:
        """The same on the host."""
        master = self.host_master or self.master
        return state_bytes(self.moments, self.parameters, master, self.streamed_states)


def num_blocks(layers: Sequence[LayerBytes]) -> int:
    """How many blocks a model has, as its discovery names them; pieces of one block are one."""
    names = {layer.name.partition(PIECE)[0] for layer in layers}
    return sum(name.partition(" ")[0] not in _SIDES for name in names)


def layers_words(layers: Sequence[LayerBytes]) -> str:
    """The number of layers in words, and which of them are no blocks."""
    first_words = [layer.name.partition(" ")[0] for layer in layers]
    sides = _SIDES.intersection(first_words)
    blocks, pieces = num_blocks(layers), sum(word not in _SIDES for word in first_words)
    words = counted(blocks, "block") + (f" in {pieces} pieces" if pieces > blocks else "")
    detail = f" ({words}, and what comes {' and '.join(sorted(sides, reverse=True))})"
    return counted(len(layers), "layer") + (detail if sides else "")


def counted(number: int, what: str) -> str:
    """A number of things, in words: "1 layer", "2 layers"."""
    return f"{number} {what}{'' if number == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The memory that a rank may use, in bytes.

    Attributes:
        gpu: memory of the GPU that this process may use in all; None if layers "on the GPU" and
            layers on the host share one memory (no GPU): the GPU then bounds nothing.
        gpu_reserve: part of it that stays free: fragmentation, other libraries, the user's peaks.
        gpu_base: peak of everything but the optimizer state and the waiting gradients of
            GPU-placed layers: training copy, activations, gradients in flight. Before the first
            step only the training copy is known.
        host: memory that this rank may still take for state (its share of what the machine or the
            cgroup has left).
        host_reserve: part of it that stays free.
        gpu_base_at: for each layer, in forward order, the part of ``gpu_base`` in use while that
            layer's backward runs; empty if it has not been measured. The gradients of
            GPU-placed layers pile up as backward goes down while activations are released, so
            that the two do not add up at one moment.
        host_base: part of ``host`` that offloaded activations have yet to take.
        kept_gradients: gradients of all layers that stay on the GPU from one micro-batch to the
            next and are not in ``gpu_base``, until that is measured.
        shares_host: whether the GPU's memory is the host's: what the GPU takes comes out of
            ``host``, in which the memory that it has already counts as free.
    """

    gpu: int | None
    gpu_reserve: int
    gpu_base: int
    host: int
    host_reserve: int
    gpu_base_at: tuple[int, ...] = field(default=())
    host_base: int = 0
    kept_gradients: int = 0
    shares_host: bool = False
