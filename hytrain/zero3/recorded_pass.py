"""The first pass of a kind: every use is agreed upon by all ranks, and gathered when it comes."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from hytrain.zero3.context import END, FAILED, HOLD, TURN, GatherContext


class RecordedPass:
    """A pass that is under way and is being recorded."""

    is_over = False
    """Whether it has ended but for gradients that are missing: it never has."""

    def __init__(self, context: GatherContext) -> None:
        self._context = context
        self.uses: list[int] = []
        """Layers in the order of their uses."""
        self.turning_point = 0
        """Uses before its backward, where it is forward and backward in one."""
        self._in_use: int | None = None

    def use(self, index: int) -> None:
        """Computation with a layer begins; a collective."""
        context = self._context
        if self.turning_point and index in context.held:
            context.use(index)  # how often differs from rank to rank
            return
        if index != self._in_use:
            context.agree(index)
            self._enter(index)
        if index in context.sharded:
            context.use(index)

    def _enter(self, index: int) -> None:
        context = self._context
        if context.reducer is not None and self._in_use in context.trained:
            # The first backward keeps no whole gradients either: all that is there is reduced.
            context.reducer.reduce_so_far(self._in_use)
        keep = {index, *context.held}
        context.release(context.gatherer.live - keep)
        if index in context.sharded:
            context.gather(index)
        context.wait_resident(index)
        self.uses.append(index)
        self._in_use = index

    def turn(self) -> None:
        """Its backward begins; a collective."""
        self._context.agree(TURN)
        self._turn()

    def _turn(self) -> None:
        """Some ranks will go through what is behind the last block more often than others."""
        context = self._context
        self.turning_point = len(self.uses)
        *_, last = (layer.index for layer in context.layers if layer.block is not None)
        behind = set(itertools.takewhile(lambda index: index != last, reversed(self.uses)))
        if len(behind) > 1:  # they take turns (tied embeddings): all of them stay
            for index in sorted(behind & context.sharded):
                context.hold(index)

    def fail(self) -> None:
        """It ends here; a collective."""
        self._context.agree(FAILED)

    def end(self) -> None:
        """It is over; a collective."""
        self._context.agree(END)

    def join(self, turned: Callable[[], None] | None) -> bool:
        """Does from begin to end what the other ranks do in it.

        Args:
            turned: called where its backward begins, if it is forward and backward in one.

        Returns:
            Whether it has come to its end, not to an error.
        """
        while (number := self._context.agree(None)) not in (END, FAILED):
            if number == TURN:
                self._turn()
                if turned is not None:
                    turned()
            elif number >= HOLD:
                self._context.hold(number - HOLD)
            else:
                self._enter(number)
        return number == END
