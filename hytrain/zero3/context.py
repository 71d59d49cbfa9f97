"""What a pass over gathered layers works with: the layers, their gatherer, the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

from hytrain.comm.collectives import ShardCollectives
from hytrain.zero3.gatherer import LayerGatherer
from hytrain.zero3.layer_weights import LayerWeights

END = -1
"""What ranks agree upon, instead of a layer's number, when a pass being recorded is over."""
TURN = -2
"""The backward of a pass that is forward and backward in one begins."""
FAILED = -3
"""The pass ends with an error, on all ranks that make it."""
_LAST = (1 << 32) - 1
"""Stands for END if the smallest number goes first."""
_NOBODY = -(1 << 63)
"""No rank has a number of its own."""
HOLD = 1 << 32
"""Added to a layer's number where ranks agree to hold it."""


class PendingGradients(Protocol):
    """A backward's gradients that are not reduced yet; its plan says when they are."""

    def close_if_final(self, index: int) -> bool:
        """Reduces a layer's gradient if all of it is there; whether it has been reduced."""
        ...

    def close(self, index: int) -> None:
        """Reduces what there is of a layer's gradient, unless it has been reduced."""
        ...

    def is_coming(self, index: int) -> bool:
        """Whether the graph that runs will bring a gradient that a layer has not got yet."""
        ...

    def reduce_so_far(self, index: int, *, is_all: bool) -> None:
        """Reduces what there is of a layer's gradient; more of it may come unless ``is_all``."""
        ...

    def has_all(self, index: int) -> bool:
        """Whether each of a layer's parameters has got a gradient of this backward."""
        ...

    @property
    def lacks_room(self) -> bool:
        """Whether gradients kept to the end of backward take memory that backward needs."""
        ...


class GatherContext:
    """The layers by their numbers; what is done already is not done again.

    Attributes:
        layers: all layers in forward order.
        sharded: numbers of the layers that have to be gathered.
        trained: number of a layer with gradients -> the gradients' numbers (large blocks: several).
        held: numbers of the sharded layers that stay gathered through every pass.
        unguarded: numbers of layers, sharded or not, whose weights are used past their modules.
        gradients: those that are reduced when a plan says so; None: they are reduced once final.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        gatherer: LayerGatherer,
        collectives: ShardCollectives,
        held: Iterable[int],
    ) -> None:
        self.layers = list(layers)
        self.sharded = {layer.index for layer in layers if layer.sharded}
        self.trained = {x.index: [state.index for state in x.trained] for x in layers if x.trained}
        self._resident = {layer.index for layer in layers if layer.resident}
        self.unguarded = set(held)
        self._by_number = {layer.index: layer for layer in layers}
        self.held = sorted(set(held) & self.sharded)
        self.gradients: PendingGradients | None = None
        self.gatherer = gatherer
        self._collectives = collectives

    def agree(self, number: int | None) -> int:
        """Returns the number that all ranks have come to; None: this rank follows the others."""
        self.gatherer.start_held()  # other ranks may have begun them before they come here
        return self._collectives.agree_on_use(number, self._words)

    def _words(self, number: int) -> str:
        special = {END: "its end", _LAST: "its end", TURN: "its backward", FAILED: "an error"}
        layer = self._by_number.get(number % HOLD)
        # A collective of another kind on another rank may have met this one.
        return special.get(number) or (f"layer '{layer.name}'" if layer else "something else")

    def agree_on_next(self, number: int | None, *, is_backward: bool) -> int:
        """Returns the layer that all ranks go on with, maybe not this rank's; END: all are done.

        Ranks may use different layers: the first one in the order of the pass is next, so that what
        most ranks use in one order is gathered once. What a rank has to hold comes before it.

        Args:
            number: this rank's next layer, END, or HOLD and a layer; None: it has none of its own.
            is_backward: the pass goes from the last layer to the first.
        """
        end = END if is_backward else _LAST

        def choose(smallest: int, largest: int) -> int | None:
            if smallest < END:
                return None
            return largest if is_backward or largest >= HOLD else smallest

        self.gatherer.start_held()  # as in agree()
        mine = end if number == END else number
        found = self._collectives.agree_on_use(mine, self._words, choose)
        return END if found in (END, _LAST, _NOBODY) else found

    def any_rank(self, flag: bool) -> bool:
        """Whether ``flag`` is true on any rank; a collective."""
        return bool(self._collectives.maximum([int(flag)])[0])

    def name_of(self, index: int) -> str:
        """A layer's name, for messages."""
        return self._by_number[index].name

    def is_live(self, index: int) -> bool:
        """Whether the layer's whole copy is there or on its way."""
        return self.gatherer.is_live(self._by_number[index])

    def gather(self, index: int, *, ahead: bool = False) -> None:
        """Gathers a layer unless it is live; see :meth:`LayerGatherer.gather`."""
        if not self.is_live(index):
            self.gatherer.gather(self._by_number[index], ahead=ahead)

    def use(self, index: int) -> None:
        """Makes compute from now on see the weights of a layer that is live."""
        self.gatherer.use(self._by_number[index])

    def release(self, indices: Iterable[int]) -> None:
        """Releases those of the layers that are live."""
        for index in sorted(indices):
            if self.is_live(index):
                self.gatherer.release(self._by_number[index])

    def wait_resident(self, index: int) -> None:
        """Waits until those weights of a layer that are not sharded are the newest."""
        if index in self._resident:
            self.gatherer.wait_resident(self._by_number[index])

    def wait_beside(self, uses: Collection[int]) -> None:
        """When a pass begins, waits for weights that none of its uses waits for, or too late.

        ``uses`` are its plan's, the same on all ranks: each wait may be a collective.
        """
        for index in sorted(self._resident):
            if index not in uses or index in self.unguarded:
                self.wait_resident(index)

    def hold(self, index: int) -> None:
        """Keeps a layer there from now on, through this and every later pass."""
        self.unguarded.add(index)
        self.wait_resident(index)
        if index in self.sharded:
            self.held = sorted({*self.held, index})
            self.keep(index)

    def keep(self, index: int) -> None:
        """Gathers a layer that is held, and lets it be read anywhere."""
        self.gather(index)
        self.use(index)
        for part in self._by_number[index].sharded:
            part.allow_reads()
