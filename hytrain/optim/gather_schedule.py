"""Gathers layers as a pass over the model needs them, ahead of it, in one order on all ranks.

The first pass of a kind (forward with or without gradients, backward) is recorded: every use is
agreed upon by all ranks, which costs a small collective each, and gathered when it comes. Later
passes follow a plan made from the record (:mod:`hytrain.parallel.gather_plan`), and nobody has to
ask: a rank does whatever the plan says up to the use that it has come to, including its part in
gathers of layers that it leaves out itself. A rank without a batch walks through the plan alone.

In backward the plan also says where a layer's gradient is reduced, because that is a collective
among the gathers. A gradient that is final early waits for its place; one that is still missing
when its place has come will not come any more (autograd runs what was recorded last first), and
is taken as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from hytrain.layers.state import LayerState
from hytrain.offload.gatherer import LayerGatherer
from hytrain.parallel.collectives import ShardCollectives
from hytrain.parallel.gather_plan import (
    Action,
    GatherSettings,
    Operation,
    PassTrace,
    plan_pass,
)

PassKind = Literal["train", "eval", "backward", "layers"]
"""A forward with or without gradients; a backward; or both for all of a step's micro-batches, layer
by layer."""

_END = -1
_TURN = -2
_FAILED = -3
_HOLD = 1 << 32
"""Added to a layer's number where ranks agree to hold it."""


class Reducer(Protocol):
    """Who holds the gradients that a backward's plan says when to reduce."""

    def close_if_final(self, index: int) -> bool:
        """Reduces a layer's gradient if all of it is there; whether it has been reduced."""
        ...

    def close(self, index: int) -> None:
        """Reduces what there is of a layer's gradient, unless it has been reduced."""
        ...

    def reduce_so_far(self, index: int) -> None:
        """Reduces what there is of a layer's gradient; more of it may come."""
        ...


@dataclass(slots=True)
class _Pass:
    """A pass that is under way."""

    kind: PassKind
    operations: Sequence[Operation] | None
    """None: the pass is being recorded."""
    at: int = 0
    uses: list[int] = field(default_factory=list)
    in_use: int | None = None
    turn: int = 0
    """Uses before its backward begins, where it is forward and backward in one."""
    is_over: bool = False
    """It has ended but for gradients that are missing."""
    extra: set[int] = field(default_factory=set)
    """Gathered beside the plan."""


class GatherSchedule:
    """Walks through passes; see the module's description."""

    def __init__(
        self,
        layers: Sequence[LayerState],
        gatherer: LayerGatherer,
        settings: GatherSettings,
        collectives: ShardCollectives,
        held: Sequence[int],
    ) -> None:
        """
        Args:
            layers: all layers in forward order.
            gatherer: carries gathers out.
            settings: DeepSpeed's keys.
            collectives: the ranks.
            held: layers with weights that no module of their own uses: there in the whole pass.
        """
        self._layers = list(layers)
        self._sizes = [layer.layout.size for layer in layers]
        self._sharded = {s.index for s in layers if s.storage.is_sharded}
        self._held = sorted(set(held) & self._sharded)
        self._gatherer = gatherer
        self._settings = settings
        self._collectives = collectives
        self._traces: dict[PassKind, tuple[int, ...]] = {}
        self._reduces: dict[PassKind, dict[int, tuple[int, ...]]] = {}
        self._turn = 0  # uses before it in the recorded pass "layers"
        self._pass: _Pass | None = None
        self._reducer: Reducer | None = None

    def set_reducer(self, reducer: Reducer) -> None:
        """Gradients are reduced where the plan of a backward says so."""
        self._reducer = reducer

    def largest(self, counts: Sequence[int]) -> list[int]:
        """The largest of each number over the ranks; a collective."""
        return self._collectives.maximum(counts)

    def learn_reduces(
        self,
        order: Sequence[int],
        early: Sequence[bool],
        uses_before: Sequence[int],
        *,
        by_layer: bool,
    ) -> None:
        """The recorded backward has told when gradients are final; a collective.

        Args:
            order: in which all ranks reduce the layers.
            early: for each layer, whether it may be reduced before the backward is over.
            uses_before: for each layer, uses of the pass when its last gradient came.
            by_layer: whether that was the pass of all micro-batches, layer by layer.
        """
        latest = 1
        found: dict[int, tuple[int, ...]] = {}
        # The most of all ranks: nobody has to reduce what it has not got.
        positions = self._collectives.maximum(uses_before)
        for index in order:
            if early[index]:
                latest = max(latest, positions[index])
                found[latest] = (*found.get(latest, ()), index)
        self._reduces["layers" if by_layer else "backward"] = found

    # -- passes --------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a pass is under way."""
        return self._pass is not None and not self._pass.is_over

    @property
    def uses_made(self) -> int:
        """Uses of the pass so far."""
        return 0 if self._pass is None else len(self._pass.uses)

    def begin(self, kind: PassKind) -> None:
        """A pass begins; one that was not ended is given up (it has raised, on all ranks)."""
        if self._pass is not None:
            self.settle()
        operations: Sequence[Operation] | None = None
        if kind in self._traces:
            operations = self._plan(kind)
        else:
            # What an earlier pass has kept for this one is no part of the record.
            self._release(self._gatherer.live)
        self._pass = _Pass(kind, operations)
        for index in self._held:
            self._gather(index)
            self._gatherer.use(self._layers[index])

    def _plan(self, kind: PassKind) -> Sequence[Operation]:
        following = self._traces.get("backward", ()) if kind == "train" else ()
        reduces = self._reduces.get(kind, {})
        trace = PassTrace(self._traces[kind], following, reduces)
        sharded = self._sharded - set(self._held)
        live = self._gatherer.live - set(self._held)
        return plan_pass(trace, self._sizes, sharded, self._settings, live).operations

    def use(self, index: int) -> None:
        """Computation with a layer begins; its weights are there when this returns."""
        current = self._pass
        if current is None:
            self._use_alone(index)
            return
        if current.operations is None and current.turn and index in self._held:
            self._gatherer.use(self._layers[index])  # how often differs from rank to rank
            return
        if index != current.in_use:
            if current.operations is None:
                self._agree(index)
                self._leave_recorded(current)
                self._only(index)
            else:
                self._follow_to(current, index)
            current.uses.append(index)
            current.in_use = index
        if index in self._sharded:
            self._gatherer.use(self._layers[index])

    def begun(self) -> None:
        """The computation is queued: gathers that had to wait for an update may wait now."""
        self._gatherer.start_held()

    def turn(self) -> None:
        """The backward of a pass that is forward and backward in one begins."""
        current = self._pass
        if current is not None and current.operations is None:
            self._agree(_TURN)
            self._turn_recorded(current)

    def _turn_recorded(self, current: _Pass) -> None:
        """Some ranks will go through what lies behind the last block more often than others."""
        current.turn = len(current.uses)
        last = max(layer.index for layer in self._layers if layer.layout.block is not None)
        behind = set(itertools.takewhile(lambda index: index != last, reversed(current.uses)))
        if len(behind) > 1:  # they take turns (tied embeddings): all of them stay
            for index in sorted(behind & self._sharded):
                self._add_held(index)

    def fail(self) -> None:
        """A pass that is being recorded ends here, on all ranks that make it."""
        current = self._pass
        if current is not None and current.operations is None:
            self._agree(_FAILED)

    def end(self) -> None:
        """The pass is over: layers are released, but for what the next one uses at once."""
        current = self._pass
        if current is None:
            return
        if current.operations is None:
            self._agree(_END)
            self._remember(current)
            self._release(self._gatherer.live)
            self._pass = None
            return
        current.is_over = True
        self._end_uses(current)
        if current.at < len(current.operations):
            # A gradient is missing: what follows it is done when the step takes it as it is.
            self._release(self._gatherer.live)
        else:
            self._close(current)
        self._gatherer.start_held()

    def _remember(self, recorded: _Pass) -> None:
        self._traces[recorded.kind] = tuple(recorded.uses)
        if recorded.kind == "layers":
            self._turn = recorded.turn

    def follow(self, kind: PassKind, turned: Callable[[], None] | None = None) -> bool:
        """A pass that other ranks make and this one has no batch for, from begin to end.

        Args:
            kind: of the pass.
            turned: called where its backward begins, if it is forward and backward in one.

        Returns:
            Whether it has come to its end; it may fail on the other ranks while it is recorded.
        """
        self.begin(kind)
        current = self._pass
        assert current is not None
        if current.operations is not None:
            if turned is not None:
                self._force(current, self._turning_point(current.operations))
                self._gatherer.start_held()  # before any reduction, as where layers are used
                turned()
            self._force(current, len(current.operations))
            self._close(current)
            return True
        while True:
            index = self._agree(None)
            if index == _END:
                break
            if index == _FAILED:
                self.give_up()
                return False
            if index == _TURN:
                self._turn_recorded(current)
                if turned is not None:
                    turned()
                continue
            if index >= _HOLD:
                self._add_held(index - _HOLD)
                continue
            self._leave_recorded(current)
            current.uses.append(index)
            current.in_use = index
            self._only(index)
        self._remember(current)
        self.give_up()
        return True

    def _turning_point(self, operations: Sequence[Operation]) -> int:
        """Where the backward of "layers" has begun at the latest: its first use or reduction."""
        uses = 0
        for place, operation in enumerate(operations):
            if operation.action is Action.REDUCE:
                return place
            if operation.action is Action.USE:
                uses += 1
                if uses > self._turn:
                    return place
        return len(operations)

    def finish(self) -> None:
        """Walks the plan to its end: gradients that are missing still are taken as they are.

        Ends a pass whose :meth:`end` had to stop at one of them.
        """
        current = self._pass
        if current is None or current.operations is None:
            return
        self._force(current, len(current.operations))
        self._close(current)

    def _close(self, current: _Pass) -> None:
        self._release(current.extra)
        self._release(self._held)
        self._pass = None

    def settle(self) -> None:
        """Between passes, before something else is gathered: no pass is left half done."""
        if self._pass is not None and self._pass.is_over:
            self.finish()
        self.give_up()

    def give_up(self) -> None:
        """The pass has ended with an exception, or weights are about to change."""
        self._gatherer.release_all()
        self._pass = None

    # -- following -----------------------------------------------------------------------------

    def _follow_to(self, current: _Pass, index: int) -> None:
        operations = current.operations
        assert operations is not None
        wanted = Operation(Action.USE, index)
        place = next(
            (i for i in range(current.at, len(operations)) if operations[i] == wanted), None
        )
        if place is None:
            self._use_extra(current, index)
            return
        self._release(current.extra - {index})
        current.extra.clear()
        self._force(current, place)
        current.at = place + 1
        self._wait_resident(index)
        self._advance(current, index)

    def gradient_final(self) -> None:
        """A layer's gradient is complete: it is reduced if its place has come."""
        current = self._pass
        if current is not None and current.operations is not None:
            self._advance(current)

    def _advance(self, current: _Pass, needed: int | None = None) -> None:
        """Carries out what belongs to the use that this rank has come to.

        Args:
            current: the pass.
            needed: the layer that must be there at once; others are gathered beside it.
        """
        operations = current.operations
        assert operations is not None
        while current.at < len(operations):
            operation = operations[current.at]
            if operation.action is Action.USE or (
                operation.action is Action.END and not current.is_over
            ):
                return
            if operation.action is Action.REDUCE and not self._reduce(operation.layer):
                return
            current.at += 1
            self._carry_out(operation, ahead=operation.layer != needed)

    def _force(self, current: _Pass, end: int) -> None:
        """Carries operations out up to a place, whatever this rank has got of them."""
        operations = current.operations
        assert operations is not None
        while current.at < end:
            operation = operations[current.at]
            current.at += 1
            if operation.action is Action.REDUCE and self._reducer is not None:
                self._reducer.close(operation.layer)
            elif operation.action is Action.USE:
                self._wait_resident(operation.layer)
            else:
                self._carry_out(operation, ahead=True)

    def _end_uses(self, current: _Pass) -> None:
        """Carries out the rest, uses included that this rank has not come to."""
        operations = current.operations
        assert operations is not None
        self._advance(current)
        while current.at < len(operations) and operations[current.at].action is Action.USE:
            self._wait_resident(operations[current.at].layer)
            current.at += 1
            self._advance(current)

    def _reduce(self, index: int) -> bool:
        return self._reducer is None or self._reducer.close_if_final(index)

    def _carry_out(self, operation: Operation, *, ahead: bool) -> None:
        if operation.action is Action.GATHER:
            self._gather(operation.layer, ahead=ahead)
        elif operation.action is Action.RELEASE:
            self._release([operation.layer])

    def _wait_resident(self, index: int) -> None:
        if index not in self._sharded:
            self._gatherer.wait_resident(self._layers[index])

    def _gather(self, index: int, *, ahead: bool = False) -> None:
        layer = self._layers[index]
        if not self._gatherer.is_live(layer):
            self._gatherer.gather(layer, ahead=ahead)

    def _release(self, indices: Sequence[int] | frozenset[int] | set[int]) -> None:
        for index in sorted(indices):
            layer = self._layers[index]
            if self._gatherer.is_live(layer):
                self._gatherer.release(layer)

    # -- recording and beside the plan ---------------------------------------------------------

    def _agree(self, index: int | None) -> int:
        return self._collectives.agree_on_use(index, self._words)

    def _words(self, number: int) -> str:
        """What ranks agree upon, for people."""
        special = {_END: "its end", _TURN: "its backward", _FAILED: "an error"}
        return special.get(number) or f"layer '{self._layers[number % _HOLD].name}'"

    def _leave_recorded(self, current: _Pass) -> None:
        """The first backward keeps no whole gradients either: all that is there is reduced."""
        if self._reducer is not None and current.in_use is not None:
            self._reducer.reduce_so_far(current.in_use)

    def _only(self, index: int) -> None:
        keep = {index, *self._held}
        self._release([i for i in self._gatherer.live if i not in keep])
        if index in self._sharded:
            self._gather(index)
        self._wait_resident(index)

    def knows(self, kind: PassKind) -> bool:
        """Whether a pass of this kind has been recorded."""
        return kind in self._traces

    def hold(self, index: int) -> None:
        """A pass that is being recorded reads a layer that no module's hook has told of.

        From now on the layer is there in the whole of every pass.
        """
        current = self._pass
        if current is None or current.operations is not None or index not in self._sharded:
            return
        if not self._gatherer.is_live(self._layers[index]):
            self._agree(_HOLD + index)
            self._add_held(index)

    def _add_held(self, index: int) -> None:
        self._held = sorted({*self._held, index})
        self._gather(index)
        self._gatherer.use(self._layers[index])

    def _use_extra(self, current: _Pass, index: int) -> None:
        """A use that the record does not have: legal where all ranks make it."""
        if index not in self._sharded or self._gatherer.is_live(self._layers[index]):
            return
        self._agree(index)
        current.extra.add(index)
        self._gather(index)

    def leave(self, index: int) -> None:
        """A module that was called outside of the model's forward has returned."""
        if self._pass is None and index not in self._held:
            self._release([index])

    def _use_alone(self, index: int) -> None:
        """A module is called outside of the model's forward; all ranks must do so."""
        if index in self._sharded and not self._gatherer.is_live(self._layers[index]):
            self._agree(index)
            self._gather(index)
        if index in self._sharded:
            self._gatherer.use(self._layers[index])
