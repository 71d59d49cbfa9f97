"""What autograd is doing: torch has no public API for it; DeepSpeed uses the same calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

graph_task: Callable[[], int] = torch._C._current_graph_task_id  # pyright: ignore
"""Id of the graph that autograd is running in this thread, -1 for none."""


def accumulator(parameter: torch.Tensor) -> Node:
    """The node that adds to a parameter's ``grad``; it exists only while somebody refers to it.

    Its hooks run after all that users register on the parameter itself, at any time. Another node
    takes its place when ``parameter.data`` is given another device or dtype.
    """
    # Reads of weights are looked for after updates have begun; here none is read.
    with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
        return get_gradient_edge(parameter).node


def will_run(node: Node) -> bool:
    """Whether the graph that is running in this thread runs a node; within a backward only."""
    try:
        return bool(torch._C._will_engine_execute_node(node))  # pyright: ignore
    except RuntimeError:
        return False  # torch.autograd.grad returns what the node would have been given


def is_limited() -> bool:
    """Whether the graph that is running computes gradients of some inputs only.

    ``torch.autograd.grad`` and ``backward(inputs=...)`` do so. Within a backward only.
    """
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
    return not engine.is_checkpoint_valid()


def keeps_graph() -> bool:
    """Whether the graph that is running can be run again; within a backward only."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())  # pyright: ignore


def call_at_end(function: Callable[[], None]) -> None:
    """Calls a function when the backward that is running in this thread has finished."""
    engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore[reportPrivateUsage]
    engine.queue_callback(function)
