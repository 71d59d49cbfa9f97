"""Takes gradients over from autograd and knows when a layer's gradient is final.

A parameter's hook may fire more than once in a backward (weights shared by checkpointed segments,
tiled losses). The first backward counts firings; later a gradient is final at its recorded count.
DeepSpeed's tiles say which firing is the last of a use, and count as one, however many they are.
Layers with a parameter that got no gradient then are never sent early: "not yet" and "not this
time" cannot be told apart. If a parameter fires more often than was counted, its layer is taken
back, and the larger count holds from then on; if the layer has been reduced already, this is an
error with several ranks, or if updates are committed as gradients come.

The first backward has no counts yet. With one rank it takes each parameter's first firing for its
last, so that gradients leave the GPU as they will later, and takes a layer back if that proves
wrong: the pipeline overwrites no weights before the end of a step that is sent this way. Updates
that are committed as gradients come cannot be taken back: then the first backward does this only if
the device cannot hold all gradients to the end, and a layer that proves wrong is an error. Several
ranks send nothing early in the first backward: they have not agreed on an order. Under ZeRO-3 they
agree on every use of a layer; if the device cannot hold all gradients to the end, a layer is taken
for complete when backward goes on from it (:mod:`hytrain.zero3.recorded_pass`).

Gradients of a backward that runs within the model's forward count as the first of the next one.

In layer-major mode all micro-batches of a step are one backward, and a parameter fires for each of
them; its firings per micro-batch are learned separately for this mode. The order of the layers, and
which may go early, are the same in both modes: ranks may differ in their modes.
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
"""Elements. If a layer's parameters have fewer on average, torch joins all its gradients: host time
matters more there than reading the gradients once more for their norm."""
_TOGETHER = 16 << 20
"""Likewise: with fewer, all gradients are taken over in one launch, when the last one has come.

This is so in models up to about 5 B, which one 80 GB GPU can update: there short batches are bound
by launches. In larger layers launches cost little, and gradients that wait are in memory twice."""


class Reducer(Protocol):
    """What takes layers' final gradients: :class:`~hytrain.optimizer.reduction.GradientReducer`."""

    def consume(self, gradient: LayerGradient) -> None: ...
    def consume_part(self, gradient: LayerGradient) -> None: ...
    def withdraw_gradient(self, gradient: LayerGradient) -> None: ...
    @property
    def lacks_room(self) -> bool: ...


@dataclass(slots=True)
class _Arrivals:
    """The arrivals of the current backward's gradients so far.

    Attributes:
        firings_before: gradients that had come before this backward, on this rank.
        assume_single_use: each parameter's first gradient is taken for its last.
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

    The reducer is called in the same order on all ranks, for each layer once per backward; without
    ``collectives`` there is one rank. If ``direct``, updates are committed as gradients come, and
    cannot be withdrawn. ``begin_backward`` is called at the first gradient of a backward that was
    not announced; if it returns False, autograd keeps the gradient until the next backward.
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
        """Whether the first backward may consume layers too early, and take them back.

        With other ranks, these would have to take the same layers back.
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
        """Stand-ins for the gradients of layers that got none."""
        self.record: FiringRecord | None = None
        """What was learned; None: nothing has come yet, or what was learned did not hold."""
        self.reduce_schedule: GatherSchedule | None = None
        """Says when layers are consumed; None: in order, as soon as they are complete."""
        self._now = _Arrivals()
        self._has_kept = False  # a backward within a forward has left gradients with autograd
        self.num_firings = 0
        """Grows with every gradient that autograd has given to a hook."""
        self._hooks = [LayerHooks(layer, self._hook) for layer in self.layers]
        self._parameters = [p for hooks in self._hooks for p in hooks.parameters]
        self._may_use_single_hooks = not self._is_shared
        """Whether layers may get one hook each when the next backward has ended.

        With other ranks, a layer is consumed when the schedule that all follow says so, whichever
        of its gradients this rank has by then: each of these must have been taken.
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
        """Puts hooks on anew: parameters in other memory may have new accumulation nodes."""
        for hooks in self._hooks:
            hooks.hook_each()

    @property
    def may_come(self) -> bool:
        """Whether the graph that is running may bring a trained parameter a gradient.

        Even if it comes to none of them, one that requires a gradient may get one: parts of the
        model that were run without a graph (reentrant checkpointing) run one of their own.
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
        """Whether the next backward of this mode may consume layers too early."""
        return self._can_withdraw and not self.knows(layer_major=layer_major)

    def scale(self, unreduced: float, reduced: float) -> None:
        """Multiplies the gradients kept for the next step: this rank's own, and reduced ones."""
        for layer in self.layers:
            layer.flush()
            for kept, factor in ((layer.unreduced_grad, unreduced), (layer.reduced_shard, reduced)):
                if kept is not None:
                    kept.mul_(factor)
            layer.copied_whole = False  # its squares are no longer known

    def begin(self) -> None:
        """Prepares for a backward that has begun (:meth:`StepState.begin_backward`)."""
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
        """Consumes a layer that the backward of all micro-batches has passed, if it looks complete.

        Only needed while no counts have been learned: later they tell.
        """
        layer = self.layers[index]
        is_reduced = layer.progress is Progress.REDUCED
        if self._now.assume_single_use and not is_reduced and all(layer.fired):
            self._close(layer)

    def _hook(self, layer: LayerGradient, index: int) -> Hook:
        # It runs for every parameter of every micro-batch: if these are small, its host time is
        # what they take. So the usual case is all here, with few calls.
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
                layer.remaining = -1  # undefined: is_coming() must not wait for it
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
            # stream that made the gradient, so its memory is reused only after the copy.
            parameter.grad = None
            if not vars(parameter).get(IS_READY, True):
                return
            layer.fired[index] += 1
            layer.last_index = index
            layer.last_firing = collector.num_firings = collector.num_firings + 1
            if collector.reduce_schedule is not None:
                layer.uses_before = collector.reduce_schedule.uses_made
            if collector.record is None and layer.fired[index] > 1:
                layer.remaining = -1  # more than once: final only at the end of this backward
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
                return  # more is to come: autograd adds it up
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
        """Gives one hook to each layer whose parameters get one gradient each."""
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
        """Takes gradients of a layer that autograd has kept; others may come."""
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
        """Takes, as this backward's first gradients, those that one within its forward has left."""
        if self._has_kept:
            self._has_kept = False
            for hooks in self._hooks:
                self._take_some(hooks.layer, hooks.take())

    def take_left(self) -> None:
        """Takes gradients that no hook has reported, once autograd has finished.

        They are of layers whose last gradient was not the usual parameter's, and of parameters
        whose memory somebody has changed since the hooks were put on.

        Raises:
            GradientOrderError: one has come after its layer's last.
        """
        if not self._step.in_backward or not with_gradient(self._parameters):
            return  # the usual case
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
        """Marks a layer's gradient as complete, and consumes it as soon as the order allows."""
        layer.progress = Progress.COMPLETE
        if self.record is None:
            self._close(layer)
        else:
            self._advance()

    def _take_more(self, layer: LayerGradient, index: int) -> None:
        """Takes a layer back that gets a gradient after it was taken for complete, if possible."""
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
        """Takes back a layer that was not complete: it waits for the end of backward."""
        self._reducer.withdraw_gradient(layer)
        layer.progress = Progress.COMING
        layer.remaining = -1
        self._now.has_grown = True

    def take_back(self, index: int) -> None:
        """Takes back a consumed layer whose weights are used again in this backward.

        If something is recomputed with them, more of the gradient will come.

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
        """Consumes final gradients in the agreed order."""
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
                return  # later layers wait: reductions must have one order on all ranks
            now.next += 1
            self._close(layer)

    def close_if_final(self, index: int) -> bool:
        """Consumes a layer's gradient if it is complete; returns whether it has been consumed."""
        if not self._step.is_open:
            return False  # in the forward of a pass that goes on to backward; marks are old ones
        layer = self.layers[index]
        if layer.progress is Progress.COMPLETE:
            self._close(layer)
        return layer.progress is Progress.REDUCED

    def close(self, index: int) -> None:
        """Consumes a layer's gradient as far as it has come, unless it has been consumed."""
        if self.layers[index].progress is not Progress.REDUCED:
            self._close(self.layers[index])

    def is_coming(self, index: int) -> bool:
        """Whether the graph that runs will bring a gradient that a layer has not got yet."""
        layer = self.layers[index]
        if not self._step.in_backward or layer.remaining <= 0:
            return False
        nodes = zip(layer.fired, self._hooks[index].accumulators, strict=True)
        return any(not fired and will_run(node) for fired, node in nodes)

    @property
    def lacks_room(self) -> bool:
        """Whether gradients that stay to the end of this backward take memory that it needs.

        The first layer-major step is a trial, which could not begin anew after committed updates.
        """
        backward = self._step.backward
        is_trial = backward.layer_major and self._direct
        is_early = self._step.in_backward and backward.reduces
        return is_early and not is_trial and self._reducer.lacks_room

    def has_all(self, index: int) -> bool:
        """Whether each of a layer's parameters has got a gradient of this backward."""
        return all(self.layers[index].fired)

    def reduce_so_far(self, index: int, *, is_all: bool) -> None:
        """Reduces what has come of a layer's gradient when the first backward goes on from it.

        All ranks take part, whether they have any of it or not. It is consumed if that ``is_all``
        of it; else it stays in ``reduced_shard``, and what comes later is added.
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

        Empty if it has no samples of a global batch: the batch's gradients are the other ranks'.
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
        """Ends the backward; later gradients belong to another one."""
        if not self._step.in_backward:
            return
        self._step.end_backward()
        for layer in self.layers:
            if layer.waiting:
                # A layer with unused parameters still waits for theirs. A model in a CUDA
                # graph would, in its next forward, overwrite the gradients that it has returned.
                layer.flush()

    def complete(self, *, consume: bool) -> None:
        """Completes a backward; what it left incomplete is taken as it is.

        With ``consume`` all that is left is consumed; else it stays in ``unreduced_grad``, for the
        next micro-batch to add to.
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
        """Layers whose gradient is wholly reduced on all ranks; may be a collective."""
        if not self._now.has_parts or self.reduce_schedule is None:
            return set()
        missing = [
            layer.unreduced_grad is not None or layer.reduced_shard is None for layer in self.layers
        ]
        found = self.reduce_schedule.largest([int(flag) for flag in missing])
        return {index for index, flag in enumerate(found) if not flag}

    def _learn(self, layer_major: bool, *, is_new: bool) -> None:
        """Learns from a backward; a collective if it is the first of its mode."""
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
        """Agrees with all ranks on an order, a collective; None if no rank has seen a gradient."""
        order = sorted(range(len(self.layers)), key=lambda i: self.layers[i].last_firing)
        early = [all(count > 0 for count in layer.fired) for layer in self.layers]
        if self._collectives is None:
            return FiringRecord(order, early)
        agreed = self._collectives.agree_on_order(order, early, has_seen=self.has_fired)
        return None if agreed is None else FiringRecord(*agreed)

    def _for_each(self, fired: list[int]) -> list[int]:
        """Firings of one micro-batch; 0, as for an unused parameter, if micro-batches differ."""
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
