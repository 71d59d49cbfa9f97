"""Notices what users write into weights, by torch's count of in-place writes.

Updates are not counted by torch; the engine counts each one itself, so that a backward through a
graph that saved old weights is an error. A write to ``parameter.data`` is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hytrain.model.layer_state import LayerState
from hytrain.model.layout import ParameterSlot


class WeightWrites:
    """Counts of the parameters of layers that are whole on this rank."""

    def __init__(self, layers: Sequence[LayerState]) -> None:
        places = [(x, slot) for x in layers if not x.storage.is_sharded for slot in x.layout.slots]
        self._places = places
        self._parameters = [slot.parameter for _, slot in places]
        self._counts = self._count(0)

    def _count(self, overwrites: int) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return [parameter._version - overwrites for parameter in self._parameters]

    def take(self, overwrites: int) -> dict[int, list[ParameterSlot]]:
        """Parameters that were written to since the last call, by their layer's index.

        ``overwrites``: how often the engine has overwritten all of them.
        """
        counts = self._count(overwrites)
        if counts == self._counts:
            return {}
        before, self._counts = self._counts, counts
        found: dict[int, list[ParameterSlot]] = {}
        for (layer, slot), old, new in zip(self._places, before, counts, strict=True):
            if old != new:
                found.setdefault(layer.index, []).append(slot)
        return found
