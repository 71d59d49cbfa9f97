"""What a GPU may wait for: causes of idle time."""

from __future__ import annotations

from typing import Final

from hytrain.tools.trace import kinds

CPU_ADAM: Final = "CPU Adam"
SLOW_RANK: Final = "slow rank"
CLIPPING: Final = "clipping"
LATE_GRADIENT_COPY: Final = "late gradients"
LATE_WEIGHT_COPY: Final = "late weights"
STARVED_CPU: Final = "starved CPU Adam"
LATE_COLLECTIVE: Final = "late collective"
LAUNCH: Final = "launch-bound"
DATA_LOADING: Final = "data loading"
SYNCHRONIZATION: Final = "synchronization"
HOST_CODE: Final = "host code"
HAND_OVER: Final = "hand-over"
KERNEL_GAPS: Final = "between kernels"
UNRESOLVED: Final = "unresolved"

HOST_CAUSES: Final = frozenset((LAUNCH, DATA_LOADING, SYNCHRONIZATION, HOST_CODE))
CAUSES: Final = (
    *(kinds.D2H, CPU_ADAM, kinds.H2D, kinds.COMMUNICATION, SLOW_RANK, CLIPPING),
    *(LATE_GRADIENT_COPY, LATE_WEIGHT_COPY, STARVED_CPU, LATE_COLLECTIVE),
    *(LAUNCH, DATA_LOADING, SYNCHRONIZATION, HOST_CODE, HAND_OVER, KERNEL_GAPS, UNRESOLVED),
)
