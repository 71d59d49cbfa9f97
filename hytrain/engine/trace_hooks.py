"""Hooks on a model's modules that tell a recorder when layers are computed; there while it records.

They are put on and taken off between two steps: a step that is not recorded runs without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hytrain.model.backward_hooks import before_backward
from hytrain.optimizer.layer_guards import tensors_in
from hytrain.trace.recorder import Recorder


def follow_layers(layer_of: Mapping[nn.Module, int], recorder: Recorder) -> Callable[[], None]:
    """Tells the recorder of the forward and backward of each of the modules.

    Args:
        layer_of: modules whose forward is a layer's, or a part of it.
        recorder: is told.

    Returns:
        What takes the hooks off again.
    """
    handles: list[RemovableHandle] = []
    for number, (module, layer) in enumerate(layer_of.items()):
        handles.append(module.register_forward_pre_hook(_enter(layer, number, recorder)))
        # Also where it ends with an exception: torch's checkpointing leaves a recomputed forward
        # that way, as soon as it has what backward needs.
        handles.append(module.register_forward_hook(_leave(layer, recorder), always_call=True))

    def remove() -> None:
        for handle in handles:
            handle.remove()

    return remove


def _enter(
    layer: int, number: int, recorder: Recorder
) -> Callable[[nn.Module, tuple[object, ...]], None]:
    def hook(_module: nn.Module, _inputs: tuple[object, ...]) -> None:
        recorder.enter_layer(layer, number)

    return hook


def _leave(
    layer: int, recorder: Recorder
) -> Callable[[nn.Module, tuple[object, ...], object], None]:
    def enter_backward(_gradient: object) -> None:
        recorder.enter_backward(layer)

    def hook(_module: nn.Module, _inputs: tuple[object, ...], outputs: object) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    before_backward(tensor, enter_backward)
        recorder.leave_layer(layer)

    return hook
