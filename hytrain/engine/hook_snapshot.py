"""What hooks an engine puts on a model, so that it can take all of them off again."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import nn


class HookSnapshot:
    """The hooks that a model and its modules get while something is built around them.

    DeepSpeed's engine does not remove its own: a second engine's would come on top of them, and
    the first one's would still be called.
    """

    def __init__(self, model: Any) -> None:
        """Notes which hooks there are; what is no module has none."""
        self._model = model
        self._before = {id(hooks): set(hooks) for hooks in _hooks_of(model)}
        self._added: list[tuple[MutableMapping[Any, Any], Any]] = []

    def note(self) -> None:
        """Notes which have come since; later ones are somebody else's."""
        self._added = [
            (hooks, key)
            for hooks in _hooks_of(self._model)
            for key in hooks
            if key not in self._before.get(id(hooks), ())
        ]

    def remove(self) -> None:
        """Takes off what was noted. May be called twice."""
        for hooks, key in self._added:
            hooks.pop(key, None)
        self._added = []


def _hooks_of(model: Any) -> list[MutableMapping[Any, Any]]:
    """Every table of hooks of every module, with the tables of their options."""
    if not isinstance(model, nn.Module):
        return []
    return [
        hooks
        for module in model.modules()
        for name, hooks in vars(module).items()
        # torch has a dozen of them, all named like this.
        if "_hooks" in name and isinstance(hooks, MutableMapping)
    ]
