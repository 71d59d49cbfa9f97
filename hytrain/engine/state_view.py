"""``optimizer.state``: step and moments of each parameter, as torch's optimizers show them.

A view: what is read is the state of the last step, and what is written into a moment stays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hytrain.checkpoint.gather import ParameterPlace, list_parameters
from hytrain.optimizer.kept_state import KeptState

_STEP = "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")


class ParameterState(Mapping[str, torch.Tensor]):
    """Of one parameter: ``step``, ``exp_avg`` and ``exp_avg_sq``, all fp32.

    A moment has the parameter's shape where this rank owns all of it; otherwise it is what the rank
    owns, 1-D, perhaps empty: ``deepspeed.utils.safe_get_full_optimizer_state`` gathers the rest. It
    is on the host or the device, wherever the layer is updated, and to be read before the next
    step: a layer may move then.
    """

    def __init__(self, kept: KeptState, place: ParameterPlace) -> None:
        """
        Args:
            kept: the optimizer's state.
            place: where the parameter's is.
        """
        self._kept = kept
        self._place = place

    def __getitem__(self, key: str) -> torch.Tensor:
        if key == _STEP:
            return torch.tensor(float(self._kept.hyper.steps[self._place.group]))
        if key not in _MOMENTS:
            raise KeyError(key)
        place = self._place
        self._kept.settle(f"reading optimizer.state[...]['{key}']")
        piece = place.piece_of(self._kept.collectives.rank)
        if piece is None:
            return torch.empty(0)
        moment = place.state(key, piece)
        is_whole = moment.numel() == math.prod(place.shape)
        return moment.view(place.shape) if is_whole else moment

    def __iter__(self) -> Iterator[str]:
        return iter((_STEP, *_MOMENTS))

    def __len__(self) -> int:
        return 1 + len(_MOMENTS)


class OptimizerState(Mapping[nn.Parameter, Mapping[str, torch.Tensor]]):
    """Parameter -> its :class:`ParameterState`; an empty mapping for one that is not trained."""

    def __init__(self, kept: KeptState) -> None:
        """
        Args:
            kept: the optimizer's state.
        """
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
