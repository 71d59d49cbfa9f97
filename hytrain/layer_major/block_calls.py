"""Turns the calls of a model's blocks into stops of the forward that makes them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from hytrain.layer_major.suspended_forward import SuspendedForward

Call = Callable[..., Any]


class BlockCalls:
    """The blocks in forward order, and how they are called outside of a suspended forward."""

    def __init__(self, blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
        self.blocks = list(blocks)
        self.names = list(names)
        self._numbers = {id(block): number for number, block in enumerate(self.blocks)}

    @contextmanager
    def stopping(self) -> Generator[Sequence[Call]]:
        """Makes suspended forwards stop, while the context lasts, where they call a block.

        Calls from other threads, and of other modules of the same classes, are unchanged.

        Yields:
            For each block, the function that calls it with everything around its forward: hooks,
            and what its class does in ``__call__``.
        """
        classes: dict[type[Any], Call] = {}
        for block in self.blocks:
            # The class's, not the instance's: that is where Python looks ``__call__`` up.
            classes.setdefault(type(block), type(block).__call__)
        own = {kind: vars(kind).get("__call__") for kind in classes}
        for kind, call in classes.items():
            cast(Any, kind).__call__ = self._stop_or(call)
        try:
            yield [classes[type(block)].__get__(block) for block in self.blocks]
        finally:
            for kind, call in own.items():
                if call is None:
                    del cast(Any, kind).__call__
                else:
                    cast(Any, kind).__call__ = call

    def _stop_or(self, call: Call) -> Call:
        def stop_or_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            number = self._numbers.get(id(module))
            forward = SuspendedForward.current()
            if number is None or forward is None:
                return call(module, *args, **kwargs)
            return forward.suspend(number, args, kwargs)

        return stop_or_call
