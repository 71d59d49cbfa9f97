"""Takes gradients over from autograd and knows when a layer's gradient is final.

A parameter's hook may fire more than once in a backward (weights shared by checkpointed segments,
tiled losses). The first backward counts firings; later a gradient is final at its recorded count.
DeepSpeed's tiles say which firing is the last of a use, and count as one, however many they are.
Layers with a parameter that got no gradient then are never sent early: "not yet" and "not this
time" cannot be told apart. Where more comes than was counted, one rank takes the layer back, and
counts that many from then on.

The first backward itself cannot know. With one rank it takes each parameter's first firing for its
last, so that gradients leave the GPU as they will later, and takes a layer back where that proves
wrong: the pipeline overwrites no weights of a step that is sent this way before its end. Updates
that are committed as gradients come cannot be taken back: there it does so only where the device
does not hold all gradients to the end, and a layer that proves wrong is an error. Several ranks
send nothing early then: they have not agreed on an order. Under ZeRO-3 they agree on every use of a
layer, and where the device does not hold all gradients to the end, a layer that backward goes on
from is taken for complete (:mod:`hytrain.zero3.recorded_pass`).

Gradients of a backward that runs within the model's forward are the first of the next backward.

Layer by layer, all micro-batches of a step are one backward, and a parameter fires for each of
them; how often is learned for this mode by itself, and what one micro-batch fired counts. The
order and who may go early are the same in both modes: ranks may differ in theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hytrain.comm.collectives import ShardCollectives
from hytrain.errors import GradientOrderError
from hytrain.kernels.gradient_copy import GradientCopier
from hytrain.optimizer.autograd_task import is_limited, will_run
from hytrain.optimizer.layer_gradient import (
    ON_SEVERAL_RANKS,
    WHERE_COMMITTED,
    FiringRecord,
    LayerGradient,
    Progress,
    Zeros,
)
from hytrain.optimizer.layer_hooks import IS_READY, Hook, LayerHooks, with_gradient
from hytrain.optimizer.step_state import StepPhase, StepState
from hytrain.zero3.schedule import GatherSchedule

_JOINED = 6 << 20
"""Elements. In layers whose parameters have fewer, on average, all gradients are joined by torch:
host time matters more there than reading the gradients once more for their norm."""
_TOGETHER = 16 << 20
"""Likewise: with fewer all gradients are taken over in one launch, when the last one has come.

So in models up to some 5 B, which one GPU of 80 GB can update: there short batches are bound by
launches. In larger layers those cost little, and gradients that wait are twice in memory."""


class Reducer(Protocol):
    """Who takes layers' final gradients: :class:`~hytrain.optimizer.reduction.GradientReducer`."""

    def consume(self, gradient: LayerGradient) -> None: ...
    def consume_part(self, gradient: LayerGradient) -> None: ...
    def withdraw_gradient(self, gradient: LayerGradient) -> None: ...
    @property
    def lacks_room(self) -> bool: ...


@dataclass(slots=True)
class _Arrivals:
    """What of the current backward's gradients has come.

    Attributes:
        firings_before: gradients that had come before it, on this rank.
        assume_single_use: parameters' first gradients are taken for their last.
        next: position in the record's order.
        has_parts: parts of gradients have been reduced.
        has_grown: a layer was taken back: more came than expected.
    """

    firings_before: int = 0
    assume_single_use: bool = False
    next: int = 0
    has_parts: bool = False
    has_grown: bool = False


class GradientCollector:
    """Hooks on every trained parameter; calls back once a layer's gradient is final.

    The reducer is called in one order on all ranks, each layer once a backward; without
    ``collectives`` there is one. Where ``direct``, updates are committed as gradients come, and
    cannot be withdrawn. ``begin_backward`` is called at the first gradient of a backward that was
    not announced; where it returns False, autograd keeps the gradient until the next backward.
    """

    def __init__(
        self,
        gradients: list[LayerGradient],
        device: torch.device,
        step: StepState,
        reducer: Reducer,
        begin_backward: Callable[[], bool],
        *,
        collectives: ShardCollectives | None,
        direct: bool,
    ) -> None:
        self.layers = gradients
        self._step = step
        self._reducer = reducer
        self._begin_backward = begin_backward
        self._collectives = collectives
        # With other ranks, all of them learn at the same time.
        self._is_shared = collectives is not None and collectives.world_size > 1
        self._direct = direct
        self._can_withdraw = not self._is_shared and not direct
        """The first backward may consume layers too early: it can take them back.

        With other ranks, these would have to take the same ones back.
        """
        for layer in self.layers:
            places = [(slot.offset, slot.numel) for slot in layer.layout.slots]
            total = sum(numel for _, numel in places)
            layer.together = len(places) > 1 and total < _TOGETHER * len(places)
            is_joined = layer.together and total < _JOINED * len(places)
            if self._can_withdraw and not is_joined:
                # Elsewhere the reduced gradient's squares are wanted.
                layer.copier = GradientCopier(places, device)
        self._device = device
        most = max((layer.layout.size for layer in gradients), default=0)
        self.zeros = Zeros(most, device, is_reduced=self._is_shared)
        """For gradients of layers that got none."""
        self.record: FiringRecord | None = None
        """None: nothing has come yet, or what was learned did not hold."""
        self.reduce_schedule: GatherSchedule | None = None
        """Layers are consumed when it says so; else as soon as they are complete, in order."""
        self._now = _Arrivals()
        self._has_kept = False  # a backward within a forward has left gradients with autograd
        self.num_firings = 0
        """Grows with every gradient that autograd has given to a hook."""
        self._hooks = [LayerHooks(layer, self._hook) for layer in self.layers]
        self._parameters = [p for hooks in self._hooks for p in hooks.parameters]
        self._may_use_single_hooks = not self._is_shared
        """Layers may get one hook each, when the next backward has ended.

        With other ranks layers are consumed as the schedule that all follow has it, whichever of
        their gradients this rank has by then: each must have been taken.
        """

    @property
    def has_fired(self) -> bool:
        """Whether autograd has given a hook a gradient of this backward."""
        return self.num_firings > self._now.firings_before

    def remove_hooks(self) -> None:
        """Detaches from the model."""
        for hooks in self._hooks:
            hooks.remove()
        self._hooks.clear()  # each refers to this object

    def renew_hooks(self) -> None:
        """Parameters are in other memory: autograd may have new nodes that add up gradients."""
        for hooks in self._hooks:
            hooks.hook_each()

    @property
    def may_come(self) -> bool:
        """Whether the graph that is running may bring a trained parameter a gradient.

        Where it comes to none of them it still may if one wants a gradient: parts of the model
        that were run without a graph (reentrant checkpointing) run one of their own.
        """
        accumulators = (node for hooks in self._hooks for node in hooks.accumulators)
        if any(will_run(node) for node in accumulators):
            return True
        return not is_limited() and any(p.requires_grad for p in self._parameters)

    # -- one backward --------------------------------------------------------------------------

    def knows(self, *, layer_major: bool) -> bool:
        """Whether a backward of this mode has taught how often each parameter fires."""
        return self.record is not None and layer_major in self.record.expected

    def may_be_early(self, *, layer_major: bool) -> bool:
        """Whether the next backward of this kind may consume layers that it must take back."""
        return self._can_withdraw and not self.knows(layer_major=layer_major)

    def scale(self, unreduced: float, reduced: float) -> None:
        """Multiplies what is kept for the next step: this rank's own, and what was reduced."""
        for layer in self.layers:
            layer.flush()
            for kept, factor in ((layer.unreduced_grad, unreduced), (layer.reduced_shard, reduced)):
                if kept is not None:
                    kept.mul_(factor)
            layer.copied_whole = False  # its squares are no longer known

    def begin(self) -> None:
        """A backward has begun (:meth:`StepState.begin_backward`)."""
        backward, record = self._step.backward, self.record
        early, layer_major = backward.reduces, backward.layer_major
        if layer_major:
            self._drop_single_hooks()  # their parameters have a gradient for each micro-batch
        now = self._now = _Arrivals(self.num_firings)
        expected = None if record is None else record.expected.get(layer_major)
        is_first = early and expected is None and (layer_major or record is None)
        # Several ranks have to agree: see reduce_so_far().
        must_send = is_first and not self._is_shared and self.lacks_room
        now.assume_single_use = (is_first and self._can_withdraw) or must_send
        for index, layer in enumerate(self.layers):
            layer.fired = [0] * len(layer.fired)
            layer.last_firing = 0
            layer.uses_before = 0
            layer.progress = Progress.COMING
            layer.remaining = -1
            if not early:
                continue
            if record is not None and expected is not None and record.early[index]:
                if all(expected[index]):
                    layer.remaining = sum(expected[index]) * backward.micro_batches
            elif now.assume_single_use and not layer_major:
                layer.remaining = len(layer.fired)

    def layer_done(self, index: int) -> None:
        """All micro-batches are back at a layer: its gradient looks complete.

        Counts tell it anyhow, but where none have been learned.
        """
        layer = self.layers[index]
        is_reduced = layer.progress is Progress.REDUCED
        if self._now.assume_single_use and not is_reduced and all(layer.fired):
            self._close(layer)

    def _hook(self, layer: LayerGradient, index: int) -> Hook:
        # It runs for every parameter of every micro-batch: where those are small, what it takes
        # the host is what they take. So all of the usual case is here, and calls little.
        number, last = layer.layout.index, len(layer.layout.slots) - 1
        # Python does not see what autograd's nodes refer to: a cycle through one is never freed.
        owner, step = weakref.ref(self), self._step

        def hook(_inputs: object, _outputs: object) -> None:
            collector = owner()
            if collector is None:
                return
            layer = collector.layers[number]
            parameter = layer.layout.slots[index].parameter
            gradient = parameter.grad
            if gradient is None:
                return
            if step.phase is not StepPhase.BACKWARD and not collector._begin_backward():
                collector._has_kept = True
                return
            if layer.progress is not Progress.COMING:
                collector._take_more(layer, index)
            waiting = layer.waiting
            if torch.is_grad_enabled():  # create_graph
                with torch.no_grad():
                    layer.take(index, gradient, collector._device)
            elif (
                layer.together
                and len(waiting) < last
                and index not in waiting
                and not gradient.is_sparse
            ):
                waiting[index] = gradient
            else:
                layer.take(index, gradient, collector._device)
            # Dropped at once: zero_grad() or a second backward could write to a tensor that stays
            # there, and autograd would add the next micro-batch to it. The copy is queued on the
            # stream that made the gradient, so its memory is reused after the copy only.
            parameter.grad = None
            if not vars(parameter).get(IS_READY, True):
                return
            layer.fired[index] += 1
            layer.last_index = index
            layer.last_firing = collector.num_firings = collector.num_firings + 1
            if collector.reduce_schedule is not None:
                layer.uses_before = collector.reduce_schedule.uses_made
            if collector.record is None and layer.fired[index] > 1:
                layer.remaining = -1  # once more than once: not before the end of this backward
            layer.remaining -= 1
            if layer.remaining == 0:
                collector._finish(layer)

        return hook

    def _single_hook(self, hooks: LayerHooks) -> Hook:
        """The one hook of a layer, called when its last gradient has come."""
        last, count = hooks.layer.last_index, len(hooks.layer.layout.slots)
        owner, of_layer = weakref.ref(self), weakref.ref(hooks)  # as in _hook
        step = self._step

        def hook(_inputs: object, _outputs: object) -> None:
            collector, hooks = owner(), of_layer()
            if collector is None or hooks is None:
                return
            layer = hooks.layer
            if step.phase is not StepPhase.BACKWARD:
                if not collector._begin_backward():
                    collector._has_kept = True
                    return
                # The next backward is to be noticed at its first gradient.
                collector._drop_single_hooks()
                return
            if not vars(hooks.parameters[last]).get(IS_READY, True):
                return  # autograd adds up
            if layer.progress is not Progress.COMING:
                collector._take_more(layer, last)
            gradients = hooks.take()
            whole = [g for g in gradients if g is not None and not g.is_sparse]
            if len(whole) < count:
                hooks.drop_single_hook()
                collector._take_some(layer, gradients)
                return
            layer.take_all(whole)
            layer.fired = [1] * count
            layer.last_firing = collector.num_firings = collector.num_firings + count
            layer.remaining -= count
            if layer.remaining == 0:
                collector._finish(layer)

        return hook

    def _use_single_hooks(self) -> None:
        """Layers whose parameters get one gradient each have one hook from now on."""
        self._may_use_single_hooks = False
        for hooks in self._hooks:
            hooks.use_single_hook(self._single_hook(hooks))

    def _drop_single_hooks(self) -> None:
        self._may_use_single_hooks = False
        for hooks in self._hooks:
            if hooks.has_single_hook:
                gradients = hooks.take()
                hooks.drop_single_hook()
                self._take_some(hooks.layer, gradients)

    def _take_some(self, layer: LayerGradient, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients that autograd has kept of a layer; others may come."""
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            with torch.no_grad():
                layer.take(index, gradient, self._device)
            layer.fired[index] += 1
            layer.last_firing = self.num_firings = self.num_firings + 1
            layer.remaining -= 1
            if layer.remaining == 0:
                self._finish(layer)

    def take_kept(self) -> None:
        """A backward has begun: takes what one within its forward has left, as its first."""
        if self._has_kept:
            self._has_kept = False
            for hooks in self._hooks:
                self._take_some(hooks.layer, hooks.take())

    def take_left(self) -> None:
        """Autograd has finished: takes gradients that no hook has told of.

        Those of layers whose last one was not what it was, and of parameters whose memory somebody
        has changed since the hooks were put on.

        Raises:
            GradientOrderError: one has come after its layer's last.
        """
        if not self._step.in_backward or not with_gradient(self._parameters):
            return  # as a rule
        for hooks in self._hooks:
            left = hooks.left()
            if not left:
                continue
            layer = hooks.layer
            if layer.progress is not Progress.COMING:
                self._take_more(layer, left[0])
            gradients = hooks.take()
            hooks.drop_single_hook()
            hooks.hook_each()
            self._take_some(layer, gradients)

    @property
    def has_left(self) -> bool:
        """Whether autograd keeps gradients that no hook has told of."""
        return any(hooks.left() for hooks in self._hooks)

    def _finish(self, layer: LayerGradient) -> None:
        """A layer has its last gradient, and is consumed with it."""
        layer.progress = Progress.COMPLETE
        if self.record is None:
            self._close(layer)
        else:
            self._advance()

    def _take_more(self, layer: LayerGradient, index: int) -> None:
        """A parameter gets a gradient after its layer was taken for complete."""
        if layer.progress is Progress.REDUCED and not self._can_withdraw:
            backward, usual = self._step.backward, 0
            if self.record is not None and backward.layer_major in self.record.expected:
                of_one = self.record.expected[backward.layer_major][layer.layout.index][index]
                usual = of_one * backward.micro_batches
            self._refuse_more(
                layer,
                f"parameter '{layer.layout.slots[index].name}' received gradient number "
                f"{layer.fired[index] + 1} of this backward, and the usual number is {usual}",
            )
        self._withdraw(layer)

    def _withdraw(self, layer: LayerGradient) -> None:
        """The layer was taken for complete, and it was not: it waits for the end of backward."""
        self._reducer.withdraw_gradient(layer)
        layer.progress = Progress.COMING
        layer.remaining = -1
        self._now.has_grown = True

    def take_back(self, index: int) -> None:
        """Weights of a layer whose gradient was consumed are used again in this backward.

        Where they are recomputed with, more of the gradient will come.

        Raises:
            GradientOrderError: it cannot be taken back.
        """
        layer = self.layers[index]
        if not self._can_withdraw:
            self._refuse_more(
                layer, "its weights are used after the layer has got its last gradient"
            )
        self._withdraw(layer)

    def _refuse_more(self, layer: LayerGradient, seen: str) -> None:
        if not self.knows(layer_major=self._step.backward.layer_major):
            seen += (
                ": each of its parameters had got one in this first backward, and the GPU's memory "
                "does not hold all gradients to the end of it. With a smaller micro-batch or "
                "activation checkpointing it may, and with clipping or an overflow check one rank "
                "takes such an update back"
            )
        elif not self._is_shared:  # the other ranks would not join in the agreement on an order
            # What was learned does not hold for this model any more: learn again.
            self.record = None
            for hooks in self._hooks:
                hooks.drop_single_hook()
        raise GradientOrderError(
            f"the update of layer '{layer.layout.name}' has begun in a backward that goes on with "
            f"it: {seen}. {ON_SEVERAL_RANKS if self._is_shared else WHERE_COMMITTED}"
        )

    def _advance(self) -> None:
        """Consumes, in the agreed order, what is final."""
        if self.reduce_schedule is not None:
            self.reduce_schedule.gradient_final()
            return
        record = self.record
        assert record is not None
        now = self._now
        while now.next < len(record.order):
            index = record.order[now.next]
            layer = self.layers[index]
            if not record.early[index]:
                now.next += 1  # complete() takes it
                continue
            if layer.progress is Progress.COMING:
                return  # layers behind it wait: reductions must have one order on all ranks
            now.next += 1
            self._close(layer)

    def close_if_final(self, index: int) -> bool:
        """Consumes a layer's gradient if it is complete; whether it has been consumed."""
        if not self._step.is_open:
            return False  # in the forward of a pass that goes on to backward; marks are old ones
        layer = self.layers[index]
        if layer.progress is Progress.COMPLETE:
            self._close(layer)
        return layer.progress is Progress.REDUCED

    def close(self, index: int) -> None:
        """Consumes what there is of a layer's gradient, unless it has been consumed."""
        if self.layers[index].progress is not Progress.REDUCED:
            self._close(self.layers[index])

    @property
    def lacks_room(self) -> bool:
        """Whether gradients that stay to the end of this backward take memory that it needs.

        A first step layer by layer is a trial, which committed updates would not let begin anew.
        """
        backward = self._step.backward
        is_trial = backward.layer_major and self._direct
        is_early = self._step.in_backward and backward.reduces
        return is_early and not is_trial and self._reducer.lacks_room

    def has_all(self, index: int) -> bool:
        """Whether each of a layer's parameters has got a gradient of this backward."""
        return all(self.layers[index].fired)

    def reduce_so_far(self, index: int, *, is_all: bool) -> None:
        """The first backward goes on from a layer: what there is of its gradient is reduced.

        On all ranks, whether they have anything or not. It is consumed if that ``is_all``; else it
        stays in ``reduced_shard``, and what comes later is added.
        """
        layer = self.layers[index]
        if not self._step.in_backward or not self._step.backward.reduces:
            return
        if layer.progress is Progress.REDUCED:
            return
        if is_all:
            self._close(layer)
            return
        self._now.has_parts = True
        layer.fill(self.zeros)
        self._reducer.consume_part(layer)

    def own_gradient(self, index: int) -> torch.Tensor:
        """This rank's shard of a layer's gradient so far, to be written into before step().

        A collective, between two backward passes. What comes later is added.
        """
        layer = self.layers[index]
        if layer.progress is not Progress.REDUCED:
            layer.fill(self.zeros)
            self._reducer.consume_part(layer)
            self.zeros.forget()  # or they would stay through the next backward
        assert layer.reduced_shard is not None
        return layer.reduced_shard

    def _close(self, layer: LayerGradient) -> None:
        layer.fill(self.zeros)
        layer.progress = Progress.REDUCED
        self._reducer.consume(layer)  # GradientReducer: reduces, then UpdatePipeline.send

    def unused(self) -> list[str]:
        """Names of trained parameters that got no gradient in the last backward on this rank.

        None where it has no samples of a global batch: the other ranks' gradients are the batch's.
        """
        if self._step.sums_over_ranks and not self.has_fired:
            return []
        return [
            slot.name
            for layer in self.layers
            for slot, count in zip(layer.layout.slots, layer.fired, strict=True)
            if not count
        ]

    def end_graph(self) -> None:
        """The backward is over; more gradients belong to another one."""
        if not self._step.in_backward:
            return
        self._step.end_backward()
        for layer in self.layers:
            if layer.waiting:
                # A layer with unused parameters still waits for theirs. A CUDA graph of the model's
                # would write the next forward over the gradients that it has returned.
                layer.flush()

    def complete(self, *, consume: bool) -> None:
        """The backward is over: what it left incomplete is taken as it is, and the rest consumed.

        Or it stays in ``unreduced_grad``, for the next micro-batch to add to.
        """
        self.take_left()
        self.end_graph()
        if not self._step.is_open:
            return
        self._step.complete()
        layer_major = self._step.backward.layer_major
        is_new = not self.knows(layer_major=layer_major)
        if self._is_shared or self.has_fired:  # else nothing came, and nothing is learned
            self._learn(layer_major, is_new=is_new)
        if self._may_use_single_hooks and not is_new and self.has_fired and not layer_major:
            self._use_single_hooks()
        if consume:
            self._consume_rest()

    def _consume_rest(self) -> None:
        if self.reduce_schedule is not None:
            self.reduce_schedule.finish()
        order, record = list(range(len(self.layers))), self.record
        if record is not None:
            early = [i for i in record.order if record.early[i]]
            order = [*early, *(i for i in record.order if not record.early[i])]
        whole = self._wholly_reduced()
        for index in order:
            layer = self.layers[index]
            if layer.progress is Progress.REDUCED:
                continue
            if index in whole:
                layer.progress = Progress.REDUCED
                self._reducer.consume(layer)
            else:
                self._close(layer)
        self.zeros.forget()

    def _wholly_reduced(self) -> set[int]:
        """Layers of which no rank has anything that has not been reduced; may be a collective."""
        if not self._now.has_parts or self.reduce_schedule is None:
            return set()
        missing = [
            layer.unreduced_grad is not None or layer.reduced_shard is None for layer in self.layers
        ]
        found = self.reduce_schedule.largest([int(flag) for flag in missing])
        return {index for index, flag in enumerate(found) if not flag}

    def _learn(self, layer_major: bool, *, is_new: bool) -> None:
        """What a backward teaches; a collective if it is the first of its mode."""
        if self.record is None:
            self.record = self._agree_on_order()
        record, schedule = self.record, self.reduce_schedule
        if record is None:
            return  # no rank has seen a gradient
        if is_new or self._now.has_grown:
            fired = [self._for_each(layer.fired) for layer in self.layers]
            before = record.expected.get(layer_major, fired)
            record.expected[layer_major] = [
                [max(pair) for pair in zip(old, new, strict=True)]
                for old, new in zip(before, fired, strict=True)
            ]
        if schedule is None or not (is_new or schedule.wants_reduces):
            return
        if is_new:
            # A rank without a batch now may have one in this step still.
            expected = record.expected[layer_major]
            counts = iter(schedule.largest([count for fired in expected for count in fired]))
            record.expected[layer_major] = [[next(counts) for _ in fired] for fired in expected]
        uses_before = [layer.uses_before for layer in self.layers]
        schedule.learn_reduces(record.order, record.early, uses_before)

    def _agree_on_order(self) -> FiringRecord | None:
        """A collective; None where no rank has seen a gradient."""
        order = sorted(range(len(self.layers)), key=lambda i: self.layers[i].last_firing)
        early = [all(count > 0 for count in layer.fired) for layer in self.layers]
        if self._collectives is None:
            return FiringRecord(order, early)
        agreed = self._collectives.agree_on_order(order, early, has_seen=self.has_fired)
        return None if agreed is None else FiringRecord(*agreed)

    def _for_each(self, fired: list[int]) -> list[int]:
        """What one micro-batch fired; 0, as for a parameter that is not used, where they differ."""
        times = self._step.backward.micro_batches
        return [0 if count % times else count // times for count in fired]

    def discard(self) -> None:
        """Forgets every gradient that has not been consumed."""
        self.zeros.forget()
        for hooks in self._hooks:
            if hooks.left():
                hooks.take()  # an aborted backward's: autograd would add the next one's to them
        for layer in self.layers:
            layer.release()
            layer.reduced_shard = None
            layer.progress = Progress.COMING
