"""Moves everything off the device between two phases, and back, bit for bit.

Each holder of a tensor is given one on the host in its place, so that whatever is read meanwhile is
valid memory: parameters are views of the host's copy. No training pass runs until everything is
back (:meth:`PassTracker.check_open`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

import torch
from torch import nn

from hytrain.errors import ConfigError, UnsupportedError, did_you_mean
from hytrain.model.layer_state import LayerState, StatePart
from hytrain.offload.host_blocks import HostBlocks, is_dense
from hytrain.optimizer.kept_state import KeptState
from hytrain.optimizer.layer_gradient import LayerGradient
from hytrain.optimizer.pass_tracker import PassTracker

logger = logging.getLogger(__name__)


class StateKind(str, Enum):
    """Kinds of states that can leave the device, named as in DeepSpeed's OffloadStateTypeEnum."""

    optim_states = "optim_states"
    """Adam's moments of layers that are updated on the device."""
    hp_params = "hp_params"
    """fp32 master weights of layers that are updated on the device."""
    lp_params = "lp_params"
    """The training copy, or this rank's shard of it, and frozen parameters."""
    lp_grads = "lp_grads"
    """Gradients of a step that is not final."""
    contiguous_grad_buffer = "contiguous_grad_buffer"
    """Zeros that stand in for the gradients of layers that got none."""


def kinds_to_offload(include: Container[Any] | None, device: Any) -> frozenset[StateKind]:
    """The kinds that DeepSpeed's arguments (its enums, or their names) ask to move to the host.

    A container that is not iterable is asked for each name. None: everything; device "none":
    nothing.

    Raises:
        ConfigError: ``include`` is a string, or has an unknown name.
        UnsupportedError: another device than "cpu" and "none".
    """
    where = _name(device)
    if where not in ("cpu", "none"):
        raise UnsupportedError(
            f'offload_states(device={where!r}): states go to host memory; give "cpu"'
        )
    if isinstance(include, str):
        raise ConfigError(f"offload_states(include={include!r}): give a list, as in [{include!r}]")
    if include is None:
        kinds = frozenset(StateKind)
    elif isinstance(include, Iterable):
        kinds = frozenset(_kind(value) for value in cast("Iterable[Any]", include))
    else:
        kinds = frozenset(kind for kind in StateKind if kind.value in include)
    if where == "none":
        logger.warning('offload_states(device="none"): nothing is moved')
        return frozenset()
    return kinds


def _kind(value: Any) -> StateKind:
    name = _name(value)
    known = [kind.value for kind in StateKind]
    if name in known:
        return StateKind(name)
    raise ConfigError(
        f"offload_states(include=...) has {name!r}: {did_you_mean(name, known)}known are "
        f"{', '.join(known)}"
    )


def _name(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)


@dataclass(frozen=True, slots=True)
class _Holder:
    """Tensors of one holder, and how it is given others in their place."""

    kind: StateKind
    tensors: list[torch.Tensor]
    put: Callable[[Sequence[torch.Tensor]], None]


class OffloadedStates:
    """The states of an optimizer that are temporarily on the host instead of the device."""

    def __init__(
        self,
        kept: KeptState,
        passes: PassTracker,
        parameters: Iterable[nn.Parameter],
    ) -> None:
        self._kept = kept
        self._passes = passes
        self._parameters = list(parameters)
        self._device = kept.device
        self._blocks = HostBlocks(self._device, "states that leave the device (offload_states)")
        self._away: list[_Holder] = []
        """Holders of what has left, with what they hold on the host."""

    @property
    def kinds(self) -> frozenset[StateKind]:
        """The kinds that are away."""
        return frozenset(map(StateKind, self._passes.away))

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory in use for states that are away, or kept for the next time."""
        return self._blocks.num_bytes

    # -- to the host -----------------------------------------------------------------------------

    def offload(self, kinds: Collection[StateKind], *, pin: bool, non_blocking: bool) -> None:
        """Moves kinds still on the device to the host, freeing the device's memory; a collective.

        Raises:
            ConfigError: a backward is running, gathered weights are in use, or updates are
                committed directly and have begun.
            HostMemoryError: the host has not enough memory; nothing has been moved.
        """
        coming = frozenset(kinds) - self.kinds
        if not coming:
            return
        if not self.kinds:
            self._come_to_rest()
        self._kept.pipeline.streamed.give_back()
        # In a call of its own: its references to device tensors are gone when it returns.
        self._move(coming, pin=pin, non_blocking=non_blocking)
        self._split_what_stays()
        if StateKind.contiguous_grad_buffer in coming:
            self._passes.collector.zeros.forget()
        # No gc.collect(), which takes a second with a large heap: nothing of ours is in a cycle.
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _move(self, coming: frozenset[StateKind], *, pin: bool, non_blocking: bool) -> None:
        holders = self._find(coming)
        copies = iter(self._blocks.take([x for holder in holders for x in holder.tensors], pin=pin))
        self._passes.away |= coming
        away: list[_Holder] = []
        for holder in holders:
            on_host = [next(copies) for _ in holder.tensors]
            for copy, tensor in zip(on_host, holder.tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            away.append(_Holder(holder.kind, on_host, holder.put))
        for holder in away:
            holder.put(holder.tensors)
        self._away += away
        self._kept.weights.moved()
        if not non_blocking:
            # Without this wait a reader on the host could see a copy that has not arrived. It comes
            # last: pointing everything to the host takes the host as long as some copies.
            self._kept.pipeline.streams.synchronize()

    def _come_to_rest(self) -> None:
        """Brings everything to rest: no update runs, no layer is gathered, no move has begun."""
        weights, pipeline = self._kept.weights, self._kept.pipeline
        if weights.gatherer.pinned:
            raise ConfigError(
                "offload_states() where gathered weights are in use: call it behind the block of "
                "gathered_parameters() or deepspeed.zero.GatheredParameters"
            )
        self._passes.withdraw_updates("offload_states()")
        self._passes.timer.invalidate()
        for layer in pipeline.layers:
            layer.before_change()
        self._kept.synchronize()
        pipeline.mover.finish()
        pipeline.cpu.release_fetched()
        weights.settle()
        weights.forget()
        pipeline.streams.synchronize()

    def _find(self, coming: frozenset[StateKind]) -> list[_Holder]:
        holders: list[_Holder] = []
        if StateKind.lp_params in coming:
            holders += self._weights()
        if StateKind.lp_grads in coming:
            holders += [_held_gradient(g) for g in self._passes.collector.layers]
        for layer in self._kept.layers:
            if layer.placement == "gpu":
                holders += _states(layer, coming)
        return [holder for holder in holders if holder.tensors]

    def _weights(self) -> list[_Holder]:
        holders: list[_Holder] = []
        found: set[int] = set()
        for layer in self._kept.weights.layers:
            found.update(id(slot.parameter) for slot in layer.slots)
            parts = [*layer.trained, *(() if layer.frozen is None else (layer.frozen,))]
            for storage in (part.storage for part in parts):
                if not (storage.is_sharded and storage.on_host):
                    holders.append(_Holder(StateKind.lp_params, storage.kept, storage.move))
        rest = [p for p in self._parameters if id(p) not in found]
        for parameter in _with_memory_of_their_own(rest, self._device):
            put = _data_setter(parameter)
            holders.append(_Holder(StateKind.lp_params, [parameter.data], put))
        return holders

    def _split_what_stays(self) -> None:
        """Gives what stays of a layer's state memory of its own: all of it was one block."""
        staying: list[StatePart] = [p for p, kind in _KIND_OF.items() if kind not in self.kinds]
        if len(staying) == len(_KIND_OF):
            return
        for layer in self._kept.layers:
            if layer.placement == "gpu":
                for part in staying:
                    layer.move_state(part, layer.state_part(part).clone())

    # -- and back --------------------------------------------------------------------------------

    def reload(self, *, non_blocking: bool) -> None:
        """Brings back what has left, if anything.

        Raises:
            torch.OutOfMemoryError: the device has not enough memory; what has come back stays, and
                another call can bring the rest.
        """
        if not self.kinds:
            return
        while self._away:
            holder = self._away[-1]
            came = [torch.empty_like(copy, device=self._device) for copy in holder.tensors]
            for tensor, copy in zip(came, holder.tensors, strict=True):
                tensor.copy_(copy, non_blocking=True)
            holder.put(came)
            self._away.pop()  # what has come back stays, if there is no memory for the next
        pipeline, weights = self._kept.pipeline, self._kept.weights
        pipeline.streamed.fit_buffers()  # here, as a step may be open: its update comes next
        self._join_states()
        # Updates, copies and collectives run on streams of their own: without this wait they could
        # use what has not arrived.
        pipeline.streams.all_wait_for_compute()
        for layer in pipeline.layers:
            pipeline.cpu.weights_moved(layer)
        weights.moved()
        if not non_blocking:
            pipeline.streams.synchronize()
        self._blocks.give_back()
        self._passes.timer.invalidate()
        self._passes.away = frozenset()

    def _join_states(self) -> None:
        """Makes a layer's state one block again, to be given back whole when the layer moves."""
        for layer in self._kept.layers:
            if layer.placement == "gpu" and not layer.is_one_block:
                parts = [layer.state_part(part) for part in _KIND_OF]
                layer.set_state(torch.cat(parts))

    def close(self) -> None:
        """Releases everything; weights that are on the host stay the model's, in plain memory."""
        for holder in self._away:
            if holder.kind is StateKind.lp_params:
                holder.put([copy.clone() for copy in holder.tensors])
        self._away.clear()
        self._blocks.close()


_KIND_OF: dict[StatePart, StateKind] = {
    "master": StateKind.hp_params,
    "moments": StateKind.optim_states,
}


def _states(layer: LayerState, coming: frozenset[StateKind]) -> list[_Holder]:
    parts: list[StatePart] = [part for part, kind in _KIND_OF.items() if kind in coming]
    if len(parts) < len(_KIND_OF):
        return [_part_of_state(layer, part) for part in parts]
    assert layer.is_one_block
    return [
        _Holder(StateKind.optim_states, [layer.memory], lambda given: layer.set_state(given[0]))
    ]


def _part_of_state(layer: LayerState, part: StatePart) -> _Holder:
    def put(tensors: Sequence[torch.Tensor]) -> None:
        layer.move_state(part, tensors[0])

    return _Holder(_KIND_OF[part], [layer.state_part(part)], put)


def _held_gradient(gradient: LayerGradient) -> _Holder:
    gradient.flush()
    has_local, has_held = gradient.unreduced_grad is not None, gradient.reduced_shard is not None

    def put(tensors: Sequence[torch.Tensor]) -> None:
        given = iter(tensors)
        gradient.move(next(given) if has_local else None, next(given) if has_held else None)

    tensors = [t for t in (gradient.unreduced_grad, gradient.reduced_shard) if t is not None]
    return _Holder(StateKind.lp_grads, tensors, put)


def _data_setter(parameter: nn.Parameter) -> Callable[[Sequence[torch.Tensor]], None]:
    def put(tensors: Sequence[torch.Tensor]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            parameter.data = tensors[0]

    return put


def _with_memory_of_their_own(
    parameters: Sequence[nn.Parameter], device: torch.device
) -> list[nn.Parameter]:
    """Dense parameters on the device that are alone in their memory; others are not moved."""
    users: dict[int, int] = {}
    for parameter in parameters:
        address = parameter.untyped_storage().data_ptr()
        users[address] = users.get(address, 0) + 1
    return [
        p
        for p in parameters
        if p.device == device
        and is_dense(p)
        and p.untyped_storage().nbytes() == p.numel() * p.element_size()
        and users[p.untyped_storage().data_ptr()] == 1
    ]
