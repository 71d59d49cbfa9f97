"""Settings of transformers' models that are in the way of training by micro-batches."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def training_switches(model: nn.Module, recomputed: Iterable[nn.Module]) -> Generator[None]:
    """While it lasts, no key-value caches are made, and blocks do not recompute themselves.

    Args:
        model: with ``config.use_cache`` on it or its parts: a cache is of no use to a loss, and
            the attention of a block that is computed again would find its own keys in it.
        recomputed: blocks that are recomputed as a whole: their own checkpointing would compute
            them a third time.
    """
    undo: list[tuple[Any, str]] = []
    for owner in _configs(model):
        if vars(owner).get("use_cache") is True:
            undo.append((owner, "use_cache"))
    for block in recomputed:
        for module in block.modules():
            if vars(module).get("gradient_checkpointing") is True:
                undo.append((module, "gradient_checkpointing"))
    for owner, name in undo:
        setattr(owner, name, False)
    try:
        yield
    finally:
        for owner, name in undo:
            setattr(owner, name, True)


def _configs(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = vars(module).get("config")
        # Most modules of a model share one; it is looked into once, which takes a while.
        if config is not None and id(config) not in found and "__dict__" in dir(config):
            found[id(config)] = config
    return list(found.values())
