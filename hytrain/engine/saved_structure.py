"""What checkpoints say of a module that no step changes: names, shapes, which tensors are tied.

DeepSpeed walks through the module several times for it, which would make an asynchronous save's
call take much of a step's time. So it is kept until the module changes: its modules, parameters,
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
"""Methods by which DeepSpeed's engine describes the module for a checkpoint."""
_DEFAULTS = {
    name: getattr(nn.Module, name)
    for name in ("state_dict", "_save_to_state_dict", "get_extra_state")
}


class SavedStructure:
    """The structure of one engine's module; read again when the module has changed."""

    def __init__(self, engine: Any, read: Callable[[], Mapping[str, Any]]) -> None:
        """``read`` returns the module's state dict, without waiting for anything."""
        self._engine = engine
        self._read = read
        self._seen: _Seen | None = None
        self._answers: dict[str, Any] = {}
        self._made: dict[bool, tuple[ModuleTensors, _Buffers]] = {}

    def module_tensors(self, places: list[ParameterPlace], *, no_frozen: bool) -> ModuleTensors:
        """Returns the module's tensors, buffers as of now; ``no_frozen``: no frozen parameters."""
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
        """Context in which DeepSpeed's engine uses known answers instead of walking the module."""
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
    """Returns the buffers; None if an entry is not a parameter or buffer under its own name."""
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
    """What the modules were; each asynchronous save's call checks whether they still are that.

    There are hundreds of modules, whose objects are in no core's cache after a step: so the
    extension compares addresses (csrc/bindings/same_modules.cpp). The compared objects are kept
    here, since an address identifies an object only while that lives, and where Python's garbage
    collector sees them.
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
        """Whether the modules are unchanged."""
        return (
            _C.same_entries(self._dicts, self._sizes, self._entries)
            and _C.same_types(self._modules, self._types, self._own, "state_dict")
            and _C.same_attributes(self._parameters, "requires_grad", self._is_trained)
            and _C.same_sets(self._temporary, self._had_temporary)
        )


def _see(module: nn.Module) -> _Seen | None:
    """Returns what all modules are; None if one makes its state dict in a way of its own."""
    modules = list(module.modules())
    for here in modules:
        kind: Any = type(here)
        own = vars(here)
        if own["_state_dict_hooks"] or "state_dict" in own:
            return None
        if any(getattr(kind, name) is not default for name, default in _DEFAULTS.items()):
            return None
    return _Seen(modules)
