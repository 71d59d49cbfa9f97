"""DeepSpeed's ZeRO-3 interface on hytrain's engine: attributes of parameters, hooks of a model.

TRL, peft and DeepSpeed's own tools read from a parameter whether it is gathered (``ds_status``),
how large it is (``ds_numel``, ``ds_shape``) and what this rank keeps of it (``ds_tensor``).
Generation with all weights gathered (TRL's ``unwrap_model_for_generation``, DeepSpeed's own)
removes the optimizer's hooks, so that ranks may call the model different numbers of times, and puts
them back.
"""

from __future__ import annotations

import itertools
from collections.abc import ItemsView, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hytrain.engine.deepspeed_internals import (
    PartitionedParamStatus,
    ZeroParamStatus,
    ZeroParamType,
)
from hytrain.engine.gathered_parameters import GatheringParameters
from hytrain.engine.parameter_access import WeakCall
from hytrain.model.layer_state import LayerState
from hytrain.optimizer.kept_state import KeptState
from hytrain.zero3.gatherer import Presence
from hytrain.zero3.layer_weights import LayerWeights, ShardedWeights
from hytrain.zero3.weight_passes import WeightPasses

_STATUS = {
    Presence.AWAY: ZeroParamStatus.NOT_AVAILABLE,
    Presence.COMING: ZeroParamStatus.INFLIGHT,
    Presence.THERE: ZeroParamStatus.AVAILABLE,
}
_ids = itertools.count(-1_000_000_000)  # below those that zero.Init gives: see GatheringParameters


class ParameterAttributes:
    """Sets DeepSpeed's ZeRO-3 attributes on parameters, and keeps them up to date.

    ``ds_status`` is AVAILABLE exactly while the whole parameter is on this rank: always if every
    rank keeps all of it, which ``ds_persist`` says. ``ds_tensor`` is what this rank owns of the
    parameter: 1-D, perhaps empty, since layers are sharded, not parameters. It is the training copy
    itself, which is that of the last step after ``engine.synchronize()``.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: WeightPasses,
        kept: KeptState,
    ) -> None:
        self._weights = weights
        self._collectives = kept.collectives
        self._gathering = GatheringParameters(weights, kept)
        self._given: list[tuple[nn.Parameter, set[str]]] = []
        self._sharded: dict[int, list[nn.Parameter]] = {}
        for parameter, is_sharded, shard in self._owned(model.parameters()):
            self._give(parameter, shard, is_sharded=is_sharded)
        for layer in weights.layers:
            parameters = [slot.parameter for part in layer.sharded for slot in part.layout.slots]
            self._sharded[layer.index] = parameters
        weights.gatherer.on_change = self._note
        weights.when_moved(self._follow)

    def detach(self) -> None:
        """Makes the parameters plain ones again. May be called twice."""
        self._weights.gatherer.on_change = None
        for parameter, names in self._given:
            for name in names:
                vars(parameter).pop(name, None)
        self._given.clear()
        self._sharded.clear()

    def _owned(
        self, parameters: Iterable[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, bool, torch.Tensor]]:
        """Yields each parameter, whether it is sharded, and this rank's part of it."""
        found: dict[int, tuple[bool, torch.Tensor]] = {}
        for layer in self._weights.layers:
            found.update(_owned_by_layer(layer))
        for parameter in parameters:
            is_sharded, shard = found.get(id(parameter)) or (False, self._equal_part(parameter))
            yield parameter, is_sharded, shard

    def _follow(self) -> None:
        """Points each ``ds_tensor`` to the weights' new memory; it would keep the old alive."""
        for parameter, _, shard in self._owned(parameter for parameter, _ in self._given):
            vars(parameter)["ds_tensor"].data = shard.data

    def _note(self, layer: LayerWeights, presence: Presence) -> None:
        status = _STATUS[presence]
        for parameter in self._sharded.get(layer.index, ()):
            vars(parameter)["ds_status"] = status

    def _give(self, parameter: nn.Parameter, shard: torch.Tensor, *, is_sharded: bool) -> None:
        group = self._collectives.group or dist.group.WORLD
        # A tensor object of its own, as nothing else may get these attributes. Not a view: a view
        # keeps its base, and so the device's memory when weights leave it (offload_states).
        shard = shard.data
        vars(shard).update(
            ds_numel=shard.numel(), status=PartitionedParamStatus.AVAILABLE, final_location=None
        )
        there = ZeroParamStatus.NOT_AVAILABLE if is_sharded else ZeroParamStatus.AVAILABLE
        attributes: dict[str, Any] = {
            "ds_id": next(_ids),
            "ds_param_type": ZeroParamType.PARTITIONED,
            "ds_status": there,
            "ds_shape": parameter.shape,
            "ds_numel": parameter.numel(),
            "ds_tensor": shard,
            "ds_persist": not is_sharded,
            "ds_active_sub_modules": set(),
            "ds_process_group": group,
            "ds_zero_partition_rank": self._collectives.rank,
            "ds_zero_partition_world_size": self._collectives.world_size,
            "is_external_param": False,
            "ds_summary": partial(_summary, parameter),
            "partition_numel": shard.numel,
            "all_gather": WeakCall(self._gathering.gather, parameter),
            "partition": WeakCall(self._gathering.part, parameter),
        }
        vars(parameter).update(attributes)
        self._gathering.served.add(id(parameter))
        self._given.append((parameter, set(attributes)))

    def _equal_part(self, parameter: nn.Parameter) -> torch.Tensor:
        """Returns this rank's part of a parameter that is whole on every rank and not updated."""
        length = -(-parameter.numel() // self._collectives.world_size)
        flat = parameter.detach().reshape(-1)
        return flat[self._collectives.rank * length :][:length]


def _owned_by_layer(layer: LayerWeights) -> dict[int, tuple[bool, torch.Tensor]]:
    """Returns the id of each of a layer's parameters -> (whether sharded, this rank's part)."""
    parts: list[LayerState | ShardedWeights] = [*layer.sharded, *layer.resident]
    found: dict[int, tuple[bool, torch.Tensor]] = {}
    for part in parts:
        owner = part.storage if isinstance(part, ShardedWeights) else part
        for slot in part.layout.slots:
            parameter = slot.parameter
            low, high = max(owner.begin, slot.offset), min(owner.end, slot.offset + slot.numel)
            shard = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            if low < high:
                shard = part.storage.slice(low, high)
            found[id(parameter)] = isinstance(part, ShardedWeights), shard
    return found


def _summary(parameter: nn.Parameter, *_arguments: Any, **_named: Any) -> dict[str, Any]:
    """Returns the same as DeepSpeed's ``ds_summary``, for display."""
    own = vars(parameter)
    return {
        "id": own["ds_id"],
        "status": own["ds_status"].name,
        "numel": parameter.numel(),
        "ds_numel": own["ds_numel"],
        "shape": tuple(parameter.shape),
        "ds_shape": tuple(own["ds_shape"]),
        "requires_grad": parameter.requires_grad,
        "grad_shape": None,
        "persist": own["ds_persist"],
        "active_sub_modules": own["ds_active_sub_modules"],
        "ds_tensor.shape": own["ds_tensor"].shape,
    }


class _Handle:
    """A hook's handle: something that can be removed."""

    def __init__(self, weights: WeightPasses) -> None:
        self._weights = weights

    def remove(self) -> None:
        """Stops the hooks of all modules from gathering: they work together."""
        self._weights.suspend()


def _external_parameters(module: nn.Module) -> ItemsView[Any, Any]:
    """Returns a module's external parameters, from ``register_external_parameter``.

    Nothing is done for them here: a read of a weight outside of its module is detected anyway.
    """
    return vars(module).get("_external_params", {}).items()


class ParameterOffload:
    """The optimizer's ``parameter_offload`` under ZeRO-3."""

    def __init__(self, module: nn.Module, weights: WeightPasses) -> None:
        self.module = module
        """The model."""
        self.forward_hooks: list[_Handle] = []
        """Not empty while hooks gather layers for use."""
        self.backward_hooks: list[_Handle] = []
        """Like :attr:`forward_hooks`."""
        self._weights = weights
        self._marked: list[nn.Module] = []
        for each in module.modules():
            if "ds_external_parameters" not in vars(each):
                vars(each)["ds_external_parameters"] = partial(_external_parameters, each)
                self._marked.append(each)
        self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Puts back hooks that were removed."""
        del module, count
        self._weights.resume()
        self.forward_hooks = [_Handle(self._weights)]
        self.backward_hooks = [_Handle(self._weights)]

    def detach(self) -> None:
        """Removes what was set on the modules. May be called twice."""
        for module in self._marked:
            vars(module).pop("ds_external_parameters", None)
        self._marked.clear()
        self.forward_hooks, self.backward_hooks = [], []
