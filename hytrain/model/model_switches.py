"""Settings of transformers' models that are in the way of training by micro-batches."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

from torch import nn


class TrainingSwitches:
    """Key-value caches, and blocks' own checkpointing; to be turned off while a step is computed.

    Every step asks, while the GPU waits for it: which modules have a switch at all is found out
    once, which takes milliseconds, and how it stands each time.
    """

    def __init__(self, model: nn.Module, recomputed: Iterable[nn.Module] = ()) -> None:
        """
        Args:
            model: with ``config.use_cache`` on it or its parts: a cache is of no use to a loss, and
                the attention of a block that is computed again would find its own keys in it.
            recomputed: blocks that are recomputed as a whole: their own checkpointing would compute
                them a third time.
        """
        self._with_config = [module for module in model.modules() if hasattr(module, "config")]
        self._checkpointing = [
            module
            for block in recomputed
            for module in block.modules()
            if hasattr(module, "gradient_checkpointing")
        ]

    @contextmanager
    def turned_off(self) -> Generator[None]:
        """While it lasts; those that were on are on again afterwards."""
        undo: list[tuple[Any, str]] = []
        # Most modules of a model share one configuration.
        configs = {id(config): config for config in map(_config_of, self._with_config)}
        undo += [(owner, "use_cache") for owner in configs.values() if _is_on(owner, "use_cache")]
        undo += [
            (module, "gradient_checkpointing")
            for module in self._checkpointing
            if _is_on(module, "gradient_checkpointing")
        ]
        for owner, name in undo:
            setattr(owner, name, False)
        try:
            yield
        finally:
            for owner, name in undo:
                setattr(owner, name, True)


def _config_of(module: nn.Module) -> Any:
    return vars(module).get("config")


def _is_on(owner: Any, name: str) -> bool:
    """Whether it is the owner's own, and true: a class's default is not ours to change."""
    return getattr(owner, "__dict__", {}).get(name) is True
