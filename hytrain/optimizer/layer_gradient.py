"""One layer's gradient of the current step, as far as it has come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from hytrain.kernels.gradient_copy import GradientCopier, add_together, copy_together, joined
from hytrain.model.layout import LayerLayout


class Zeros:
    """Zeros for layers that got no gradient in a backward.

    A rank without samples has only these, and its host runs far ahead of the collectives that read
    them: if each were a tensor of its own, those of all layers would be in memory at once.
    """

    def __init__(self, most: int, device: torch.device, *, is_reduced: bool) -> None:
        """With several ranks (``is_reduced``) zeros are only read: all layers share the same ones,
        as many as the largest layer's elements (``most``); otherwise each has its own."""
        self._most = most
        self._device = device
        self._is_reduced = is_reduced
        self._shared: dict[torch.dtype, torch.Tensor] = {}

    def take(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns ``size`` zeros, 1-D."""
        if not self._is_reduced:
            return torch.zeros(size, dtype=dtype, device=self._device)
        if dtype not in self._shared:
            self._shared[dtype] = torch.zeros(self._most, dtype=dtype, device=self._device)
        return self._shared[dtype][:size]

    def forget(self) -> None:
        """Drops the shared zeros when no more are needed; what was taken stays."""
        self._shared.clear()


class Progress(Enum):
    """How far a layer's gradient has come in one backward."""

    COMING = "coming"
    COMPLETE = "complete"
    """The last of it has come."""
    REDUCED = "reduced"
    """What had come is reduced, and sent to its update if the step's updates may begin."""


@dataclass(slots=True)
class LayerGradient:
    """One layer's gradient, from autograd to its update.

    Attributes:
        unreduced_grad: this rank's own gradient of the whole layer, flat; None while there is none.
            All that has come is in it only after :meth:`flush`.
        parts: each parameter's part of ``unreduced_grad``, 1-D; empty until one is asked for.
        together: gradients wait for each other and are taken over in one launch: by ``copier``, or
            joined if there is none.
        waiting: gradients by parameter that are not in ``unreduced_grad`` yet.
        reduced_shard: this rank's shard of what was reduced before (earlier micro-batches, or a
            step that was withdrawn).
        last_index: the parameter of the latest gradient.
        uses_before: uses of layers that this backward had made at the last firing.
        progress: how far the current backward has come with it.
        copier: sums the squares of what it copies; None if they are not needed before the
            reduction.
        copied_whole: ``unreduced_grad`` is what the copier copied, each parameter once, and nothing
            else.
    """

    layout: LayerLayout
    dtype: torch.dtype
    unreduced_grad: torch.Tensor | None = None
    reduced_shard: torch.Tensor | None = None
    written: list[bool] = field(init=False)
    fired: list[int] = field(init=False)
    remaining: int = 0
    last_firing: int = 0
    last_index: int = 0
    uses_before: int = 0
    progress: Progress = Progress.COMING
    copier: GradientCopier | None = None
    copied_whole: bool = False
    parts: list[torch.Tensor] = field(default_factory=list)
    together: bool = False
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.written = [False] * len(self.layout.slots)
        self.fired = [0] * len(self.layout.slots)

    def allocate(self, device: torch.device) -> torch.Tensor:
        """Allocates this rank's own gradient, and returns it."""
        memory = torch.empty(self.layout.size, dtype=self.dtype, device=device)
        self.unreduced_grad = memory
        self.parts = []
        self.written = [False] * len(self.layout.slots)
        self.copied_whole = True
        return memory

    def _part(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """A parameter's part of ``unreduced_grad``, in the gradient's shape."""
        if not self.parts:
            assert self.unreduced_grad is not None
            slots = self.layout.slots
            self.parts = [self.unreduced_grad[s.offset : s.offset + s.numel] for s in slots]
        return self.parts[index].view(gradient.shape)

    def take(self, index: int, gradient: torch.Tensor, device: torch.device) -> None:
        """Takes a parameter's gradient over, or adds it to what has come; nobody else uses it."""
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if self.together:
            if index in self.waiting:
                self.flush()
            self.waiting[index] = gradient.detach()
            if len(self.waiting) == len(self.layout.slots):
                self.flush()  # waiting on, they would take the GPU's memory twice
            return
        if self.unreduced_grad is None:
            self.allocate(device)
        part = self._part(index, gradient)
        if self.written[index]:
            part.add_(gradient)
            self.copied_whole = False
        else:
            # The first gradient is taken over: nothing is zeroed only to be added to.
            if self.copier is not None:
                self.copier.copy(index, gradient.detach(), part)
            else:
                part.copy_(gradient)
            self.written[index] = True

    def take_all(self, gradients: Sequence[torch.Tensor]) -> None:
        """Takes each parameter's gradient over, once; nobody else uses them."""
        if self.waiting:
            self.flush()
        if torch.is_grad_enabled():  # create_graph
            gradients = [gradient.detach() for gradient in gradients]
        self._write(range(len(gradients)), gradients)

    def flush(self) -> None:
        """Writes waiting gradients, in the stream that made them, to ``unreduced_grad``."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, {}
        indices = sorted(waiting)
        self._write(indices, [waiting[index] for index in indices])

    def _write(self, indices: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Takes some parameters' gradients over, in as few launches as can be."""
        if self.unreduced_grad is None:
            if len(gradients) == len(self.layout.slots) and self._may_join(gradients):
                if self.copier is None:
                    self.unreduced_grad = joined(gradients)
                    self.parts = []
                    self.copied_whole = False
                else:
                    self.copier.copy_all(gradients, self.allocate(gradients[0].device))
                self.written = [True] * len(gradients)
                return
            self.allocate(gradients[0].device)
        self.copied_whole = False
        parts = [self._part(i, gradient) for i, gradient in zip(indices, gradients, strict=True)]
        first = [number for number, index in enumerate(indices) if not self.written[index]]
        more = [number for number, index in enumerate(indices) if self.written[index]]
        for index in indices:
            self.written[index] = True
        if first:
            copy_together([parts[i] for i in first], [gradients[i] for i in first])
        if more:
            add_together([parts[i] for i in more], [gradients[i] for i in more])

    def _may_join(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether all parameters' gradients can be taken over in one launch."""
        if self.layout.gaps and self.copier is None:
            return False  # one after the other they are not the layer's flat space
        dtype = self.dtype if self.copier is None else gradients[0].dtype
        return [gradient.dtype for gradient in gradients].count(dtype) == len(gradients)

    def move(self, unreduced_grad: torch.Tensor | None, reduced_shard: torch.Tensor | None) -> None:
        """Points the gradient to other memory that holds it from now on, after :meth:`flush`."""
        self.unreduced_grad, self.reduced_shard = unreduced_grad, reduced_shard
        self.parts = []

    def fill(self, zeros: Zeros) -> None:
        """Writes zeros where there is no gradient: padding, and parameters unused this time.

        The gradient is complete then, and may only be read.
        """
        if self.waiting:
            self.flush()
        unreduced_grad = self.unreduced_grad
        if unreduced_grad is None:
            self.unreduced_grad = zeros.take(self.layout.size, self.dtype)
            self.copied_whole = False
            return
        for begin, end in self.layout.gaps:
            unreduced_grad[begin:end].zero_()
        if all(self.written):
            return
        for written, slot in zip(self.written, self.layout.slots, strict=True):
            if not written:
                unreduced_grad[slot.offset : slot.offset + slot.numel].zero_()

    def whole(self, device: torch.device) -> torch.Tensor:
        """A copy of ``unreduced_grad`` with zeros where nothing was written."""
        copy = torch.zeros(self.layout.size, dtype=self.dtype, device=device)
        self.flush()
        if self.unreduced_grad is not None:
            for written, slot in zip(self.written, self.layout.slots, strict=True):
                if written:
                    part = slice(slot.offset, slot.offset + slot.numel)
                    copy[part].copy_(self.unreduced_grad[part])
        return copy

    def release(self) -> torch.Tensor | None:
        """Returns ``unreduced_grad``; nothing here refers to it any more."""
        if self.waiting:
            self.flush()
        unreduced_grad, self.unreduced_grad = self.unreduced_grad, None
        self.parts = []
        return unreduced_grad

    @property
    def squares(self) -> torch.Tensor | None:
        """Partial sums of the squares of ``unreduced_grad``; None if they are not known."""
        if self.copier is None or not self.copied_whole or not all(self.written):
            return None
        return self.copier.squares


@dataclass(slots=True)
class FiringRecord:
    """What was learned from backward passes.

    Attributes:
        order: order of the layers, learned in the first backward; the same on all ranks.
        early: for each layer, whether it may go before the end of a backward; likewise.
        expected: for each mode that was seen, layer-major or not, and each layer and parameter:
            how often its hook fires for one micro-batch.
    """

    order: list[int]
    early: list[bool]
    expected: dict[bool, list[list[int]]] = field(default_factory=dict)


ON_SEVERAL_RANKS = (
    "Other ranks may wait in a collective that this one has left: start the job again from a "
    "checkpoint. If a part of the model is recomputed a varying number of times, checkpoint it "
    "with use_reentrant=False or use DeepSpeed's tiles (with compute_params), which may vary; or "
    "the first backward must be one with the most"
)
"""What can be done about a gradient that came after its layer was taken for complete."""
WHERE_COMMITTED = (
    "Without clipping and overflow check some layers may have been committed: load a checkpoint "
    "with engine.load_checkpoint and repeat the step; the counts are learned anew"
)
"""The same, on one rank."""
