"""What checkpoints say of a module that no step changes: names, shapes, which tensors are tied.

DeepSpeed walks through the module several times for it, and an asynchronous save's call would take
a good part of a step. So it is kept until the module is another one: other modules, parameters,
names of buffers, or hooks.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hytrain import _C
from hytrain.checkpoint.gather import ParameterPlace
from hytrain.checkpoint.save_contents import ModuleTensors

_NAMES = ("_get_buffer_names", "_get_zero_param_shapes", "_get_shared_params")
"""What DeepSpeed's engine asks itself for a checkpoint."""
_DEFAULTS = {
    name: getattr(nn.Module, name)
    for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
}


class SavedStructure:
    """Of one engine's module; made anew where it does not hold any more."""

    def __init__(self, engine: Any, read: Callable[[], Mapping[str, Any]]) -> None:
        """``read`` gives the module's state dict, without waiting for anything."""
        self._engine = engine
        self._read = read
        self._seen: _Seen | None = None
        self._answers: dict[str, Any] = {}
        self._made: dict[bool, tuple[ModuleTensors, _Buffers]] = {}

    def module_tensors(self, places: list[ParameterPlace], *, no_frozen: bool) -> ModuleTensors:
        """The module's tensors, buffers as they are now; ``no_frozen``: the trained ones only."""
        if self._seen is None or not self._seen.is_same():
            self._made.clear()
            self._answers.clear()
            self._seen = _see(self._engine.module)
        if no_frozen in self._made:
            made, buffers = self._made[no_frozen]
            now = {name: owner[leaf].detach() for name, (owner, leaf) in buffers.items()}
            constants = {key: old.again() for key, old in made.constants.items()}
            return ModuleTensors({**made.state, **now}, constants)
        tensors = self._read()
        if no_frozen:
            tensors = {
                name: value
                for name, value in tensors.items()
                if not isinstance(value, nn.Parameter) or value.requires_grad
            }
        made = ModuleTensors.of(tensors, places)
        buffers = None if self._seen is None else _find_buffers(self._engine.module, tensors)
        if buffers is not None:
            # In the state dict's order, and with no tensor of the first save kept alive.
            state = {name: None if name in buffers else v for name, v in made.state.items()}
            self._made[no_frozen] = ModuleTensors(state, made.constants), buffers
        return made

    @contextmanager
    def answering(self) -> Generator[None]:
        """While it lasts, DeepSpeed's engine does not walk through the module for what is known."""
        engine = self._engine
        own = vars(engine)
        for name in _NAMES:
            if name not in self._answers:
                self._answers[name] = getattr(engine, name)()
            own[name] = lambda name=name: self._answers[name]
        try:
            yield
        finally:
            for name in _NAMES:
                del own[name]


_Buffers = dict[str, tuple[dict[str, torch.Tensor], str]]
"""Name in the state dict -> its module's buffers and its name among them."""


def _find_buffers(module: nn.Module, tensors: Mapping[str, Any]) -> _Buffers | None:
    """None where an entry is neither a parameter nor a buffer under its own name."""
    buffers: _Buffers = {}
    modules = dict(module.named_modules(remove_duplicate=False))
    for name, value in tensors.items():
        path, _, leaf = name.rpartition(".")
        if path not in modules:
            return None
        own = vars(modules[path])
        if own["_buffers"].get(leaf) is value:
            buffers[name] = own["_buffers"], leaf
        elif own["_parameters"].get(leaf) is not value:
            return None
    return buffers


class _Seen:
    """What the modules were; whether they still are is asked in each asynchronous save's call.

    Of hundreds of modules, whose objects are in no core's cache after a step: so the extension
    compares addresses (csrc/bindings/same_modules.cpp). What is compared is kept here, since an
    address names an object only while that lives, and where Python's garbage collector sees it.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        own: list[dict[str, Any]] = [vars(module) for module in modules]
        self._modules, self._own = modules, own
        self._types = tuple(map(type, modules))
        self._dicts: list[dict[str, Any]] = []
        entries: list[object] = []
        for kind in ("_parameters", "_modules", "_buffers", "_state_dict_hooks"):
            for each in own:
                self._dicts.append(each[kind])
                for name, value in each[kind].items():
                    # Buffers are looked up at each save; those that are None are not saved.
                    is_buffer = kind == "_buffers" and value is not None
                    entries += (name, ... if is_buffer else value)
        self._sizes = array("I", map(len, self._dicts)).tobytes()
        self._entries = tuple(entries)
        self._temporary: list[set[str]] = [each["_non_persistent_buffers_set"] for each in own]
        self._had_temporary = tuple(map(frozenset, self._temporary))
        self._parameters: list[nn.Parameter] = [
            parameter
            for each in own
            for parameter in each["_parameters"].values()
            if parameter is not None
        ]
        self._is_trained = tuple(parameter.requires_grad for parameter in self._parameters)

    def is_same(self) -> bool:
        """Whether there is nothing new."""
        return (
            _C.same_entries(self._dicts, self._sizes, self._entries)
            and _C.same_types(self._modules, self._types, self._own, "state_dict")
            and _C.same_attributes(self._parameters, "requires_grad", self._is_trained)
            and _C.same_sets(self._temporary, self._had_temporary)
        )


def _see(module: nn.Module) -> _Seen | None:
    """All modules; None where one makes its state dict in a way of its own."""
    modules = list(module.modules())
    for here in modules:
        kind: Any = type(here)
        own = vars(here)
        if own["_state_dict_hooks"] or "state_dict" in own:
            return None
        if any(getattr(kind, name) is not default for name, default in _DEFAULTS.items()):
            return None
    return _Seen(modules)
