"""What DeepSpeed's ZeRO-3 tells of itself, on hytrain's engine: parameters, and hooks of a model.

TRL, peft and DeepSpeed's own tools ask a parameter whether it is there (``ds_status``), how large
it is (``ds_numel``, ``ds_shape``) and what this rank keeps of it (``ds_tensor``). Generation with
all weights gathered (TRL's ``unwrap_model_for_generation``, DeepSpeed's own) takes the optimizer's
hooks off the model, so that ranks may call it differently often, and puts them back.
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
_ids = itertools.count(1_000_000_000)  # beyond those that zero.Init gives


class ParameterAttributes:
    """Gives parameters DeepSpeed's attributes of ZeRO-3, and keeps them true.

    ``ds_status`` is AVAILABLE exactly while the whole weights are there: always, where every rank
    keeps all of them, which ``ds_persist`` says. ``ds_tensor`` is what this rank owns of the
    parameter: 1-D, perhaps empty, since layers are cut, not parameters. It is the training copy
    itself: that of the last step after ``engine.synchronize()``.
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
        """Makes them plain parameters again. May be called twice."""
        self._weights.gatherer.on_change = None
        for parameter, names in self._given:
            for name in names:
                vars(parameter).pop(name, None)
        self._given.clear()
        self._sharded.clear()

    def _owned(
        self, parameters: Iterable[nn.Parameter]
    ) -> Iterator[tuple[nn.Parameter, bool, torch.Tensor]]:
        """Each with whether it is sharded, and this rank's part of it."""
        found: dict[int, tuple[bool, torch.Tensor]] = {}
        for layer in self._weights.layers:
            found.update(_owned_by_layer(layer))
        for parameter in parameters:
            is_sharded, shard = found.get(id(parameter)) or (False, self._equal_part(parameter))
            yield parameter, is_sharded, shard

    def _follow(self) -> None:
        """Weights are in other memory: a ``ds_tensor`` of the old would keep that."""
        for parameter, _, shard in self._owned(parameter for parameter, _ in self._given):
            vars(parameter)["ds_tensor"].data = shard.data

    def _note(self, layer: LayerWeights, presence: Presence) -> None:
        status = _STATUS[presence]
        for parameter in self._sharded.get(layer.index, ()):
            vars(parameter)["ds_status"] = status

    def _give(self, parameter: nn.Parameter, shard: torch.Tensor, *, is_sharded: bool) -> None:
        group = self._collectives.group or dist.group.WORLD
        # A tensor of its own: nobody else's gets these attributes. No view: a view keeps its base,
        # and with that the device's memory when weights leave it (offload_states).
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
        self._given.append((parameter, set(attributes)))

    def _equal_part(self, parameter: nn.Parameter) -> torch.Tensor:
        """Of a parameter that is whole on every rank and that nobody updates."""
        length = -(-parameter.numel() // self._collectives.world_size)
        flat = parameter.detach().reshape(-1)
        return flat[self._collectives.rank * length :][:length]


def _owned_by_layer(layer: LayerWeights) -> dict[int, tuple[bool, torch.Tensor]]:
    """id of each of a layer's parameters -> whether it is sharded, and this rank's part."""
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
    """As DeepSpeed's: for people."""
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
    """A hook as its owner sees it: something to be removed."""

    def __init__(self, weights: WeightPasses) -> None:
        self._weights = weights

    def remove(self) -> None:
        """Modules' hooks gather nothing any more, all of them: they work together."""
        self._weights.suspend()


def _external_parameters(module: nn.Module) -> ItemsView[Any, Any]:
    """A module's ``ds_external_parameters``: those that ``register_external_parameter`` gave it.

    There is nothing to do for them here: a read of a weight outside of its module is noticed.
    """
    return vars(module).get("_external_params", {}).items()


class ParameterOffload:
    """An optimizer's ``parameter_offload`` in ZeRO-3."""

    def __init__(self, module: nn.Module, weights: WeightPasses) -> None:
        self.module = module
        """The model."""
        self.forward_hooks: list[_Handle] = []
        """Not empty while hooks gather layers for their uses."""
        self.backward_hooks: list[_Handle] = []
        """As :attr:`forward_hooks`."""
        self._weights = weights
        self._marked: list[nn.Module] = []
        for each in module.modules():
            if "ds_external_parameters" not in vars(each):
                vars(each)["ds_external_parameters"] = partial(_external_parameters, each)
                self._marked.append(each)
        self._register_deepspeed_module(module)

    def _register_deepspeed_module(self, module: nn.Module, count: Any = None) -> None:
        """Hooks that were removed are there again."""
        del module, count
        self._weights.resume()
        self.forward_hooks = [_Handle(self._weights)]
        self.backward_hooks = [_Handle(self._weights)]

    def detach(self) -> None:
        """Takes off what was put on the modules. May be called twice."""
        for module in self._marked:
            vars(module).pop("ds_external_parameters", None)
        self._marked.clear()
        self.forward_hooks, self.backward_hooks = [], []
