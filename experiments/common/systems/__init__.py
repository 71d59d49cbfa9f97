"""The measured systems: one module each, with a `build` function of the same signature."""

from __future__ import annotations

import importlib

from experiments.common.systems.base import Build

NAMES = (
    "forward_backward",
    "all_gpu",
    "hytrain",
    "deepspeed_zero2_offload",
    "deepspeed_twin_flow",
    "deepspeed_zero3_offload",
    "fsdp2",
)


def load(name: str) -> Build:
    """The `build` function of a system; imports it only now, since each needs its own packages."""
    if name not in NAMES:
        raise ValueError(f"system {name!r} is unknown: choose one of {', '.join(NAMES)}")
    module = importlib.import_module(f"experiments.common.systems.{name}")
    return module.build
