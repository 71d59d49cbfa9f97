"""What a span occupies, and the passes of compute; they are activities of the report, too."""

from __future__ import annotations

from typing import Final

COMPUTE: Final = "compute"
"""Kernels, or a layer's forward or backward where only CUDA events were recorded."""
GPU_UPDATE: Final = "update on the GPU"
COMPUTES: Final = (COMPUTE, GPU_UPDATE)
"""In which a GPU is busy."""
COMMUNICATION: Final = "communication"
EXCHANGES: Final = frozenset(("all_to_all", "send_recv"))
"""Communication of activations (Ulysses' attention): no gather of weights, no reduction."""
D2H: Final = "gradients to host"
H2D: Final = "weights to GPU"
CPU_UPDATE: Final = "update on the CPU"
WAIT: Final = "wait"
"""The host or the compute stream waits for the new weights of a layer."""
SYNC: Final = "sync"
"""The host waits for the GPU, in user code."""
DATA: Final = "data_loading"
PHASE: Final = "phase"
"""Forward, backward and step(), on the host."""
PYTHON: Final = "python"
"""Functions, for names."""

RESOURCES: Final = (
    *(COMPUTE, GPU_UPDATE, COMMUNICATION, D2H, H2D, CPU_UPDATE),
    *(WAIT, SYNC, DATA, PHASE, PYTHON),
)

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
RECOMPUTE: Final = "recompute"
OTHER: Final = "other compute"
"""Passes of compute; the last where it is unknown which."""
