"""What tools for ZeRO-3 look for on DeepSpeed's optimizer: its hooks, to take them off for a time.

Generation with all weights gathered (TRL's ``unwrap_model_for_generation``, DeepSpeed's own) takes
the hooks off the model, so that ranks may call it differently often, and puts them back.
"""

from __future__ import annotations

from collections.abc import ItemsView
from functools import partial
from typing import Any

from torch import nn

from hytrain.zero3.weight_passes import WeightPasses


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
