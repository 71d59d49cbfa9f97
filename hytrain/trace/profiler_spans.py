"""Phases of a step as spans of torch's profiler, if one runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

_NONE: AbstractContextManager[None] = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """A span ``hytrain::name`` around a block; nothing while no profiler of torch's runs."""
    # record_function takes microseconds even without a profiler.
    if profiler._is_profiler_enabled:  # pyright: ignore[reportPrivateUsage]
        return profiler.record_function(f"hytrain::{name}")
    return _NONE
