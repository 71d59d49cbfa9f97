"""Gathers of layers that every rank updates on the device are queued ahead of their forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from rank_shadow import backward, config_for, followed
from support.models import make_model

pytestmark = pytest.mark.timeout(120)

LAYERS = 6


def _events(engine: Any) -> list[tuple[str, int]]:
    """("gather" or "forward", layer), in the host's order, from now on."""
    found: list[tuple[str, int]] = []
    pipeline = engine.optimizer.pipeline
    numbers = {state.name: state.index for state in pipeline.layers}
    gather, wait = pipeline._collectives.all_gather, pipeline.wait

    def gathering(flat: Any, sizes: Any, name: str, **more: Any) -> None:
        found.append(("gather", numbers[name]))
        gather(flat, sizes, name, **more)

    def waiting(state: Any) -> None:
        is_first = not state.update.waited
        wait(state)
        if is_first:
            found.append(("forward", state.index))

    pipeline._collectives.all_gather, pipeline.wait = gathering, waiting
    return found


def _ahead(events: list[tuple[str, int]]) -> list[int]:
    """How many gathers of layers above were queued when each layer's forward began."""
    gathered, found = 0, []
    for what, layer in events:
        if what == "gather":
            assert layer == gathered, "in the layers' order"
            gathered += 1
        else:
            found.append(gathered - 1 - layer)
    return found


CASES = {
    "all": ((6, 6), [2, 2, 2, 2, 1, 0]),
    "none": ((0, 6), [0, 0, 0, 0, 0, 0]),
    "two": ((6, 2), [1, 0, 0, 0, 0, 0]),
    "three": ((3, 4), [2, 1, 0, 0, 0, 0]),
}
"""Layers on the device of each rank, and how far ahead gathers are."""


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_all_ranks_gather_as_far_ahead(case: str) -> None:
    layers, expected = CASES[case]
    own = layers[dist.get_rank()]
    with followed(make_model("mlp"), config_for((0.6, 0.4), stage=2, clipping=0.02)) as shadow:
        engine = shadow.engine
        assert len(shadow.states) == LAYERS
        engine.set_gpu_fraction(own / LAYERS)
        shadow.take_steps(range(3))
        assert engine.optimizer.pipeline.num_gpu_layers == own
        events = _events(engine)
        shadow.take_steps([3])
        assert [what for what, _ in events].count("forward") == LAYERS
        # The step that ends has queued gathers for the next forward.
        queued = [layer for what, layer in events[events.index(("forward", LAYERS - 1)) :]
                  if what == "gather"]  # fmt: skip
        assert queued == list(range(min(2, *layers)))
        events.clear()
        events += [("gather", layer) for layer in queued]
        shadow.take_steps([4])
        assert _ahead(events[: events.index(("forward", LAYERS - 1)) + 1]) == expected


def _infinite(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * float("inf")


@on_ranks(2)
def test_a_step_that_is_skipped_gathers_nothing() -> None:
    with followed(make_model("mlp"), config_for((0.5, 0.5), stage=2, clipping=1.0,
                                                gpu_fraction=1.0)) as shadow:  # fmt: skip
        shadow.take_steps(range(2))
        engine = shadow.engine
        engine.optimizer.pipeline.wait_all()
        events = _events(engine)
        handle = next(engine.parameters()).register_hook(_infinite)
        backward(engine, 2)
        assert shadow.step(), "skipped"
        handle.remove()
        assert events == []
        shadow.take_steps([3])
