"""Moves layers: whose state moves when, and what form it has on the CPU.

If master weights are split, those of a layer on the CPU become whole, or split again, by a move
to the GPU and back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hytrain.model.layer_state import LayerState
from hytrain.offload.mover import LayerMover
from hytrain.placement.costs import LayerBytes

SETTLED_STEPS = 4
"""Steps after the last move until times count as those of the new placement: the marks of a step
are read one step later, and the first steps fill the allocator's caches."""
_NO_MEMORY = (torch.OutOfMemoryError, MemoryError)


@dataclass(frozen=True, slots=True)
class MissingMemory:
    """A layer could not be moved; it is where it was.

    Attributes:
        what: "gpu" or "host": that side had no memory for its state; "form": it keeps its form,
            since one of the two had no memory.
        reason: what had no memory, for people.
    """

    layer: LayerState
    what: Literal["gpu", "host", "form"]
    reason: str


class LayerMoves:
    """Moves layers to their target places, a few between two steps."""

    def __init__(self, layers: Sequence[LayerState], mover: LayerMover) -> None:
        """``layers``: all, in forward order, the first of them GPU-placed."""
        self.layers = list(layers)
        self._mover = mover
        self.target = self.num_gpu_layers
        self._planned: Sequence[LayerBytes] = ()
        """The layers as they are to be."""
        self._changing_form: list[LayerState] = []
        """Layers on the CPU that are to have another form there."""
        self._settled_steps = 0
        # Moves make the worker late: an eighth of the layers per step keeps the delay short.
        self.per_step = max(1, -(-len(self.layers) // 8))

    @property
    def num_gpu_layers(self) -> int:
        """GPU-placed layers, always the first ones."""
        return [layer.placement for layer in self.layers].count("gpu")

    @property
    def is_moving(self) -> bool:
        """Whether layers have yet to move or to change their form."""
        return self.target != self.num_gpu_layers or bool(self._changing_form)

    @property
    def is_settled(self) -> bool:
        """Whether no layer has moved for so long that times are those of this placement."""
        return self._settled_steps >= SETTLED_STEPS and not self.is_moving

    def set_target(self, gpu_layers: int, planned: Sequence[LayerBytes]) -> None:
        """Sets the target: the first ``gpu_layers`` on the GPU, the others in the form planned."""
        self.target, self._planned = gpu_layers, planned
        self._changing_form = [
            layer
            for layer in self.layers[gpu_layers:]
            if layer.placement == "cpu"
            if layer.form.host_master != planned[layer.index].host_master
        ]

    def apply(self, refused: Callable[[MissingMemory], None], *, at_once: bool = False) -> bool:
        """Moves layers towards the target; called between two steps.

        Args:
            refused: is told what could not be done, and sets another target.
            at_once: whether to move all of them, not only a few.

        Returns:
            Whether any were to be moved.

        Raises:
            HostMemoryError: the host no longer has even the memory that a layer had there.
        """
        if not self.is_moving:
            self._settled_steps += 1
            self._mover.release()
            return False
        self._settled_steps = 0
        left = 2 * len(self.layers) if at_once else self.per_step
        while left and self.is_moving:
            left -= 1
            missing = self._move_one()
            if missing is not None:
                refused(missing)
                if missing.what != "form":
                    return True
        self._mover.release()
        return True

    def _move_one(self) -> MissingMemory | None:
        here = self.num_gpu_layers
        if here < self.target:
            return self._to_gpu(self.layers[here], "gpu")
        if self._changing_form:  # before layers come to the host, for which it makes room
            return self._change_form(self._changing_form.pop(0))
        return self._to_cpu(self.layers[here - 1])

    def _to_gpu(self, layer: LayerState, what: Literal["gpu", "form"]) -> MissingMemory | None:
        try:
            self._mover.to_gpu(layer)
        except _NO_MEMORY:
            reason = f"the GPU had no memory for the state of layer '{layer.name}'"
            return MissingMemory(layer, what, reason)
        return None

    def _to_cpu(self, layer: LayerState) -> MissingMemory | None:
        layer.form = replace(layer.form, host_master=self._planned[layer.index].host_master)
        try:
            self._mover.to_cpu(layer)
        except _NO_MEMORY as error:
            reason = f"the host had no memory for the state of layer '{layer.name}' ({error})"
            return MissingMemory(layer, "host", reason)
        return None

    def _change_form(self, layer: LayerState) -> MissingMemory | None:
        before = layer.form.host_master
        missing = self._to_gpu(layer, "form")
        if missing is None and (missing := self._to_cpu(layer)) is not None:
            layer.form = replace(layer.form, host_master=before)
            self._mover.to_cpu(layer)
            missing = replace(missing, what="form")
        return missing
