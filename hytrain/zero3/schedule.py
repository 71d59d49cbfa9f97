"""Gathers layers as a pass over the model needs them, ahead of it, in one order on all ranks.

The first pass of a kind (forward with or without gradients, backward) is recorded
(:mod:`hytrain.zero3.recorded_pass`): all ranks agree on every use of any rank, by a small
collective each, and gather the layer when its use comes. Later passes follow a plan made from the
record (:mod:`hytrain.zero3.plan`, :mod:`hytrain.zero3.followed_pass`) without asking the other
ranks: a rank does whatever the plan says up to the use that it has come to, including its part in
gathers of layers that it leaves out itself. A rank without a batch walks through the plan alone.
Layers that all ranks left out of the forward before a recorded backward are in the plan at the
places where they may be used.

In backward the plan also says where a layer's gradient is reduced, because that is a collective
among the gathers. A gradient that is final early waits for its place. One that is still missing at
its place, as a rule, will not come any more (autograd runs first what was recorded last), and is
taken as it is. If it will, because layers are recomputed together more often than in the record,
the plan waits there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakSet

from hytrain.comm.collectives import ShardCollectives
from hytrain.zero3.context import GatherContext, PendingGradients
from hytrain.zero3.followed_pass import FollowedPass
from hytrain.zero3.gatherer import LayerGatherer
from hytrain.zero3.layer_weights import LayerWeights
from hytrain.zero3.plan import GatherSettings, PassTrace, plan_pass, with_left_out
from hytrain.zero3.recorded_pass import RecordedPass

PassKind = Literal["train", "eval", "backward", "inputs", "layer_major"]
"""A forward with or without gradients; a backward that gives gradients to weights, or to none
(``torch.autograd.grad`` of an input, frozen weights); or both forward and backward of all of a
step's micro-batches, layer by layer."""

_DIRECTIONS: dict[PassKind, Literal["forward", "backward", "both"]] = {
    "train": "forward",
    "eval": "forward",
    "backward": "backward",
    "inputs": "backward",
    "layer_major": "both",
}
_Key = tuple[PassKind, int]
"""A kind of pass, and how many forwards a backward goes back through."""


class ForwardMark:
    """A forward with gradients; its graph, and nothing else, keeps it alive."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True)
class _Record:
    """What is known of the passes of a kind."""

    uses: tuple[int, ...]
    turning_point: int = 0
    """Number of uses before the backward of "layer_major"."""
    places: Sequence[int] = ()
    """For each use that was recorded, how many ``uses`` there are before the next one; (): no
    others have been added."""
    reduces: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Number of ``uses`` -> the layers that are reduced after them, once that is known."""

    def place(self, recorded: int) -> int:
        """Number of ``uses`` before the use that comes next after a number of recorded ones."""
        return self.places[recorded - 1] if self.places else recorded


class GatherSchedule:
    """Gathers layers through passes; see the module's description."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        gatherer: LayerGatherer,
        settings: GatherSettings,
        collectives: ShardCollectives,
        held: Sequence[int],
    ) -> None:
        """``held``: layers that no module of their own uses: they are there through every pass."""
        self._context = GatherContext(layers, gatherer, collectives, held)
        # By layer number; the numbers of a large block's further gradients have no layer.
        self._sizes = [0] * (1 + max(layer.index for layer in layers))
        for layer in layers:
            self._sizes[layer.index] = layer.gathered_elements
        self._settings = settings
        self._collectives = collectives
        self._records: dict[_Key, _Record] = {}
        self._key: _Key = ("train", 1)
        self._taught: _Key | None = None  # recorded, but its reductions are not known yet
        self._most_forwards = 0  # that a backward may go back through, the same on all ranks
        self._marks: WeakSet[ForwardMark] = WeakSet()  # those of them that this rank still has
        self._reached: set[ForwardMark] = set()  # by the backward that runs
        self._used_in_backward: set[int] = set()  # by any, on any rank
        self._used_in_forward: set[int] = set()  # by this rank in the last one with gradients
        self._pass: RecordedPass | FollowedPass | None = None
        self._alone: set[int] = set()  # gathered for a module that was called outside of passes

    def reduces(self, gradients: PendingGradients) -> None:
        """Sets the gradients that are reduced at their places in a backward's plan."""
        self._context.gradients = gradients

    def largest(self, counts: Sequence[int]) -> list[int]:
        """Returns the largest of each number over the ranks; a collective."""
        return self._collectives.maximum(counts)

    def learn_reduces(
        self,
        order: Sequence[int],
        early: Sequence[bool],
        uses_before: Sequence[int],
    ) -> None:
        """Learns from the recorded backward when gradients are final; a collective.

        Args:
            order: the order in which all ranks reduce the layers.
            early: for each layer, whether it may be reduced before the backward is over.
            uses_before: for each layer, uses made when its last gradient came; 0: none has come.
        """
        # The largest over the ranks: no rank has to reduce a gradient before it is there.
        positions = self._collectives.maximum(uses_before)
        record = None if self._taught is None else self._records.get(self._taught)
        self._taught = None
        if record is None:
            return
        latest = 1
        found: dict[int, tuple[int, ...]] = {}
        for index in order:
            if early[index]:
                # 0 for a layer that is frozen now: without waiting for its last use, its update
                # could overwrite the weights that this backward still goes through.
                own = positions[index] and record.place(positions[index])
                latest = max(latest, own or self._last_use(record.uses, index))
                found[latest] = (*found.get(latest, ()), index)
        record.reduces = found

    def _last_use(self, uses: Sequence[int], gradient: int) -> int:
        """How many uses there are up to the last one of the layer with this gradient."""
        trained = self._context.trained.items()
        own = {layer for layer, gradients in trained if gradient in gradients}
        return max(
            (place for place, layer in enumerate(uses, 1) if layer in own), default=len(uses)
        )

    @property
    def wants_reduces(self) -> bool:
        """Whether a recorded backward still waits for :meth:`learn_reduces`."""
        return self._taught is not None

    # -- passes --------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether a pass is under way."""
        return self._pass is not None and not self._pass.is_over

    @property
    def uses_made(self) -> int:
        """Uses of the pass so far."""
        return 0 if self._pass is None else len(self._pass.uses)

    def knows(self, kind: PassKind) -> bool:
        """Whether a pass of this kind has been recorded."""
        return (kind, 1) in self._records

    def begin(self, kind: PassKind) -> RecordedPass | FollowedPass:
        """Begins a pass; one that was not ended is given up (it has raised, on all ranks)."""
        if self._pass is not None:
            self.settle()
        self._alone.clear()
        self._reached.clear()
        if kind == "train":
            self._used_in_forward.clear()
        context = self._context
        key: _Key = (kind, self._count_forwards() if kind == "backward" else 1)
        once: _Key = (kind, 1)
        known = key if key in self._records else once if once in self._records else None
        if known is not None:
            begun = self._plan(known, repeats=key[1] // known[1])
        else:
            # What an earlier pass has kept for this one is no part of the record.
            context.release(context.gatherer.live)
            begun = RecordedPass(context, self._forward_uses(key), _DIRECTIONS[kind])
        self._key, self._pass = key, begun
        # Layers that the plan does not use are waited for here, in one place on all ranks: each of
        # these waits may be a collective.
        context.wait_beside(() if known is None else self._records[known].uses)
        for index in context.held:
            context.keep(index)
        return begun

    def _count_forwards(self) -> int:
        """How many forwards the new backward goes back through, at most; may be a collective.

        One loss of two forwards goes back through both, and gradients are complete at the end
        only. Two losses that are run back one after the other do not. Which case it is cannot be
        seen here; whether a forward's graph is gone, or has been run back, can.
        """
        if self._most_forwards <= 1:
            return 1
        self._most_forwards = max(1, *self._collectives.maximum([len(self._marks)]))
        return self._most_forwards

    def _forward_uses(self, key: _Key) -> tuple[int, ...]:
        """The uses of the forward that a first backward runs back; () if there may be others."""
        forward = self._records.get(("train", 1)) if key == ("backward", 1) else None
        return () if forward is None else forward.uses

    def _plan(self, key: _Key, repeats: int) -> FollowedPass:
        """Plans a pass that goes ``repeats`` times through what the record of ``key`` does."""
        record = self._records[key]
        later = (repeats - 1) * len(record.uses)  # gradients come from all of them
        following = self._records.get(("backward", 1)) if key[0] == "train" else None
        trace = PassTrace(
            record.uses * repeats,
            () if following is None else following.uses,
            {later + place: layers for place, layers in record.reduces.items()},
        )
        context = self._context
        held = set(context.held)
        live = context.gatherer.live - held
        operations = plan_pass(trace, self._sizes, context.sharded - held, self._settings, live)
        if key[0] in ("backward", "layer_major"):
            return FollowedPass(context, operations, layer_major=key[0] == "layer_major")
        rest = RecordedPass(context, (), _DIRECTIONS[key[0]])
        may_come = context.sharded - set(record.uses) - held
        return FollowedPass(context, operations, rest, asks=bool(may_come))

    def mark_forward(self) -> ForwardMark:
        """Returns a mark for what a forward with gradients has computed; its graph must keep it."""
        mark = ForwardMark()
        self._marks.add(mark)
        return mark

    def reach(self, mark: ForwardMark, *, keeps_graph: bool) -> None:
        """Notes that the running backward has come to what a forward has computed."""
        self._reached.add(mark)
        if not keeps_graph:
            self._marks.discard(mark)

    def use(self, index: int) -> None:
        """Begins computation with a layer; its weights are there when this returns."""
        if self._pass is None:
            self._use_alone(index)
            return
        if self._key[0] == "train":
            self._used_in_forward.add(index)
        self._pass.use(index)

    def begun(self) -> None:
        """Starts gathers that were held back: the computation is queued, so they may block now."""
        self._context.gatherer.start_held()

    def gradient_final(self) -> None:
        """Notes that a layer's gradient is complete: it is reduced if its place has come."""
        if isinstance(self._pass, FollowedPass):
            self._pass.gradient_final()

    def turn(self) -> None:
        """Begins the backward of a pass that is forward and backward in one."""
        if isinstance(self._pass, RecordedPass):
            self._pass.turn()

    def fail(self) -> None:
        """Ends a pass that is being recorded with an error, on all ranks that make it."""
        if isinstance(self._pass, RecordedPass):
            self._pass.fail()

    def is_held(self, index: int) -> bool:
        """Whether a layer stays gathered through every pass."""
        return index in self._context.held

    def hold(self, index: int) -> None:
        """Keeps a layer gathered through this and every later pass; a collective.

        The pass reads the layer outside of its module, where no hook fires.
        """
        assert self._pass is not None
        self._pass.hold(index)

    def hold_all(self) -> bool:
        """Keeps all layers gathered through every pass from now on; whether any were not."""
        missing = self._context.sharded - set(self._context.held)
        for index in sorted(missing):
            self._context.hold(index)
        return bool(missing)

    def end(self) -> None:
        """Ends the pass: layers are released, except those that the next pass uses at once."""
        current, context = self._pass, self._context
        if current is None:
            return
        current.end()
        self._count_pass()
        if isinstance(current, RecordedPass):
            self._remember(current)
            context.release(context.gatherer.live)
            self._pass = None
            return
        if current.is_done:
            self._close(current)
        else:
            # A gradient is missing: what follows it is done when the step takes it as it is.
            context.release(context.gatherer.live)
            context.gatherer.start_held()

    def _count_pass(self) -> None:
        # At its end: a forward that has failed has no backward.
        kind, _ = self._key
        if kind == "train":
            self._most_forwards += 1
        elif kind == "backward":  # it goes back through one at least
            self._most_forwards = max(0, self._most_forwards - 1)

    def _remember(self, recorded: RecordedPass) -> None:
        kind, number = self._key
        if number > 1:  # at most; a collective
            number = max(1, *self._collectives.maximum([len(self._reached)]))
        key: _Key = (kind, number)
        uses, places = tuple(recorded.uses), []
        if kind == "backward" and (left_out := self._left_out(uses)):
            uses, places = with_left_out(uses, self._records["train", 1].uses, left_out)
        self._records[key] = _Record(uses, recorded.turning_point, places)
        if kind in ("backward", "layer_major"):
            self._taught = key
        if kind == "backward":
            self._forget_partial(set(recorded.uses))
        elif kind == "train":
            # They followed another forward, or an unknown one: what did that leave out?
            self._forget_backwards(lambda _uses: True)

    def _left_out(self, uses: Collection[int]) -> set[int]:
        """Layers of the recorded forward that no rank used before a backward; may be a collective.

        That the backward has not come to them says nothing about later ones.
        """
        forward = self._records.get(("train", 1))
        others = sorted(set(forward.uses) - set(uses)) if forward is not None else []
        if not others:
            return set()
        used = self._collectives.maximum([int(x in self._used_in_forward) for x in others])
        left_out = {layer for layer, flag in zip(others, used, strict=True) if not flag}
        return left_out - self._used_in_backward  # those were recorded, and will be again

    def _forget_partial(self, uses: set[int]) -> None:
        """Has backward passes recorded anew until a record uses what any of them has used.

        A rank that comes to a layer that the plan lacks cannot tell the others: unlike a forward's,
        the rest of a backward's plan has reductions, of gradients that are still to come.
        """
        self._used_in_backward |= uses
        self._forget_backwards(lambda uses: not self._used_in_backward <= set(uses))

    def _forget_backwards(self, which: Callable[[Sequence[int]], bool]) -> None:
        for key, record in list(self._records.items()):
            if key[0] == "backward" and which(record.uses):
                del self._records[key]

    def follow(self, kind: PassKind, turned: Callable[[], None] | None = None) -> bool:
        """Takes part in a whole pass that other ranks make and for which this one has no batch.

        ``turned`` is called where its backward begins, if it is forward and backward in one.
        Returns whether it has come to its end; it may fail on other ranks while it is recorded.
        """
        current = self.begin(kind)
        if isinstance(current, FollowedPass):
            current.join(turned, self._records[kind, 1].turning_point if turned else 0)
            self._count_pass()
            self._close(current)
            return True
        is_whole = current.join(turned)
        if is_whole:
            self._count_pass()
            self._remember(current)
        self.give_up()
        return is_whole

    def finish(self) -> None:
        """Walks the plan to its end: gradients that are still missing are taken as they are.

        Ends a pass whose :meth:`end` had to stop at one of them.
        """
        if isinstance(self._pass, FollowedPass):
            self._pass.finish()
            self._close(self._pass)

    def _close(self, current: FollowedPass) -> None:
        """Closes a pass whose plan is done; starts gathers for the next one that were held back.

        Every way out of a pass starts them here: a rank that follows alone comes to none of the
        uses that start them elsewhere, and the other ranks wait for it in these gathers.
        """
        current.release()
        self._pass = None
        if current.has_more:
            # All ranks have seen it: passes like this one, and its backward, are recorded anew.
            self._records.clear()
        elif current.agreed and self._key[0] == "backward":
            # Or the next one would have to use them at one place on all ranks again.
            self._forget_partial(current.agreed)
        self._context.gatherer.start_held()

    def settle(self) -> None:
        """Leaves no pass half done, before something else is gathered between passes."""
        if self._pass is not None and self._pass.is_over:
            self.finish()
        self.give_up()

    def give_up(self) -> None:
        """Gives up the pass, which has ended with an exception."""
        self._context.gatherer.release_all()
        self._pass = None

    def forget(self) -> None:
        """Forgets all forwards: weights are about to change, or a step is given up."""
        self.give_up()
        self._most_forwards = 0
        self._marks.clear()

    # -- beside passes -------------------------------------------------------------------------

    def _use_alone(self, index: int) -> None:
        """Uses a layer of a module called outside of the model's forward; all ranks must do so."""
        context = self._context
        context.wait_resident(index)
        if index not in context.sharded:
            return
        if not context.is_live(index):
            context.agree(index)
            context.gather(index)
            self._alone.add(index)
        context.use(index)

    def leave(self, index: int) -> None:
        """Releases a layer when its module, called outside of the model's forward, has returned.

        A layer that was gathered explicitly before stays.
        """
        if index in self._alone:
            self._alone.discard(index)
            if self._pass is None:
                self._context.release([index])
