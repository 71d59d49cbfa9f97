"""``deepspeed.zero.GatheredParameters`` under ZeRO-3.

DeepSpeed's context manager asks the parameters themselves: those with a ``ds_id`` have functions
that bring them together and take them apart, and what its ``modifier_rank`` has written is sent to
the other ranks. Others it would let be read as they are, and written on one rank alone. So those
that are whole on every rank have one, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hytrain.engine.deepspeed_internals import PARAMETER_IS_THERE
from hytrain.errors import UnsupportedError
from hytrain.model.layer_state import LayerState
from hytrain.model.layout import ParameterSlot
from hytrain.zero3.layer_weights import LayerWeights
from hytrain.zero3.weight_passes import WeightPasses

_ids = itertools.count(1_000_000_000)  # beyond those that zero.Init gives

_NAMES = (
    "ds_id", "ds_process_group", "ds_shape", "ds_numel", "ds_status", "all_gather", "partition"
)  # fmt: skip


class GatheringParameters:
    """Gives parameters what DeepSpeed's context manager looks for."""

    def __init__(
        self,
        weights: WeightPasses,
        others: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        synchronize: Callable[[], None],
        flush: Callable[[], None],
        refresh: Callable[[LayerState, Sequence[ParameterSlot]], None],
    ) -> None:
        """
        Args:
            weights: gathers and releases layers.
            others: parameters that are in no layer: frozen and whole on every rank.
            group: the ranks that share them; None for all.
            synchronize: makes all weights those of the last step.
            flush: makes every layer's state that of the last step.
            refresh: makes master weights of some of a layer's parameters those of its shard.
        """
        self._weights = weights
        self._synchronize = synchronize
        self._flush = flush
        self._refresh = refresh
        self._layer_of: dict[int, LayerWeights] = {}
        self._parameters: list[nn.Parameter] = []
        for layer in weights.layers:
            for slot in layer.slots:
                self._layer_of[id(slot.parameter)] = layer
                self._parameters.append(slot.parameter)
        self._parameters += others
        for parameter in self._parameters:
            vars(parameter).update(
                ds_id=next(_ids),
                ds_process_group=group or dist.group.WORLD,
                ds_shape=parameter.shape,
                ds_numel=parameter.numel(),
                # Who asks is in a module's forward or backward, where they are.
                ds_status=PARAMETER_IS_THERE,
                all_gather=self._gather,
                partition=self._part,
            )

    def detach(self) -> None:
        """Makes them plain parameters again."""
        for parameter in self._parameters:
            for name in _NAMES:
                vars(parameter).pop(name, None)
        self._parameters.clear()

    def _layers(self, parameters: Sequence[torch.Tensor]) -> list[LayerWeights]:
        layers = (self._layer_of.get(id(p)) for p in parameters)
        found = {layer.index: layer for layer in layers if layer is not None}
        return [found[index] for index in sorted(found)]

    def _gather(self, param_list: Sequence[torch.Tensor], **_options: Any) -> None:
        """Whole layers of some parameters; a collective."""
        if self._weights.is_in_pass:
            raise UnsupportedError(
                "deepspeed.zero.GatheredParameters inside of a forward or backward: what a module "
                "uses is gathered for it; read other weights before or after"
            )
        self._synchronize()
        self._weights.settle()
        for layer in self._layers(param_list):
            self._weights.gather_layer(layer)

    def _part(
        self, param_list: Sequence[torch.Tensor], has_been_updated: bool = False, **_options: Any
    ) -> None:
        """The end of :meth:`_gather`; what was written into the weights is kept if it says so."""
        if has_been_updated:
            self._flush()  # nothing is to be applied on top of what was written
        for layer in self._layers(param_list):
            if has_been_updated:
                with torch.no_grad():
                    for part in layer.sharded:
                        part.storage.keep_gathered()
                    if layer.trained is not None:
                        self._refresh(layer.trained, _slots_of(layer.trained, param_list))
            self._weights.release_layer(layer)
        # Gathers run beside the compute stream and do not wait for what was written here.
        self._weights.wait_for_device()


def _slots_of(state: LayerState, parameters: Sequence[torch.Tensor]) -> list[ParameterSlot]:
    """The places of those of the parameters that the layer trains.

    Only these: the master weights of the others have bits that their training copy has not.
    """
    wanted = {id(parameter) for parameter in parameters}
    return [slot for slot in state.layout.slots if id(slot.parameter) in wanted]
