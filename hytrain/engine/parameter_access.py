"""``deepspeed.utils.safe_get_full_fp32_param`` and its siblings, on parameters of hytrain's engine.

DeepSpeed's functions use what they find on the parameter: ``_z3_optimizer`` if it is sharded
(ZeRO-3), otherwise methods that DeepSpeed's ZeRO-1/2 sets. Both lead here. Nothing is read or
written before this rank's worker is done with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any

import torch
from torch import nn

from hytrain.checkpoint.gather import (
    STATES,
    ParameterPlace,
    Piece,
    gather_everywhere,
    list_parameters,
)
from hytrain.errors import ConfigError, EngineClosedError
from hytrain.optimizer.kept_state import KeptState
from hytrain.optimizer.pass_tracker import PassTracker

_NAMES = (
    "_z3_optimizer", "_hp_mapping", "get_full_hp_param", "set_full_hp_param", "get_full_hp_grad",
    "set_full_hp_grad",
)  # fmt: skip
_READING = "reading master weights or moments"


def _gone() -> EngineClosedError:
    return EngineClosedError(
        "a parameter was asked for state of an engine that is gone: keep the engine that "
        "hytrain.initialize returns as long as its model is used"
    )


class _Unpickled:
    """A reference from a parameter to its engine that does not keep the engine alive.

    Autograd's nodes refer to parameters, unseen by Python's garbage collector, and the engine keeps
    those nodes. An engine reachable from its parameters would form a cycle that is never freed.

    It becomes None in every copy and file: parameters are pickled with all of their attributes.
    """

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return NoneType, ()


class WeakPart(_Unpickled):
    """A weak reference to a part of the engine, with that part's attributes."""

    def __init__(self, part: object) -> None:
        self._part = weakref.ref(part)

    def __getattr__(self, name: str) -> Any:
        """
        Raises:
            EngineClosedError: the engine is gone.
        """
        part = self._part()
        if part is None:
            raise _gone()
        return getattr(part, name)


class WeakCall(_Unpickled):
    """A weak reference to a method of a part of the engine, with a parameter as first argument."""

    def __init__(self, method: Callable[..., Any], parameter: nn.Parameter) -> None:
        self._method = weakref.WeakMethod(method)
        self._parameter = weakref.ref(parameter)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """
        Raises:
            EngineClosedError: the engine is gone.
        """
        method, parameter = self._method(), self._parameter()
        if method is None or parameter is None:
            raise _gone()
        return method(parameter, *arguments, **named)


class StateAccess:
    """Master weights, moments and gradients of single parameters, as DeepSpeed's tools see them.

    Methods for full tensors are collectives, as with DeepSpeed. Those for "local" state (of
    parameters that ZeRO-3 shards) are not: it is what this rank owns of the parameter, 1-D and
    possibly empty, since layers are sharded, not parameters. For frozen parameters DeepSpeed's
    functions return None.

    Gradients exist between a backward and step(): averaged over ranks, not clipped, those of all
    micro-batches so far. Any read or write between backward and step() takes back updates that have
    begun; they are then made in step().
    """

    def __init__(
        self, kept: KeptState, passes: PassTracker, parameters: Iterable[nn.Parameter]
    ) -> None:
        self._kept = kept
        self._passes = passes
        self._places: dict[int, ParameterPlace] = {}
        self._parameters = list(parameters)
        for parameter in self._parameters:
            # DeepSpeed uses it if a parameter has a ds_id (ZeRO-3).
            vars(parameter)["_z3_optimizer"] = WeakPart(self)
        for place in list_parameters(kept.layers):
            parameter = place.slot.parameter
            self._places[id(parameter)] = place
            if place.layer.storage.is_sharded:
                continue
            vars(parameter).update(
                _hp_mapping=WeakPart(self),
                get_full_hp_param=WeakCall(self.get_full_hp_param, parameter),
                set_full_hp_param=WeakCall(self._set_full_hp_param, parameter),
                get_full_hp_grad=WeakCall(self.get_fp32_grad_for_param, parameter),
                set_full_hp_grad=WeakCall(self._set_full_hp_grad, parameter),
            )

    def detach(self) -> None:
        """Makes the parameters plain ones again. May be called twice."""
        for parameter in self._parameters:
            for name in _NAMES:
                vars(parameter).pop(name, None)
        self._parameters.clear()

    # -- master weights and moments, under the names of DeepSpeed's ZeRO-3 ------------------------

    def get_full_hp_param(
        self, param: torch.Tensor, optim_state_key: str | None = None
    ) -> torch.Tensor | None:
        """Returns the whole fp32 master weight or, with a key, a moment, on the device.

        Keys are "exp_avg" and "exp_avg_sq", or "momentum_buffer" for a matrix that Muon updates.

        Raises:
            ConfigError: there is no such state, or updates are committed directly and have begun.
        """
        place = self._places.get(id(param))
        if place is None:
            return None
        mine = self._read_state(place, optim_state_key)
        self._kept.collectives.meet(_READING)
        return self._whole(place, mine)

    def set_full_hp_param(
        self, value: torch.Tensor, param: torch.Tensor, optim_state_key: str | None = None
    ) -> None:
        """Sets the master weight, and with it the training copy, or a moment; on all ranks.

        Raises:
            ConfigError: as :meth:`get_full_hp_param`, or ``value`` has the wrong size.
        """
        place = self._places.get(id(param))
        if place is None:
            return
        _check_size(value, place.numel)
        # A resident training copy is whole on every rank, and so is the value.
        whole = Piece(0, 0, place.numel)
        weights = self._piece(place) if place.layer.storage.is_sharded else whole
        self._write_state(place, optim_state_key, value.detach().reshape(-1), weights)

    def get_local_fp32_param(
        self, param: torch.Tensor, optim_state_key: str | None = None
    ) -> torch.Tensor | None:
        """Returns a copy of this rank's part, on the device; see :meth:`get_full_hp_param`."""
        place = self._places.get(id(param))
        if place is None:
            return None
        return self._read_state(place, optim_state_key).to(self._kept.device, copy=True)

    def set_local_hp_param(
        self, value: torch.Tensor, param: torch.Tensor, optim_state_key: str | None = None
    ) -> None:
        """Sets this rank's part; see :meth:`set_full_hp_param`. Not a collective.

        A training copy that is whole on every rank follows its master weight only at the next step,
        as with DeepSpeed: until then the other ranks do not know the values.

        Raises:
            ConfigError: as there, or such a copy is half of split master weights.
        """
        place = self._places.get(id(param))
        if place is None:
            return
        whole, weights = self._spread(place, value), self._piece(place)
        if not place.layer.storage.is_sharded and self._kept.collectives.world_size > 1:
            if optim_state_key is None and place.layer.form.is_split:
                raise ConfigError(
                    f'"{place.name}" is whole on every rank, and master weights are split: use '
                    "deepspeed.utils.safe_set_full_fp32_param, with one value on all ranks"
                )
            weights = None
        self._write_state(place, optim_state_key, whole, weights)

    def _read_state(self, place: ParameterPlace, key: str | None) -> torch.Tensor:
        kind = _kind(place, key)
        self._kept.settle(_READING)
        piece = self._piece(place)
        return torch.empty(0) if piece is None else place.read(kind, piece)

    def _write_state(
        self, place: ParameterPlace, key: str | None, flat: torch.Tensor, weights: Piece | None
    ) -> None:
        """Writes this rank's piece of ``flat``; if to master weights, the training copy follows.

        ``weights``: the piece of the copy that follows; None: none does before the next step. An
        update that is taken back restores the training copy from the master weights.
        """
        kind, piece = _kind(place, key), self._piece(place)
        self._kept.settle("writing master weights or moments")
        if piece is not None:
            place.write(kind, piece, flat[piece.begin : piece.end])
        if kind == STATES[0]:
            if weights is not None:
                with torch.no_grad():
                    copy = place.weights(weights)
                    place.layer.form.round(flat[weights.begin : weights.end], copy)
            torch.autograd.graph.increment_version([place.slot.parameter])
            self._kept.written.ignore()  # without this the copy would become the master weight
        self._kept.pipeline.streams.synchronize()

    def _set_full_hp_param(
        self, param: torch.Tensor, value: torch.Tensor, optim_state_key: str | None = None
    ) -> None:
        self.set_full_hp_param(value, param, optim_state_key)

    # -- gradients ---------------------------------------------------------------------------------

    def get_fp32_grad_for_param(self, param: torch.Tensor) -> torch.Tensor | None:
        """Returns the whole gradient, fp32, on the device.

        Raises:
            ConfigError: there is none (no backward since the last step), or a backward is running.
        """
        place = self._places.get(id(param))
        return None if place is None else self._whole(place, self._read_gradient(place))

    def get_local_fp32_grad_for_param(self, param: torch.Tensor) -> torch.Tensor | None:
        """Returns this rank's part of the gradient; a collective, since ranks reduce it first."""
        place = self._places.get(id(param))
        return None if place is None else self._read_gradient(place)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: torch.Tensor) -> None:
        """Sets the gradient that step() will apply; a collective, with one value on all ranks.

        Raises:
            ConfigError: as for reading it, or ``value`` has the wrong size.
        """
        place = self._places.get(id(param))
        if place is not None:
            _check_size(value, place.numel)
            self._write_gradient(place, value.detach().reshape(-1))

    def set_local_grad_for_param(self, value: torch.Tensor, param: torch.Tensor) -> None:
        """Sets this rank's part of the gradient; a collective, since ranks reduce it first."""
        place = self._places.get(id(param))
        if place is not None:
            self._write_gradient(place, self._spread(place, value))

    def update_fp32_grad_for_param_vectorized(
        self,
        update_func: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        param_list: Iterable[torch.Tensor],
    ) -> None:
        """Sets each gradient to ``update_func(gradient, parameter)``."""
        for param in param_list:
            gradient = self.get_fp32_grad_for_param(param)
            if gradient is not None:
                self.set_fp32_grad_for_param(update_func(gradient, param), param)

    def _set_full_hp_grad(self, param: torch.Tensor, value: torch.Tensor) -> None:
        self.set_fp32_grad_for_param(value, param)

    def _take_gradients_back(self, what: str) -> None:
        self._passes.withdraw_updates(what)
        if not self._passes.open_step.has_gradients:
            raise ConfigError(
                f"{what}, but there is none: gradients are there between a backward and step() "
                "only; call it before step(), or register a hook on the parameter"
            )
        self._kept.collectives.meet(what)

    def _read_gradient(self, place: ParameterPlace) -> torch.Tensor:
        """Returns this rank's piece of the gradient, fp32, on the device."""
        self._take_gradients_back("reading a gradient")
        shard = self._passes.reducer.read_gradient(place.layer)
        piece = self._piece(place)
        if piece is None:
            return torch.empty(0, device=self._kept.device)
        return self._part(place, piece, shard).float() * self._passes.reducer.unscale

    def _write_gradient(self, place: ParameterPlace, flat: torch.Tensor) -> None:
        self._take_gradients_back("writing a gradient")
        shard = self._passes.collector.own_gradient(place.layer.index)
        # Without this wait the reduction could overwrite what is written here.
        self._kept.pipeline.streams.compute_waits_for_communication()
        piece = self._piece(place)
        if piece is not None:
            mine = flat[piece.begin : piece.end].to(shard.device, torch.float32)
            self._part(place, piece, shard).copy_(mine / self._passes.reducer.unscale)

    @staticmethod
    def _part(place: ParameterPlace, piece: Piece, shard: torch.Tensor) -> torch.Tensor:
        at = place.slot.offset - place.layer.begin
        return shard[at + piece.begin : at + piece.end]

    def _piece(self, place: ParameterPlace) -> Piece | None:
        return place.piece_of(self._kept.collectives.rank)

    def _spread(self, place: ParameterPlace, value: torch.Tensor) -> torch.Tensor:
        """Returns all elements with this rank's piece in its place; the others are undefined."""
        piece = self._piece(place) or Piece(0, 0, 0)
        _check_size(value, piece.end - piece.begin)
        whole = torch.empty(place.numel, device=value.device)
        whole[piece.begin : piece.end].copy_(value.detach().reshape(-1))
        return whole

    def _whole(self, place: ParameterPlace, mine: torch.Tensor) -> torch.Tensor:
        return gather_everywhere(place, mine, self._kept.collectives, self._kept.device)


def _kind(place: ParameterPlace, optim_state_key: str | None) -> str:
    if optim_state_key is None:
        return STATES[0]
    known = place.kinds[1:]
    if optim_state_key not in known:
        names = " or ".join(f'"{name}"' for name in known)
        raise ConfigError(
            f'there is no optimizer state "{optim_state_key}": pass {names} '
            "(engine.optimizer.steps counts the steps of each parameter group)"
        )
    return optim_state_key


def _check_size(value: torch.Tensor, numel: int) -> None:
    if value.numel() != numel:
        raise ConfigError(
            f"the value has {value.numel()} elements, but the parameter, or what this rank owns of "
            f"it, has {numel}: pass a tensor of that size"
        )
