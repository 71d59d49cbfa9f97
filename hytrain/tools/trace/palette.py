"""Colours of the bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from hytrain.tools.trace import blockers as causes
from hytrain.tools.trace import spans as kinds

COLOURS: Final[Mapping[str, str]] = {
    "forward": "#5aa9e6",
    "backward": "#2f6db5",
    "recompute": "#7d6fd0",
    "other compute": "#8d9bab",
    "update on the GPU": "#16a394",
    "communication": "#b768c9",
    "gradient D2H": "#e6a532",
    "weights H2D": "#d9772b",
    "update on the CPU": "#58a945",
    "host": "#8695a8",
    "host waits": "#b9a48c",
    "GPU idle: the chain": "#e5383b",
    "GPU idle: the host": "#f277a6",
    "GPU idle: unresolved": "#8a8f98",
}
"""Legend -> colour; they can be read on light and dark pages."""

LEGEND: Final = tuple(COLOURS)
_HOST: Final = (
    *(causes.LAUNCH, causes.DATA_LOADING, causes.SYNCHRONIZATION, causes.HOST_CODE),
    causes.KERNEL_GAPS,
)
_RESOURCES: Final = {
    kinds.GPU_UPDATE: "update on the GPU",
    kinds.COMMUNICATION: "communication",
    kinds.D2H: "gradient D2H",
    kinds.H2D: "weights H2D",
    kinds.CPU_UPDATE: "update on the CPU",
    kinds.WAIT: "host waits",
    kinds.SYNC: "host waits",
}


def legend_of(resource: str, detail: str) -> str:
    """A span's entry in the legend."""
    if resource == kinds.COMPUTE:
        return detail if detail in COLOURS else "other compute"
    return _RESOURCES.get(resource, "host")


def legend_of_cause(cause: str) -> str:
    """That of idle time."""
    if cause == causes.UNRESOLVED:
        return "GPU idle: unresolved"
    return "GPU idle: the host" if cause in _HOST else "GPU idle: the chain"
