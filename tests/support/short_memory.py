"""A device without room for all gradients until the end of a first backward."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from hytrain.model.layer_state import LayerState
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.optimizer.autograd_task import graph_task
from hytrain.optimizer.reduction import GradientReducer


@contextmanager
def short_of_memory() -> Generator[list[int]]:
    """Makes first backwards begin the updates of layers that seem complete.

    Yields:
        Indices of layers, in the order in which their updates began while autograd ran.
    """
    early: list[int] = []
    send = UpdatePipeline.send

    def sent(pipeline: UpdatePipeline, layer: LayerState, *arguments: Any) -> None:
        if graph_task() != -1:
            early.append(layer.index)
        send(pipeline, layer, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GradientReducer, "lacks_room", property(lambda reducer: reducer._step.begun))
        patch.setattr(UpdatePipeline, "send", sent)
        yield early
