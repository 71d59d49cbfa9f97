"""One layer's gradient of the current step, as far as it has come."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hytrain.kernels.gradient_copy import GradientCopier
from hytrain.layers.layout import LayerLayout


@dataclass(slots=True)
class LayerGradient:
    """One layer's gradient on its way.

    Attributes:
        local: this rank's own gradient of the whole layer, flat; None while there is none.
        parts: each parameter's part of ``local``, once something was written in its shape.
        held: this rank's shard of what was reduced before (earlier micro-batches, or a step that
            was withdrawn).
        uses_before: uses of layers that this backward had made at the last firing.
        closed: the gradient of the current backward has been reduced.
        copied_whole: ``local`` is what the copier copied, each parameter once, and nothing else.
    """

    layout: LayerLayout
    dtype: torch.dtype
    local: torch.Tensor | None = None
    held: torch.Tensor | None = None
    written: list[bool] = field(default_factory=list)
    fired: list[int] = field(default_factory=list)
    remaining: int = 0
    last_firing: int = 0
    uses_before: int = 0
    final: bool = False
    closed: bool = False
    copier: GradientCopier | None = None
    copied_whole: bool = False
    parts: list[torch.Tensor] = field(default_factory=list)

    def allocate(self, device: torch.device) -> None:
        """Makes room for this rank's own gradient."""
        self.local = local = torch.empty(self.layout.size, dtype=self.dtype, device=device)
        self.parts = [local[slot.offset : slot.offset + slot.numel] for slot in self.layout.slots]
        self.written = [False] * len(self.parts)
        self.copied_whole = True

    def release(self) -> torch.Tensor | None:
        """Hands ``local`` over; nothing here refers to it any more."""
        local, self.local = self.local, None
        self.parts = []
        return local

    @property
    def squares(self) -> torch.Tensor | None:
        """Partial sums of the squares of ``local``; None where they are not known."""
        if self.copier is None or not self.copied_whole or not all(self.written):
            return None
        return self.copier.squares
