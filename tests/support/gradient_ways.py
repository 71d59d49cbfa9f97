"""How gradients are taken over, which parameter sizes decide: those of toy models are joined."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hytrain.optimizer import gradients

WAYS = {"one by one": (0, 0), "all at once": (0, 2**40), "joined": (2**40, 2**40)}
"""Mean elements per parameter below which gradients are joined, and are taken over together."""


@contextmanager
def taking_gradients(how: str) -> Iterator[None]:
    """Makes engines that are built within the block take gradients over in this way."""
    names = ("_JOINED", "_TOGETHER")
    before = [getattr(gradients, name) for name in names]
    try:
        for name, limit in zip(names, WAYS[how], strict=True):
            setattr(gradients, name, limit)
        yield
    finally:
        for name, limit in zip(names, before, strict=True):
            setattr(gradients, name, limit)
