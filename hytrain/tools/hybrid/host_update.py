"""Optimizer state of a stage in host memory: what it frees, and by how much the step is longer.

A stage's state is shared out over its GPUs, and each GPU's part kept and updated by its node, whose
memory and CPU its GPUs share evenly. hytrain's limits apply (docs/internals.md, and the CPU's line
of tools/planner/cost_model.py): updates begin with the last micro-batch's first final gradient, a
layer's backward after that micro-batch's backward has begun, and end before the next step's forward
of the same layer. So of the last backward and the next forward, t of a micro-batch, all but one
layer's part hides them::

    exposed = max(0, max(P / rate, 2 B * P / copy rate) + t / n - t)

with P parameters of one GPU's part and n layers. What pipeline bubbles hide besides is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hytrain.formats.moment_kinds import FP32, state_bytes_each

_COPY_BYTES = 2
"""Of a parameter, each way: its gradient to the host, the new weight back."""


@dataclass(frozen=True)
class Host:
    """What the nodes have for optimizer state."""

    memory_gb: float
    """Of each node, for state."""

    update_rate: float
    """Parameters a second that a node's CPU updates."""

    copy_rate: float
    """GB/s (10**9 bytes) between a GPU and its node's memory, each way."""

    parameter_size: int = 4
    """Bytes of a parameter in the profile's ``parameters_per_layer_bytes``."""

    moments: str = FP32
    """How Adam's moments are kept; `update_rate` is of that kind, too."""

    def state_mb(self, parameter_bytes: Any) -> Any:
        """State of parameters of so many profiled bytes."""
        return parameter_bytes / self.parameter_size * state_bytes_each(self.moments) / 2**20

    def update_ms(self, parameter_bytes: Any, gpus: int, node_gpus: int) -> Any:
        """Of a stage's update, with nothing to hide behind.

        Args:
            parameter_bytes: of the stage, as profiled.
            gpus: of the stage.
            node_gpus: of the node that has most of them.
        """
        part = parameter_bytes / self.parameter_size / gpus
        seconds = max(node_gpus / self.update_rate, _COPY_BYTES / (self.copy_rate * 1e9))
        return 1e3 * seconds * part


def exposed_ms(update: Any, time: Any, layers: Any) -> Any:
    """Of an update of so many ms, what the step is longer by."""
    return np.maximum(0.0, update + time / np.maximum(1, layers) - time)
