"""Resources that spans occupy, and passes of compute; the report's activities are among them."""

from __future__ import annotations

from typing import Final

COMPUTE: Final = "compute"
"""Kernels, or a layer's forward or backward if only CUDA events were recorded."""
GPU_UPDATE: Final = "update on the GPU"
COMPUTES: Final = (COMPUTE, GPU_UPDATE)
"""Resources whose spans keep a GPU busy."""
COMMUNICATION: Final = "communication"
EXCHANGES: Final = frozenset(("all_to_all", "send_recv"))
"""Communication of activations (Ulysses' attention): no gather of weights, no reduction."""
D2H: Final = "gradients to host"
H2D: Final = "weights to GPU"
CPU_UPDATE: Final = "update on the CPU"
WAIT: Final = "wait"
"""The host or the compute stream waits for a layer's new weights, or for room for gradients."""
SYNC: Final = "sync"
"""The host waits for the GPU, in user code."""
DATA: Final = "data_loading"
PHASE: Final = "phase"
"""Forward, backward and step(), on the host."""
PYTHON: Final = "python"
"""Python functions, from which the host's code gets its names."""

RESOURCES: Final = (
    *(COMPUTE, GPU_UPDATE, COMMUNICATION, D2H, H2D, CPU_UPDATE),
    *(WAIT, SYNC, DATA, PHASE, PYTHON),
)

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
RECOMPUTE: Final = "recompute"
OTHER: Final = "other compute"
"""Passes of compute; OTHER if the pass is unknown."""
