"""``deepspeed.zero.GatheredParameters`` under ZeRO-3.

DeepSpeed's context manager uses functions of the parameters: those with a ``ds_id`` have functions
that gather and partition them, and what its ``modifier_rank`` has written is sent to the other
ranks. It would leave others as they are, so that a write would reach one rank only. Parameters that
are whole on every rank therefore have a ``ds_id``, too.

Of a list it asks the parameter with the least ``ds_id``, for all of them. Where other engines have
some of the list (TRL's reference model), hytrain passes these on to functions of their own, and its
ids are less than theirs: DeepSpeed's functions would take hytrain's parameters for their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hytrain.errors import UnsupportedError
from hytrain.model.layer_state import LayerState
from hytrain.model.layout import ParameterSlot
from hytrain.optimizer.autograd_task import graph_task
from hytrain.optimizer.kept_state import KeptState
from hytrain.zero3.layer_weights import LayerWeights
from hytrain.zero3.schedule import GatherSchedule
from hytrain.zero3.weight_passes import WeightPasses


class GatheringParameters:
    """Gathers and partitions parameters, as DeepSpeed's context manager asks for it.

    Layers that are gathered this way stay so until the context ends, through forwards, generation
    and nested contexts.
    """

    def __init__(
        self,
        weights: WeightPasses,
        kept: KeptState,
    ) -> None:
        self._weights = weights
        self._kept = kept
        self._claims: Counter[int] = Counter()
        """Layer index -> contexts that have gathered the layer and have not ended."""
        self._layer_of = {
            id(slot.parameter): layer for layer in weights.layers for slot in layer.slots
        }
        self.served: set[int] = set()
        """Ids of the parameters that have these functions: the model's, frozen ones included."""

    def gather(
        self,
        parameter: nn.Parameter,
        param_list: Sequence[torch.Tensor] | None = None,
        *_arguments: Any,
        **_options: Any,
    ) -> None:
        """Gathers the whole layers of some parameters, by default of this one; a collective.

        In a forward this counts as a use of the weights outside of their modules: the layers stay
        gathered from then on in this pass, and in all of each later one.

        Raises:
            UnsupportedError: a backward is running in which they are not gathered.
        """
        parameters = [parameter] if param_list is None else param_list
        if others := self._others(parameters):
            others[0].all_gather(param_list=others)
        layers = self._layers(parameters)
        schedule = self._weights.schedule
        if schedule is not None and schedule.is_open:
            self._use_in_pass(schedule, layers)
            return
        if not self._claims:
            self._kept.synchronize()
            self._weights.settle()
        for layer in layers:
            is_there = self._weights.gatherer.is_live(layer)
            self._weights.gatherer.lent.add(layer.index)
            if is_there and not self._claims[layer.index]:
                continue  # gathered by the engine: it stays when this context ends
            self._weights.gather_layer(layer)
            self._weights.gatherer.pinned.add(layer.index)
            if not self._claims[layer.index] and layer.resident:
                # Without this, earlier writes would be taken for what master weights have already.
                self._kept.written.adopt()
                for state in layer.resident:
                    _remember_copy(state)  # writes go into it; of a shard they go elsewhere
            self._claims[layer.index] += 1

    def part(
        self,
        parameter: nn.Parameter,
        param_list: Sequence[torch.Tensor] | None = None,
        hierarchy: int = 0,
        has_been_updated: bool = False,
        **_options: Any,
    ) -> None:
        """Ends :meth:`gather`; if ``has_been_updated``, what was written into weights is kept.

        Raises:
            UnsupportedError: weights were written in a forward or backward.
        """
        del hierarchy
        parameters = [parameter] if param_list is None else param_list
        if others := self._others(parameters):
            others[0].partition(param_list=others, has_been_updated=has_been_updated)
        schedule = self._weights.schedule
        if schedule is not None and schedule.is_open:
            if has_been_updated:
                raise UnsupportedError(
                    "deepspeed.zero.GatheredParameters with a modifier_rank inside of a forward or "
                    "backward: weights are written before or after a pass; leave modifier_rank out"
                )
            return
        if has_been_updated:
            self._kept.flush()  # nothing is to be applied on top of what was written
        for layer in self._layers(parameters):
            if has_been_updated:
                self._keep_written(layer, parameters)
            self._release(layer)
        # Gathers run beside the compute stream and do not wait for what was written here.
        self._kept.pipeline.streams.synchronize()

    def _use_in_pass(self, schedule: GatherSchedule, layers: Sequence[LayerWeights]) -> None:
        for layer in layers:
            if not layer.sharded or schedule.is_held(layer.index):
                continue
            if graph_task() == -1:
                self._weights.hold(layer)
            elif not self._weights.gatherer.is_live(layer):
                raise UnsupportedError(
                    f"deepspeed.zero.GatheredParameters of layer '{layer.name}' in a backward in "
                    "which no module uses it: gather it in the model's forward as well, or before "
                    "or after both"
                )

    def _keep_written(self, layer: LayerWeights, parameters: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            for trained in layer.trained:
                # A save beside training may not have read the state yet.
                trained.before_change()
                if not layer.resident:
                    _remember_copy(trained)
            # Only these: an outer context may be writing to other parameters of the same layer.
            written = {id(parameter) for parameter in parameters}
            if self._weights.gatherer.is_live(layer):
                for storage in (part.storage for part in layer.sharded):
                    for slot in storage.layout.slots:
                        if id(slot.parameter) in written:
                            storage.take(slot, storage.view(slot))
            for trained in layer.trained:
                slots = [x for x in trained.layout.slots if id(x.parameter) in written]
                self._kept.written.adopt_slots(trained, slots)
                if not layer.resident:
                    trained.before_write = None
                elif trained.before_write is not None:
                    _remember_written(trained, slots)

    def _release(self, layer: LayerWeights) -> None:
        if not self._claims[layer.index]:
            return
        self._claims[layer.index] -= 1
        if not self._claims[layer.index]:
            del self._claims[layer.index]
            for state in layer.resident:
                state.before_write = None
            self._weights.gatherer.pinned.discard(layer.index)
            self._weights.release_layer(layer)

    def _others(self, parameters: Sequence[torch.Tensor]) -> list[Any]:
        """The parameters of other engines, in the order given."""
        return [parameter for parameter in parameters if id(parameter) not in self.served]

    def _layers(self, parameters: Sequence[torch.Tensor]) -> list[LayerWeights]:
        layers = (self._layer_of.get(id(p)) for p in parameters)
        found = {layer.index: layer for layer in layers if layer is not None}
        return [found[index] for index in sorted(found)]


def _remember_copy(state: LayerState) -> None:
    """Keeps the copy if it is half of split master weights: only it tells what is written later."""
    if state.form.rounds_away:
        state.before_write = state.read_copy()


def _remember_written(state: LayerState, slots: Sequence[ParameterSlot]) -> None:
    """Updates the kept copy where writes have been adopted, so that they are not taken for new."""
    before, now = state.before_write, state.read_copy()
    assert before is not None
    for slot in slots:
        begin, end = max(slot.offset, state.begin), min(slot.offset + slot.numel, state.end)
        if begin < end:
            part = slice(begin - state.begin, end - state.begin)
            before[part] = now[part]
