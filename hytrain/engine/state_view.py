"""``optimizer.state``: step and moments of each parameter, as torch's optimizers show them.

It is a view: reads return the state of the last step, and writes into a moment change the state.
Moments kept in fewer bytes than fp32 are shown as copies of their values, which refuse writes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, ClassVar

import torch
from torch import nn

from hytrain.checkpoint.gather import ParameterPlace, list_parameters
from hytrain.errors import ConfigError
from hytrain.optimizer.kept_state import KeptState

_STEP = "step"
_IN_PLACE = frozenset(
    f"__i{name}__"
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)
_DATA = vars(torch._C.TensorBase)["data"].__get__  # pyright: ignore[reportPrivateUsage]
"""``tensor.data``, which is no view."""


class ReadOnlyValues(torch.Tensor):
    """Copies of values that are kept elsewhere: a write would be lost, so it is refused."""

    refusal: ClassVar[str]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        in_place |= name == "__setitem__" or (name.startswith("__i") and name in _IN_PLACE)
        written = args[0] if in_place and args else named.get("out")
        for one in written if isinstance(written, (list, tuple)) else (written,):
            if isinstance(one, ReadOnlyValues):
                raise ConfigError(one.refusal)
        # A view shows the moment, too; what is computed from it is the caller's own.
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            result = func(*args, **named)
            is_same = isinstance(result, torch.Tensor) and (result._is_view() or func == _DATA)
            return result.as_subclass(cls) if is_same else result


class MomentValues(ReadOnlyValues):
    """Values of a moment that is kept in another form."""

    refusal = (
        "a moment that is kept in bf16 or 8 bits cannot be written through optimizer.state, which "
        "has copies of its values: use deepspeed.utils.safe_set_full_optimizer_state (or "
        "safe_set_local_...)"
    )


class StepValue(ReadOnlyValues):
    """A parameter's step count, which is that of its group."""

    refusal = (
        "optimizer.state[...]['step'] cannot be written: load a checkpoint or a state_dict with "
        "another"
    )


class ParameterState(MutableMapping[str, torch.Tensor]):
    """One parameter's state: ``step``, ``exp_avg`` and ``exp_avg_sq``, or the state of another
    optimizer than Adam, all fp32.

    A moment has the parameter's shape if this rank owns all of it; otherwise it is what the rank
    owns, 1-D, perhaps empty: ``deepspeed.utils.safe_get_full_optimizer_state`` gathers the rest. It
    is on the host or the device, wherever the layer is updated, and must be read before the next
    step: a layer may move then.
    """

    def __init__(self, kept: KeptState, place: ParameterPlace) -> None:
        self._kept = kept
        self._place = place

    def __getitem__(self, key: str) -> torch.Tensor:
        if key == _STEP:
            step = float(self._kept.hyper.steps[self._place.group])
            return torch.tensor(step).as_subclass(StepValue)
        if key not in self._place.kinds[1:]:
            raise KeyError(key)
        place = self._place
        self._kept.settle(f"reading optimizer.state[...]['{key}']")
        piece = place.piece_of(self._kept.collectives.rank)
        if piece is None:
            return torch.empty(0)
        moment = place.read(key, piece)
        if place.layer.form.is_rounded:
            moment = moment.as_subclass(MomentValues)
        is_whole = moment.numel() == math.prod(place.shape)
        return moment.view(place.shape) if is_whole else moment

    def __setitem__(self, key: str, value: torch.Tensor) -> None:
        """Writes a moment's values in place.

        Equal values are accepted and not written: Lightning assigns each tensor when it moves the
        optimizer's state to the host at its end.

        Raises:
            KeyError: there is no such key.
            ConfigError: the shape or the step differs, or the moment is rounded.
        """
        own = self[key]
        if own.shape == value.shape and torch.equal(value.to(own), own):
            return
        if key == _STEP:
            raise ConfigError(StepValue.refusal)
        if own.shape != value.shape:
            raise ConfigError(
                f"optimizer.state[...]['{key}'] has shape {tuple(own.shape)} on this rank and "
                f"cannot be set to {tuple(value.shape)}"
            )
        own.copy_(value)

    def __delitem__(self, key: str) -> None:
        raise ConfigError(
            f"optimizer.state[...]['{key}'] cannot be deleted: it is a view of what the next step "
            "needs"
        )

    def __iter__(self) -> Iterator[str]:
        return iter((_STEP, *self._place.kinds[1:]))

    def __len__(self) -> int:
        return len(self._place.kinds)


class OptimizerState(Mapping[nn.Parameter, Mapping[str, torch.Tensor]]):
    """Parameter -> its :class:`ParameterState`; an empty mapping for a frozen one."""

    def __init__(self, kept: KeptState) -> None:
        self._states = {
            place.slot.parameter: ParameterState(kept, place)
            for place in list_parameters(kept.layers)
        }

    def __getitem__(self, parameter: Any) -> Mapping[str, torch.Tensor]:
        return self._states.get(parameter, {})

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)
