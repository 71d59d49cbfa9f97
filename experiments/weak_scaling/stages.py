"""What is measured, with how many GPUs, in which order. Plain data, no torch."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common.records import Json

SYSTEMS = {
    "hytrain": "hytrain",
    "zero2": "deepspeed_zero2_offload",
    "zero3": "deepspeed_zero3_offload",
}
"""Name here, module in experiments/offload_step/systems."""

NAMES = {
    "hytrain": "hytrain, stage 2, k solved",
    "zero2": "DeepSpeed ZeRO-2 offload",
    "zero3": "DeepSpeed ZeRO-3 offload",
}

START_SECONDS = 25.0
"""Of a launch's processes."""

STAGE_SECONDS = {"hytrain": 30.0, "zero2": 60.0, "zero3": 75.0}
"""About, for the 3 B model without accumulation."""


def name_of(system: str, accumulation: int) -> str:
    """A stage's name."""
    return system if accumulation == 1 else f"{system} x{accumulation}"


Launch = tuple[int, list[str], float]
"""Number of GPUs, systems, expected seconds."""


def launches(
    systems: Sequence[str], sizes: Sequence[int], accumulation: Sequence[int]
) -> list[Launch]:
    """The launches in order.

    hytrain first at every size, so that a run which is cut short has the claim; then the others.

    Raises:
        ValueError: an unknown system.
    """
    unknown = set(systems) - set(SYSTEMS)
    if unknown:
        raise ValueError(f"--systems has {sorted(unknown)}: choose of {', '.join(SYSTEMS)}")
    rounds = [[s for s in systems if s == "hytrain"], [s for s in systems if s != "hytrain"]]
    found: list[Launch] = []
    for some in rounds:
        for size in sizes if some else ():
            seconds = START_SECONDS
            for system in some:
                seconds += STAGE_SECONDS[system] * len(accumulation)
            found.append((size, some, seconds))
    return found


def stages_of(systems: Sequence[str], accumulation: Sequence[int], settings: Json) -> list[Json]:
    """The stages of one launch."""
    return [
        {
            "name": name_of(system, number),
            "kind": system,
            "accumulation": number,
            "settings": settings,
        }
        for number in accumulation
        for system in systems
    ]
