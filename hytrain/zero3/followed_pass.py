"""A later pass of a kind: it follows the plan made from the record, without asking other ranks.

A rank may come to a layer that no rank has used in the record. The others cannot know: it carries
out what is left of the plan, at whose end they ask whether any rank has more. From there on the
ranks agree on every use (:mod:`hytrain.zero3.recorded_pass`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hytrain.errors import UnsupportedError
from hytrain.zero3.context import HOLD, GatherContext
from hytrain.zero3.plan import Action, Operation
from hytrain.zero3.recorded_pass import RecordedPass


class FollowedPass:
    """A pass that is under way and follows a plan.

    At each use this rank does whatever the plan says up to there, including its part in gathers of
    layers that it leaves out itself.
    """

    def __init__(
        self,
        context: GatherContext,
        operations: Sequence[Operation],
        rest: RecordedPass | None = None,
        *,
        asks: bool = False,
        layer_major: bool = False,
    ) -> None:
        """``rest`` follows a plan without reductions, if the ranks have more to do.

        ``asks``: one rank alone may come to layers that the plan does not use, so all ask at its
        end. ``layer_major``: it is forward and backward of all micro-batches in one.
        """
        self._context = context
        self._rest, self._asks = rest, asks
        self._layer_major = layer_major
        self._planned = {x.layer for x in operations if x.action is Action.USE}
        self._operations = operations
        self._at = 0
        self._in_use: int | None = None
        self._extra: set[int] = set()  # gathered beside the plan
        self.agreed: set[int] = set()
        """Layers that all ranks have used beside the plan."""
        self.uses: list[int] = []
        """Layers in the order of their uses so far."""
        self.is_over = False
        """Whether it has ended, except for gradients that are missing."""

    @property
    def is_done(self) -> bool:
        """Whether all of the plan has been carried out."""
        return self._at == len(self._operations)

    def use(self, index: int) -> None:
        """Begins computation with a layer."""
        if self._rest is not None and (self.has_more or self._is_new(index)):
            self._force(len(self._operations))
            self._rest.use(index)
            return
        if index != self._in_use:
            self._go_to(index)
            self.uses.append(index)
            self._in_use = index
        if index in self._context.sharded:
            self._context.use(index)

    def hold(self, index: int) -> None:
        """Keeps a layer gathered through this and every later pass; a collective."""
        if self._rest is not None:
            self._force(len(self._operations))
            self._rest.hold(index)
            return
        self._context.agree(HOLD + index)  # legal if all ranks do it
        self._context.hold(index)

    @property
    def has_more(self) -> bool:
        """Whether a rank has used layers not in the plan, or read layers past their modules."""
        return self._rest is not None and (bool(self._rest.uses) or self._rest.has_held)

    def _is_new(self, index: int) -> bool:
        context = self._context
        return (
            index in context.sharded
            and index not in self._planned
            and index not in context.held
            and index not in context.gatherer.pinned
        )

    def _go_to(self, index: int) -> None:
        wanted = Operation(Action.USE, index)
        places = range(self._at, len(self._operations))
        place = next((i for i in places if self._operations[i] == wanted), None)
        if place is None or self._is_early(place):
            self._use_extra(index)
            return
        self._context.release(self._extra - {index})
        self._extra.clear()
        # Everything up to there, also gathers and reductions of layers that this rank leaves out:
        # the other ranks wait in them.
        self._force(place)
        self._at = place + 1
        self._context.wait_resident(index)
        self._advance(index)

    def _is_early(self, place: int) -> bool:
        """Whether a use comes before its place in the plan, since gradients in front are to come.

        Of layers that are recomputed together, more often than in the record, one is used again
        before the gradients arrive that were there by then in the record.
        """
        gradients = self._context.gradients
        return gradients is not None and any(
            operation.action is Action.REDUCE and gradients.is_coming(operation.layer)
            for operation in self._operations[self._at : place]
        )

    def _use_extra(self, index: int) -> None:
        """Makes a use that the record does not have here: all ranks must, unless the layer is
        there."""
        if index not in self._context.sharded or self._context.is_live(index):
            return
        if self._layer_major:
            # A rank without samples walks through the plan alone, into other collectives.
            raise UnsupportedError(
                "this model could be computed layer by layer until now, but its forward uses layer "
                f"'{self._context.name_of(index)}', which the first step did not: set "
                '"hytrain.accumulation" to "micro_batch_major"'
            )
        self._context.agree(index)
        self.agreed.add(index)
        self._extra.add(index)
        self._context.wait_resident(index)
        self._context.gather(index)

    def gradient_final(self) -> None:
        """Notes that a layer's gradient is complete: it is reduced if its place has come."""
        self._advance()

    def _advance(self, needed: int | None = None) -> None:
        """Carries out what belongs to the use that this rank has come to.

        ``needed``: the layer that must be there at once; others are gathered ahead.
        """
        while not self.is_done:
            operation = self._operations[self._at]
            if operation.action is Action.USE or (
                operation.action is Action.END and not self.is_over
            ):
                return
            if operation.action is Action.REDUCE and not self._reduce(operation.layer):
                return
            self._at += 1
            self._carry_out(operation, ahead=operation.layer != needed)

    def _force(self, end: int) -> None:
        """Carries operations out up to a place, whatever this rank has of their gradients."""
        while self._at < end:
            operation = self._operations[self._at]
            self._at += 1
            if operation.action is Action.REDUCE and self._context.gradients is not None:
                self._context.gradients.close(operation.layer)
            elif operation.action is Action.USE:
                self._context.wait_resident(operation.layer)
            else:
                self._carry_out(operation, ahead=True)

    def _reduce(self, index: int) -> bool:
        gradients = self._context.gradients
        return gradients is None or gradients.close_if_final(index)

    def _carry_out(self, operation: Operation, *, ahead: bool) -> None:
        if operation.action is Action.GATHER:
            self._context.gather(operation.layer, ahead=ahead)
        # A layer that is held since this plan was made stays.
        elif operation.action is Action.RELEASE and operation.layer not in self._context.held:
            self._context.release([operation.layer])

    def end(self) -> None:
        """Ends the pass, except for gradients that are missing: see :attr:`is_done`.

        Carries out what is left of the plan, including uses that this rank has not come to.
        """
        self.is_over = True
        self._advance()
        while not self.is_done and self._operations[self._at].action is Action.USE:
            self._context.wait_resident(self._operations[self._at].layer)
            self._at += 1
            self._advance()
        self._end_rest()

    def _end_rest(self) -> None:
        if self._rest is not None and (self._asks or self.has_more):
            self._rest.end()

    def finish(self) -> None:
        """Walks the plan to its end: gradients that are still missing are taken as they are."""
        self._force(len(self._operations))

    def release(self) -> None:
        """Releases what it has kept beside the plan's layers."""
        self._context.release(self._extra)
        self._context.release(self._context.held)
        if self.has_more:
            self._context.release(self._context.gatherer.live)

    def join(self, turned: Callable[[], None] | None, turning_point: int) -> None:
        """Does from beginning to end what the other ranks do in the pass.

        ``turned`` is called where its backward begins, after ``turning_point`` uses, if it is
        forward and backward in one.
        """
        if turned is not None:
            self._force(self._place_of_turn(turning_point))
            self._context.gatherer.start_held()  # before any reduction, as where layers are used
            turned()
        self.finish()
        self._end_rest()

    def _place_of_turn(self, turning_point: int) -> int:
        """The place by which the backward has begun: its first use or reduction."""
        uses = 0
        for place, operation in enumerate(self._operations):
            if operation.action is Action.REDUCE:
                return place
            if operation.action is Action.USE:
                uses += 1
                if uses > turning_point:
                    return place
        return len(self._operations)
