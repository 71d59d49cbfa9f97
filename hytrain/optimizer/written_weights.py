"""Adopts what users write into weights as master weights; see docs/weights.md.

A write is noticed by torch's count of in-place writes. Updates are not counted by torch; the engine
counts each one itself, so that a backward through a graph that saved old weights is an error. A
write to ``parameter.data`` is not counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from hytrain.model.layer_state import LayerState
from hytrain.model.layout import ParameterSlot
from hytrain.model.storage import ResidentStorage
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.optimizer.gradients import GradientCollector
from hytrain.optimizer.reduction import GradientReducer

logger = logging.getLogger(__name__)


class WrittenWeights:
    """Finds writes to the parameters of layers that are whole on this rank, and adopts them."""

    def __init__(
        self, pipeline: UpdatePipeline, reducer: GradientReducer, collector: GradientCollector
    ) -> None:
        self._pipeline = pipeline
        self._reducer = reducer
        self._collector = collector
        layers = [layer for layer in pipeline.layers if not layer.storage.is_sharded]
        self._places = [(layer, slot) for layer in layers for slot in layer.layout.slots]
        self._parameters = [slot.parameter for _, slot in self._places]
        self._counts = self._count()
        self._has_warned_of_moves = False
        self._has_warned_of_rounding = False

    def _count(self) -> list[int]:
        """In-place writes to each parameter that were not the engine's."""
        overwrites = self._pipeline.overwrites
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            return [parameter._version - overwrites for parameter in self._parameters]

    def restore_views(self) -> None:
        """Makes parameters that were put elsewhere the training copy again; then :meth:`adopt`.

        Without gradients they may be elsewhere: this is how averaged weights are evaluated.
        """
        moved: list[str] = []
        for state in self._pipeline.layers:
            if isinstance(state.storage, ResidentStorage):
                moved += state.storage.restore_views()
        if moved:
            self._collector.renew_hooks()
        self.adopt()
        if moved and not self._has_warned_of_moves:
            self._has_warned_of_moves = True
            logger.warning(
                "%d parameters (%s, ...) were given other memory (parameter.data = ..., "
                "module.to(...)): they are the engine's training copy again, whatever was written "
                "there. Write values with parameter.copy_(...) after engine.synchronize()",
                len(moved),
                moved[0],
            )

    def adopt(self) -> None:
        """Adopts, as master weights, weights that were written to since the last call."""
        counts = self._count()
        if counts == self._counts:
            return
        before, self._counts = self._counts, counts
        found: dict[int, list[ParameterSlot]] = {}
        for (layer, slot), old, new in zip(self._places, before, counts, strict=True):
            if old != new:
                found.setdefault(layer.index, []).append(slot)
        self._reducer.withdraw_all()
        self._pipeline.flush()
        with torch.no_grad():
            for index, slots in found.items():
                self._pipeline.layers[index].before_change()
                self.adopt_slots(self._pipeline.layers[index], slots)
        # State on the device is read on the update stream.
        self._pipeline.streams.synchronize()

    def adopt_slots(self, layer: LayerState, slots: Sequence[ParameterSlot]) -> None:
        """:meth:`LayerState.adopt_written`; warns once if unchanged elements are rounded."""
        layer.adopt_written(slots)
        is_whole = layer.form.rounds_away and layer.before_write is None
        if is_whole and slots and not self._has_warned_of_rounding:
            self._has_warned_of_rounding = True
            logger.warning(
                'weights were written (%s, ...): with "hytrain.master": "split" the master weights '
                "of these whole parameters are what is there now, so that elements that were not "
                "changed lose what bf16 does not hold. deepspeed.utils.safe_set_full_fp32_param "
                "writes fp32 values",
                slots[0].name,
            )

    def ignore(self) -> None:
        """Ignores writes to weights so far: their master weights have them already."""
        self._counts = self._count()
