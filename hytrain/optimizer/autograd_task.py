"""What autograd is doing right now: torch has no public names for it; DeepSpeed uses the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore
"""The graph that autograd is running in this thread, -1 for none."""


def call_at_end(function: Callable[[], None]) -> None:
    """Calls it when the backward that is running in this thread has finished."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
    engine.queue_callback(function)
