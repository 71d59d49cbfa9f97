"""Hooks that make a layer's weights ready before they are used.

A block's forward waits for its layer; other modules wait for the parameters that they own. The
weights of a module whose forward was not seen in the last pass (they are used from elsewhere) are
waited for at the start of the model's forward (under ZeRO-3 the gather schedule does that). A
weight that a torch function reads outside of such a forward is waited for when it is read
(:mod:`hytrain.model.weight_reads`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hytrain.model.backward_hooks import before_backward, computed
from hytrain.model.discovery import is_container
from hytrain.model.weight_reads import SavedWeights, WatchedParameters, storage_handle
from hytrain.optimizer.pass_guide import PassGuide
from hytrain.zero3.layer_weights import LayerWeights


class _Hook:
    """A hook that does nothing in copies of the model, whose weights are their own.

    torch.compile does not trace it: what a hook waits for and gathers is not part of a graph.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *arguments: object, **named: object) -> None:
        self._function(*arguments, **named)

    def __deepcopy__(self, memo: object) -> _Hook:
        return _Hook(lambda *_arguments, **_named: None)


_Hook.__call__ = cast(Any, torch.compiler).disable(_Hook.__call__)


class LayerGuards:
    """Forward pre-hooks on a model's modules; the engine's builder removes them."""

    def __init__(self, model: nn.Module, owner: PassGuide) -> None:
        self._owner = owner
        weights = owner.weights
        layers = {layer.index: layer for layer in weights.layers}
        self._resident = {layer.index: layer.resident for layer in weights.layers}
        self._guarded = modules_of_layers(model, weights.layers)
        self._seen: set[nn.Module] = set()
        self._seen_before: set[nn.Module] | None = None
        self._saved: SavedWeights | None = None
        self._needed = WeakIdKeyDictionary()
        """Output tensor -> the layers of each module that returned it, the outermost one first."""
        weights.when_held = self._layer_held
        self._watched = [w for place in range(len(layers)) for w in self._watch(place)]
        # Borrowed layers stay gathered during every pass (unguarded_layers).
        borrowed = _borrowed(model, weights.layers) if weights.is_sharded else {}
        for module, indices in self._guarded.items():
            used = [layers[index] for index in sorted(indices - borrowed.get(module, set()))]
            if module is model or not used:
                continue
            module.register_forward_pre_hook(_Hook(self._guard(module, used)))
            if weights.is_sharded:
                leave = self._leave(module, used)
                module.register_forward_hook(_Hook(leave), with_kwargs=True)
        model.register_forward_pre_hook(_Hook(self._begin), prepend=True)
        model.register_forward_hook(_Hook(self._end))
        # Tools that read a module's weights do it through its state_dict.
        self._reads_names = False
        model.register_state_dict_pre_hook(_Hook(self._before_state_dict))

    @contextmanager
    def reading_names(self) -> Generator[None]:
        """Context in which state_dict() waits for nothing: only names and shapes are read."""
        self._reads_names = True
        try:
            yield
        finally:
            self._reads_names = False

    @contextmanager
    def watching(self) -> Generator[None]:
        """Context of a forward: if it is recorded, weights that autograd saves are seen as well."""
        schedule = self._owner.weights.active
        if schedule is None or schedule.knows("train") or not torch.is_grad_enabled():
            yield
            return
        saved = {
            storage_handle(flat): part.storage.reads
            for layer in self._owner.weights.layers
            for part in layer.sharded
            for _low, _high, flat in part.storage.runs
            if part.storage.reads is not None
        }
        with SavedWeights(saved) as self._saved:
            if self._owner.weights.has_held:
                self._layer_held()
            try:
                yield
            finally:
                self._saved = None

    def close(self) -> None:
        """Makes the parameters plain ones again. May be called twice."""
        for watched in self._watched:
            watched.close()

    def _before_state_dict(self, *_args: object) -> None:
        if not self._reads_names:
            self._owner.read_weights()

    def _guard(
        self, module: nn.Module, layers: Sequence[LayerWeights]
    ) -> Callable[[nn.Module, tuple[object, ...]], None]:
        def hook(_module: nn.Module, _inputs: tuple[object, ...]) -> None:
            self._seen.add(module)
            self._owner.enter_forward(layers)

        return hook

    def _leave(
        self, module: nn.Module, layers: Sequence[LayerWeights]
    ) -> Callable[[nn.Module, tuple[object, ...], dict[str, object], object], None]:
        # The gradient of an embedding needs no weights.
        needs_weights = type(module) is not nn.Embedding

        def hook(
            _module: nn.Module,
            inputs: tuple[object, ...],
            named: dict[str, object],
            outputs: object,
        ) -> None:
            if needs_weights and torch.is_grad_enabled():
                # What a module passes through has its gradient later, or never, from its backward.
                given = {id(tensor) for tensor in tensors_in([inputs, named])}
                for tensor in tensors_in(outputs):
                    if tensor.requires_grad and id(tensor) not in given:
                        self._needed_behind(tensor, layers)
            self._owner.leave_forward(layers)

        return hook

    def _needed_behind(self, tensor: torch.Tensor, layers: Sequence[LayerWeights]) -> None:
        """Notes that backward needs the layers' weights from a module's output on.

        A module may return what its last submodule has returned. Backward then has to enter the
        outer one first: the inner one's weights must be there when the tensor's gradient goes on.
        """
        output = computed(tensor)
        needed = self._needed.get(output)
        if needed is not None:
            needed.insert(0, layers)
            return
        self._needed[output] = needed = [layers]

        def enter_backward(_gradient: object) -> None:
            for entered in needed:
                self._owner.needed_in_backward(entered)

        before_backward(tensor, enter_backward)

    def _begin(self, model: nn.Module, _inputs: tuple[object, ...]) -> None:
        self._owner.begin_forward()
        self._seen = {model}
        if self._owner.weights.is_sharded:
            return  # then all ranks must wait at the same places
        unguarded: set[int] = set()
        for module, indices in self._guarded.items():
            if module is model or self._seen_before is None or module not in self._seen_before:
                unguarded |= indices
        for index in sorted(unguarded):
            for state in self._resident[index]:
                if state.update.sent or not state.update.waited:
                    self._owner.passes.before_use(state)

    def _end(self, _model: nn.Module, _inputs: tuple[object, ...], outputs: object) -> None:
        self._seen_before = self._seen
        if torch.is_grad_enabled():
            hook = partial(self._owner.backward_begins, self._owner.mark_forward())
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    before_backward(tensor, hook)
        self._owner.end_forward()

    def _watch(self, place: int) -> Iterator[WatchedParameters]:
        """Watches a layer's weights for reads that no hook reports.

        Python cannot collect a parameter that autograd's nodes refer to: if the engine were
        reachable from it, neither would ever be freed.
        """
        layer, owner = self._owner.weights.layers[place], weakref.ref(self._owner)

        def read_trained(name: str, *, may_refuse: bool = True, was_read: bool = False) -> None:
            del name, may_refuse, was_read
            if (guide := owner()) is not None:
                guide.read_trained(guide.weights.layers[place])

        def read_sharded(name: str, *, may_refuse: bool = True, was_read: bool = False) -> None:
            if may_refuse and (guide := owner()) is not None:
                guide.read_sharded(guide.weights.layers[place], name, was_read=was_read)

        for state in layer.resident:
            state.update.reads = WatchedParameters(
                [slot.parameter for slot in state.layout.slots], read_trained
            )
            yield state.update.reads
        for part in layer.sharded:
            parameters = [slot.parameter for slot in part.layout.slots]
            reads = WatchedParameters(parameters, read_sharded, may_be_away=True)
            reads.disallow_all()
            part.storage.reads = reads
            yield reads

    def _layer_held(self) -> None:
        """Ends reports of saved weights: a user's function reads some, maybe for its backward."""
        if self._saved is not None:
            self._saved.stop()


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors in a value: itself, or within mappings, sequences, sets and records."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in (*value, *value.values()):
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list, Set)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, SimpleNamespace):
        yield from tensors_in(vars(value))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def unguarded_layers(model: nn.Module, layers: Sequence[LayerWeights]) -> list[int]:
    """Layers that no module's hooks can gather when they are used.

    A module around other layers, such as the root, owns some of their parameters: no hook tells
    when it uses them between those layers, or in backward. Or they are tied into another layer's
    block: to gather them there would be to give up that layer, in whose computation they are used.
    """
    found = {index for indices in _borrowed(model, layers).values() for index in indices}
    layer_of, inside = _places(layers)
    for module in model.modules():
        own = {layer_of[id(p)] for p in module.parameters(recurse=False) if id(p) in layer_of}
        if own and module not in inside:
            within = {inside[part] for part in module.modules() if part in inside}
            within |= {layer_of[id(p)] for p in module.parameters() if id(p) in layer_of}
            if module is model or within - own:
                found |= own
    return [layer.index for layer in layers if layer.index in found]


def _borrowed(model: nn.Module, layers: Sequence[LayerWeights]) -> dict[nn.Module, set[int]]:
    """Modules within a layer's block that use other layers' weights, and which layers those are."""
    layer_of, inside = _places(layers)
    found: dict[nn.Module, set[int]] = {}
    for module in model.modules():
        if module in inside:
            used = {layer_of.get(id(p), inside[module]) for p in module.parameters(recurse=False)}
            found[module] = used - {inside[module]}
    return {module: indices for module, indices in found.items() if indices}


def _places(layers: Sequence[LayerWeights]) -> tuple[dict[int, int], dict[nn.Module, int]]:
    """Two mappings: ``id(parameter)`` -> its layer; module -> the layer in whose block it is."""
    layer_of = {id(slot.parameter): layer.index for layer in layers for slot in layer.slots}
    inside = {
        module: layer.index
        for layer in layers
        if layer.block is not None
        for entry in _entries(layer.block)
        for module in entry.modules()
    }
    return layer_of, inside


def modules_of_layers(
    model: nn.Module, layers: Sequence[LayerWeights]
) -> dict[nn.Module, set[int]]:
    """Modules whose forward must wait, and the layers that each must wait for."""
    layer_of, inside = _places(layers)
    guarded: dict[nn.Module, set[int]] = {}
    for layer in layers:
        if layer.block is not None:
            for entry in _entries(layer.block):
                guarded.setdefault(entry, set()).add(layer.index)
    for module in model.modules():
        indices = {layer_of[id(p)] for p in module.parameters(recurse=False) if id(p) in layer_of}
        indices.discard(inside.get(module, -1))  # the block's own hook has waited
        if indices:
            guarded.setdefault(module, set()).update(indices)
    return guarded


def _entries(block: nn.Module) -> Iterable[nn.Module]:
    """The modules of a block whose forward is called: itself, or what a mere container contains."""
    if not is_container(block):
        return [block]
    return [entry for child in block.children() for entry in _entries(child)]
