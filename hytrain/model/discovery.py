"""Finds the layers of a model: an ordered list of groups of parameters.

Each transformer block is one layer; what precedes the first block is the first layer, what
follows the last block is the last. Blocks are found as repeated stacks of same-class modules in
the module tree, or by the class that the configuration names. If it names none, a leaf module of
DeepSpeed's that is not within a block is a block, too.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from hytrain.errors import ConfigError

_SHARDED_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(slots=True)
class LayerParameters:
    """One layer: parameters in registration order and the module whose forward uses them.

    Attributes:
        name: the block's name, or where the layer is.
        parameters: the trained parameters.
        block: the block; None for what is before, between or after blocks.
        frozen: the frozen parameters, if they were asked for.
    """

    name: str
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)
    block: nn.Module | None = None
    frozen: list[tuple[str, nn.Parameter]] = field(default_factory=list)


def find_layers(
    model: nn.Module,
    trained: Iterable[nn.Parameter],
    block_class: str | None = None,
    frozen: Iterable[nn.Parameter] = (),
) -> list[LayerParameters]:
    """Cuts a model into layers, in the order of registration.

    Args:
        model: the module tree.
        trained: the parameters to update. A tied parameter belongs to the layer that registers it
            first.
        block_class: class name of the block; None: detect.
        frozen: frozen parameters that get a place in a layer, too; others are left out.

    Returns:
        Layers that hold at least one of these parameters, each parameter in exactly one.

    Raises:
        ConfigError: ``block_class`` names no module of the model.
    """
    is_frozen = {id(p): True for p in frozen} | {id(p): False for p in trained}
    blocks = _find_blocks(model, block_class)
    if not blocks:
        blocks = _top_children(model)
    layers = list(_collect(model, blocks, set(is_frozen)))
    for layer in layers:
        layer.frozen = [item for item in layer.parameters if is_frozen[id(item[1])]]
        layer.parameters = [item for item in layer.parameters if not is_frozen[id(item[1])]]
    return [layer for layer in layers if layer.parameters or layer.frozen]


def can_be_sharded(parameter: nn.Parameter) -> bool:
    """Whether a parameter is frozen and a plain dense tensor of a floating-point dtype.

    Quantized weights may hold more than their elements, or have dtypes that no collective takes.
    """
    return (
        not parameter.requires_grad
        and parameter.numel() > 0
        and parameter.dtype in _SHARDED_DTYPES
        and type(parameter.data) is torch.Tensor
        and parameter.layout is torch.strided
    )


def _find_blocks(model: nn.Module, block_class: str | None) -> dict[nn.Module, str]:
    blocks: dict[nn.Module, str] = {}
    for name, module, ancestors in _walk(model):
        if any(ancestor in blocks for ancestor in ancestors):
            continue  # only the outermost stack: stacks inside a block are part of it
        if block_class is not None:
            if type(module).__name__ == block_class:
                blocks[module] = name
        elif _is_leaf(module):
            blocks[module] = name or "model"
        elif isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
            children = list(module.named_children())
            classes = Counter(type(child).__name__ for _, child in children if _has_weights(child))
            if classes and max(classes.values()) >= 2:
                for child_name, child in children:
                    if _has_weights(child):
                        blocks[child] = f"{name}.{child_name}" if name else child_name
    if block_class is not None and not blocks:
        seen = sorted({type(module).__name__ for module in model.modules()})
        near = difflib.get_close_matches(block_class, seen, n=1)
        hint = f'did you mean "{near[0]}"? Its classes: ' if near else "use one of "
        raise ConfigError(
            f'"hytrain.layers.class" is "{block_class}" but the model has no module of that class: '
            f"{hint}{', '.join(seen)}, or null to detect"
        )
    return blocks


def _is_leaf(module: nn.Module) -> bool:
    """Whether ``deepspeed.utils.set_z3_leaf_modules`` names it: its weights are gathered at once.

    Ranks may take different branches in it: a layer inside would be used by some of them only.
    """
    return bool(vars(module).get("_z3_leaf", False)) and _has_weights(module)


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others: their forward is called, its own may never be."""
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return isinstance(module, containers) or type(module).forward is nn.Module.forward


def _top_children(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the blocks of a model without stacks: the children of the first module with several.

    A child that only holds others is replaced by its children, as in a stack of one block.
    """
    prefix = ""
    while True:
        children = list(_children(model, prefix))
        if len(children) != 1:
            return {child: name for name, child in children}
        prefix = f"{children[0][0]}."
        model = children[0][1]


def _children(model: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in model.named_children():
        if not _has_weights(child):
            continue
        if is_container(child) and next(child.children(), None) is not None:
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _collect(
    model: nn.Module, blocks: dict[nn.Module, str], wanted: set[int]
) -> Iterator[LayerParameters]:
    names = list(blocks.values())
    taken: set[int] = set()
    seen_blocks = 0
    rest: LayerParameters | None = None
    for name, module, ancestors in _walk(model):
        if any(ancestor in blocks for ancestor in ancestors):
            continue
        if module in blocks:
            if rest is not None:
                yield rest
                rest = None
            seen_blocks += 1
            yield LayerParameters(name, list(_take(module, name, wanted, taken, True)), module)
            continue
        own = list(_take(module, name, wanted, taken, False))
        if own:
            if rest is None:
                if seen_blocks < len(names):
                    where = f"before {names[seen_blocks]}"
                else:
                    where = f"after {names[-1]}" if names else (name or "model")
                rest = LayerParameters(where)
            rest.parameters.extend(own)
    if rest is not None:
        yield rest


def _take(
    module: nn.Module, prefix: str, wanted: set[int], taken: set[int], recurse: bool
) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(prefix=prefix, recurse=recurse):
        if id(parameter) in wanted and id(parameter) not in taken:
            taken.add(id(parameter))
            yield name, parameter


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Yields (name, module, ancestors), each module once, in registration order."""
    seen: set[nn.Module] = set()
    stack: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", model, ())]
    while stack:
        name, module, ancestors = stack.pop()
        if module in seen:
            continue
        seen.add(module)
        yield name, module, ancestors
        children = [
            (f"{name}.{child_name}" if name else child_name, child, (*ancestors, module))
            for child_name, child in module.named_children()
        ]
        stack.extend(reversed(children))


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
