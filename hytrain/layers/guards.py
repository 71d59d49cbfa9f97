"""Hooks that make a layer's weights ready before they are used.

A block's forward waits for its layer; other modules wait for the parameters that they own. What
belongs to a module whose forward was not seen in the last pass (weights used from elsewhere), or
was read in the first pass before a module that waits for it, is waited for at the start of the
model's forward (under ZeRO-3 the gather schedule does that).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Protocol

import torch
from torch import nn

from hytrain.layers.state import LayerState
from hytrain.layers.weight_reads import WeightReads
from hytrain.layers.weights import LayerWeights


class WeightsOwner(Protocol):
    """Who can make weights ready."""

    def begin_forward(self) -> None:
        """The model's forward begins, and is about to enter its modules."""
        ...

    def before_use(self, state: LayerState) -> None:
        """A layer's trained weights are about to be read."""
        ...

    def enter_forward(self, layers: Sequence[LayerWeights]) -> None:
        """A module that uses the layers' weights begins its forward."""
        ...

    def leave_forward(self, layers: Sequence[LayerWeights]) -> None:
        """It has ended (told under ZeRO-3 only)."""
        ...

    def needed_in_backward(self, layers: Sequence[LayerWeights]) -> None:
        """Its backward begins (told under ZeRO-3 only)."""
        ...

    @property
    def gathers(self) -> bool:
        """Whether layers have to be gathered for their uses (ZeRO-3)."""
        ...

    def end_forward(self) -> None:
        """The model's forward is over: weights that it has not used are made ready now."""
        ...

    def read_weights(self) -> None:
        """All weights are about to be read: the newest ones."""
        ...

    @property
    def layers(self) -> Sequence[LayerWeights]:
        """All weights in forward order."""
        ...


class _Hook:
    """A hook of a model that copies of the model do not have: their weights are their own."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: object, **named: object) -> None:
        self._function(*arguments, **named)

    def __deepcopy__(self, memo: object) -> _Hook:
        return _Hook(_nothing)


def _nothing(*_arguments: object, **_named: object) -> None:
    """What a copy's hook does."""


class LayerGuards:
    """Forward pre-hooks on a model's modules; whoever built the engine takes them off again."""

    def __init__(self, model: nn.Module, owner: WeightsOwner) -> None:
        self._owner = owner
        layers = {layer.index: layer for layer in owner.layers}
        self._resident = {x.index: x.resident for x in owner.layers if x.resident is not None}
        self._guarded = _modules_of_layers(model, owner.layers)
        self._seen: set[nn.Module] = set()
        self._seen_before: set[nn.Module] | None = None
        self._layer_of = {id(slot.parameter): x.index for x in owner.layers for slot in x.slots}
        self._watched: set[bool] = set()  # with gradients or without: such a pass was watched
        self._waiting_for: set[int] | None = None  # whose modules a watched pass has entered
        self._read_early: set[int] = set()
        for module, indices in self._guarded.items():
            if module is model:
                continue
            used = [layers[index] for index in sorted(indices)]
            module.register_forward_pre_hook(_Hook(self._guard(module, used)))
            if owner.gathers:
                leave = self._leave(module, used)
                module.register_forward_hook(_Hook(leave), with_kwargs=True)
        model.register_forward_pre_hook(_Hook(self._begin), prepend=True)
        model.register_forward_hook(_Hook(self._end))
        # Tools that read a module's weights do it through its state_dict.
        self._reads_names = False
        model.register_state_dict_pre_hook(_Hook(self._before_state_dict))

    @contextmanager
    def reading_names(self) -> Generator[None]:
        """While it lasts, state_dict() waits for nothing: names and shapes are read, no weights."""
        self._reads_names = True
        try:
            yield
        finally:
            self._reads_names = False

    @contextmanager
    def watching(self) -> Generator[None]:
        """Around a forward: where it is the first, reads before a layer's own modules are seen."""
        kind = torch.is_grad_enabled()
        if self._owner.gathers or kind in self._watched:
            yield
            return
        self._waiting_for = set()
        try:
            with WeightReads.watched_by(self._layer_of, self._read):
                yield
            self._watched.add(kind)
        finally:
            self._waiting_for = None

    def _read(self, index: int) -> None:
        if self._waiting_for is not None and index not in self._waiting_for:
            self._read_early.add(index)

    def _before_state_dict(self, *_args: object) -> None:
        if not self._reads_names:
            self._owner.read_weights()

    def _guard(
        self, module: nn.Module, layers: Sequence[LayerWeights]
    ) -> Callable[[nn.Module, tuple[object, ...]], None]:
        indices = [layer.index for layer in layers]

        def hook(_module: nn.Module, _inputs: tuple[object, ...]) -> None:
            self._seen.add(module)
            if self._waiting_for is not None:
                self._waiting_for.update(indices)
            self._owner.enter_forward(layers)

        return hook

    def _leave(
        self, module: nn.Module, layers: Sequence[LayerWeights]
    ) -> Callable[[nn.Module, tuple[object, ...], dict[str, object], object], None]:
        # The gradient of an embedding needs no weights.
        needs_weights = type(module) is not nn.Embedding

        def enter_backward(_gradient: torch.Tensor) -> None:
            self._owner.needed_in_backward(layers)

        def hook(
            _module: nn.Module,
            inputs: tuple[object, ...],
            named: dict[str, object],
            outputs: object,
        ) -> None:
            if needs_weights and torch.is_grad_enabled():
                # What a module hands through has its gradient later, or never, from its backward.
                handed = {id(tensor) for tensor in tensors_in([inputs, named])}
                for tensor in tensors_in(outputs):
                    if tensor.requires_grad and id(tensor) not in handed:
                        tensor.register_hook(enter_backward)
            self._owner.leave_forward(layers)

        return hook

    def _begin(self, model: nn.Module, _inputs: tuple[object, ...]) -> None:
        self._owner.begin_forward()
        self._seen = {model}
        if self._waiting_for is not None:
            self._waiting_for.clear()
        if self._owner.gathers:
            return  # then all ranks must wait at the same places
        unguarded = set(self._read_early)
        for module, indices in self._guarded.items():
            if module is model or self._seen_before is None or module not in self._seen_before:
                unguarded |= indices
        for index in sorted(unguarded & self._resident.keys()):
            state = self._resident[index]
            if state.sent or not state.waited:
                self._owner.before_use(state)

    def _end(self, _model: nn.Module, _inputs: tuple[object, ...], _outputs: object) -> None:
        self._seen_before = self._seen
        self._owner.end_forward()


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors of a module's output: itself, or within mappings, sequences and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def unguarded_layers(model: nn.Module, layers: Sequence[LayerWeights]) -> list[int]:
    """Layers with parameters that the root module itself owns: nothing tells when it uses them."""
    owned = {id(p) for p in model.parameters(recurse=False)}
    return [x.index for x in layers if any(id(slot.parameter) in owned for slot in x.slots)]


def _modules_of_layers(
    model: nn.Module, layers: Sequence[LayerWeights]
) -> dict[nn.Module, set[int]]:
    """Modules whose forward must wait, and the layers that each must wait for."""
    layer_of = {id(slot.parameter): layer.index for layer in layers for slot in layer.slots}
    guarded: dict[nn.Module, set[int]] = {}
    inside: dict[nn.Module, int] = {}
    for layer in layers:
        if layer.block is not None:
            guarded[layer.block] = {layer.index}
            for module in layer.block.modules():
                inside[module] = layer.index
    for module in model.modules():
        indices = {layer_of[id(p)] for p in module.parameters(recurse=False) if id(p) in layer_of}
        indices.discard(inside.get(module, -1))  # the block's own hook has waited
        if indices:
            guarded.setdefault(module, set()).update(indices)
    return guarded
