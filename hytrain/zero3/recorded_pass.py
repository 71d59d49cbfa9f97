"""The first pass of a kind: all ranks agree on every use, and gather the layer when it comes.

A first backward does not know yet when a layer's gradient is final. If the device can hold them,
all ranks keep their shards of the gradients to its end. If not, a layer that forward has used only
once, and all of whose parameters have a gradient, is taken as complete when backward goes on from
it, and its update may begin.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Literal

from hytrain.zero3.context import END, FAILED, HOLD, TURN, GatherContext


class RecordedPass:
    """A pass that is under way and is being recorded."""

    is_over = False
    """Whether it has ended, except for gradients that are missing: always False."""

    def __init__(
        self,
        context: GatherContext,
        forward_uses: Sequence[int] = (),
        direction: Literal["forward", "backward", "both"] = "both",
    ) -> None:
        """``forward_uses``: for a backward, uses of the one forward that it runs back, in order;
        the same on all ranks. If ``direction`` is "both", all ranks with samples must use the same
        layers.
        """
        self._context = context
        self._direction = direction
        self._once = _once(forward_uses)
        self._sends: bool | None = None  # gradients before the end; None: not agreed upon
        self.uses: list[int] = []
        """Layers in the order of their uses."""
        self.turning_point = 0
        """Number of uses before its backward, if it is forward and backward in one."""
        self.has_held = False
        """Whether the pass has held layers that were not held before."""
        self._in_use: int | None = None

    def use(self, index: int) -> None:
        """Begins computation with a layer; a collective."""
        context = self._context
        if self.turning_point and index in context.held:
            context.use(index)  # how often differs from rank to rank
            return
        if index != self._in_use:
            while (found := self._agree(index)) != index:
                self._enter(found, has_samples=False)  # other ranks', which this one leaves out
            self._enter(index, has_samples=True)
        if index in context.sharded:
            context.use(index)

    def hold(self, index: int) -> None:
        """Keeps a layer gathered through this and every later pass; a collective."""
        self._agree(HOLD + index)
        self._hold(index)

    def _hold(self, index: int) -> None:
        self.has_held = True
        self._context.hold(index)

    def _agree(self, number: int | None) -> int:
        """Returns what this rank goes on with; first holds what other ranks have to hold."""
        while (found := self._agree_on_next(number)) >= HOLD and found != number:
            self._hold(found - HOLD)
        return found

    def _agree_on_next(self, number: int | None) -> int:
        if self._direction == "both":
            return self._context.agree(number)
        return self._context.agree_on_next(number, is_backward=self._direction == "backward")

    def _enter(self, index: int, *, has_samples: bool) -> None:
        context, gradients = self._context, self._context.gradients
        if gradients is not None and self._once and self._sends is None:
            self._sends = context.any_rank(gradients.lacks_room)
        if gradients is not None and self._in_use in context.trained:
            # The first backward keeps no whole gradients either: all that is there is reduced.
            missing = has_samples and not all(map(gradients.has_all, context.trained[self._in_use]))
            is_all = self._is_complete(self._in_use, is_missing=missing)
            for number in reversed(context.trained[self._in_use]):
                gradients.reduce_so_far(number, is_all=is_all)
        keep = {index, *context.held}
        context.release(context.gatherer.live - keep)
        if index in context.sharded:
            context.gather(index)
        context.wait_resident(index)
        self.uses.append(index)
        self._in_use = index

    def _is_complete(self, index: int, *, is_missing: bool) -> bool:
        """Whether a layer's update may begin before the end of backward; may be a collective.

        ``is_missing``: this rank has samples, and gradients of it may still come.
        """
        context = self._context
        if not self._sends or index not in self._once or index in context.unguarded:
            return False
        return not context.any_rank(is_missing)

    def turn(self) -> None:
        """Begins its backward; a collective."""
        self._context.agree(TURN)
        self._turn()

    def _turn(self) -> None:
        """Prepares for ranks that go through what follows the last block more often than others."""
        context = self._context
        self.turning_point = len(self.uses)
        *_, last = (layer.index for layer in context.layers if layer.block is not None)
        behind = set(itertools.takewhile(lambda index: index != last, reversed(self.uses)))
        if len(behind) > 1:  # they take turns (tied embeddings): all of them stay
            for index in sorted(behind & context.sharded):
                context.hold(index)
        # All micro-batches are back at a block before the next one's turn.
        self._once = _once(self.uses) - behind

    def fail(self) -> None:
        """Ends the pass with an error; a collective."""
        self._context.agree(FAILED)

    def end(self) -> None:
        """Ends the pass; a collective. Other ranks may use more layers."""
        while (found := self._agree(END)) != END:
            self._enter(found, has_samples=False)

    def join(self, turned: Callable[[], None] | None) -> bool:
        """Does from beginning to end what the other ranks do; returns whether without an error.

        ``turned`` is called where its backward begins, if it is forward and backward in one.
        """
        while (number := self._agree(None)) not in (END, FAILED):
            if number == TURN:
                self._turn()
                if turned is not None:
                    turned()
            else:
                self._enter(number, has_samples=False)
        return number == END


def _once(uses: Sequence[int]) -> frozenset[int]:
    """Layers that a forward has used in one place only."""
    return frozenset(index for index, number in Counter(uses).items() if number == 1)
