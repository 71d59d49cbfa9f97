"""Updates the layers whose state is on the device: neighbours together, in few launches.

In launch-bound steps each launch's time in Python lengthens the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hytrain.kernels.cpu_adam import AdamHyper
from hytrain.kernels.device_adam import device_adam
from hytrain.kernels.grouped_adam import GroupedAdam, Segment
from hytrain.model.layer_state import LayerState
from hytrain.offload.mover import LayerMover
from hytrain.offload.streams import Streams
from hytrain.offload.update_groups import LIMITS, ONE_GROUP, GroupLimits, group_begins


class UpdateObserver(Protocol):
    """Called at updates on the device, on the stream that makes them."""

    def updates_begin(self) -> None:
        """The first update of a step is about to be queued."""
        ...

    def layers_updated(self, sizes: Mapping[int, int]) -> None:
        """The update of one layer, or of several at once, has been queued.

        ``sizes``: elements of each layer by its number, in order; time is divided in proportion.
        """
        ...


@dataclass(frozen=True, slots=True)
class Batch:
    """Layers whose updates are queued together, before those of the next batch.

    Attributes:
        sizes: elements of each layer, by its number.
        launches: numbers of the grouped launches that update them; None: a launch of
            :func:`device_adam` for each part of the one layer.
        updated: an event recorded behind their update; None on a CPU.
    """

    layers: tuple[LayerState, ...]
    sizes: Mapping[int, int]
    launches: range | None
    updated: torch.cuda.Event | None


def is_groupable(layer: LayerState) -> bool:
    """Whether the layer's update can share a launch: only its addresses differ from others'.

    Rounded moments have a table of their own, and a shard on the host is written by a copy.
    """
    return not (layer.form.is_rounded or layer.storage.on_host)


def batches(layers: Sequence[LayerState], limits: GroupLimits = LIMITS) -> list[list[LayerState]]:
    """Divides the layers into neighbours that are updated together."""
    sizes, groupable = [x.shard_size for x in layers], [is_groupable(x) for x in layers]
    begins = group_begins(sizes, groupable, limits)
    ends = [*begins[1:], len(layers)]
    return [list(layers[begin:end]) for begin, end in zip(begins, ends, strict=False)]


class _Plan:
    """What stays the same while the layers, their memory and their gradients' dtypes do."""

    def __init__(
        self,
        layers: Sequence[LayerState],
        num_groups: int,
        streams: Streams,
        limits: GroupLimits,
    ) -> None:
        device = streams.device
        gradients = [layer.update.gradient for layer in layers]
        dtypes = [gradient.dtype for gradient in gradients if gradient is not None]
        launches: list[list[Segment]] = []
        self.batches: list[Batch] = []
        number = 0
        for batch in batches(layers, limits):
            begin = len(launches)
            if is_groupable(batch[0]):
                launches += _launches(batch, number, dtypes)
            numbers = range(begin, len(launches)) if is_groupable(batch[0]) else None
            sizes = {layer.index: layer.shard_size for layer in batch}
            self.batches.append(Batch(tuple(batch), sizes, numbers, streams.new_event()))
            number += len(batch)
        self.grouped = GroupedAdam(launches, dtypes, num_groups, device)


def _launches(
    batch: Sequence[LayerState], number: int, dtypes: Sequence[torch.dtype]
) -> list[list[Segment]]:
    """The layers' segments by launch, each of one gradient dtype and one dtype of weights.

    ``number``: that of the first layer's gradient; ``dtypes``: those of all gradients.
    """
    by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[Segment]] = {}
    for gradient, layer in enumerate(batch, number):
        for part in layer.update_parts():
            launch = part.launch
            weights = layer.storage.slice(launch.begin, launch.end)
            assert isinstance(part.m, torch.Tensor)
            assert isinstance(part.v, torch.Tensor)
            segment = Segment(
                part.master, part.m, part.v, weights, gradient, part.begin, launch.group
            )
            by_dtypes.setdefault((dtypes[gradient], weights.dtype), []).append(segment)
    return list(by_dtypes.values())


class DeviceUpdate:
    """Updates the layers on the device: all at once, or each group when it is complete.

    With direct commit, as nothing about a step is open, a group is updated when its last gradient
    has come, and its gradients are released.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        streams: Streams,
        mover: LayerMover,
        limits: GroupLimits = LIMITS,
    ) -> None:
        self._layers = layers
        self._limits = limits
        self._streams = streams
        self._mover = mover
        self._plans: dict[int, tuple[tuple[object, ...], _Plan]] = {}
        self._group_of: dict[int, list[LayerState]] = {}
        self._read: list[torch.Tensor] = []
        """Gradients of the last group that was updated in this step's backward."""
        self._computing: torch.cuda.Stream | None = None
        """The stream that made them and owns their memory."""
        self._updated: torch.cuda.Event | None = None
        """The event behind the update that reads them."""

    @property
    def layers(self) -> list[LayerState]:
        """The layers on the device that Adam updates."""
        return [
            layer
            for layer in self._layers
            if layer.placement == "gpu" and layer.form.optimizer is None
        ]

    @property
    def waiting_bytes(self) -> int:
        """Bytes of gradients that wait for their update, or that an update reads."""
        waiting = [layer.update.gradient for layer in self.layers]
        waiting += self._read
        return sum(gradient.nbytes for gradient in waiting if gradient is not None)

    def whole_group(self, layer: LayerState) -> list[LayerState]:
        """The layers updated with this one, if all their gradients have come; otherwise empty."""
        if layer.index not in self._group_of:
            found = batches(self.layers, self._limits)
            self._group_of = {one.index: group for group in found for one in group}
        group = self._group_of[layer.index]
        return group if all(one.update.gradient is not None for one in group) else []

    def run_group(
        self,
        group: Sequence[LayerState],
        hyper: tuple[AdamHyper, ...],
        outcome: torch.Tensor,
        observers: Sequence[UpdateObserver],
        *,
        leaves_room: bool = False,
    ) -> None:
        """Queues the updates of one group in backward; for arguments see :meth:`run`."""
        # Gradients of the group before: its update has had the time of this one's backward, so that
        # compute hardly ever stands still for it.
        self.let_go()
        gradients = [one.update.gradient for one in group if one.update.gradient is not None]
        self._run(
            group, hyper, outcome, observers, ONE_GROUP, leaves_room=leaves_room, lets_go=False
        )
        self._read, self._updated = gradients, group[-1].update.updated
        self._computing = self._streams.now_computing()

    def let_go(self) -> None:
        """Gives the memory of gradients that updates have read back to compute."""
        if self._computing is not None and self._updated is not None:
            # Without this wait compute could write to it while the update still reads.
            # (``record_stream`` would keep it for as long as the host is ahead of the device.)
            self._computing.wait_event(self._updated)
        self._read, self._updated = [], None

    def end_step(self) -> None:
        """Ends a step that is final: layers may move."""
        self.let_go()
        self._group_of = {}

    def run(
        self,
        hyper: tuple[AdamHyper, ...],
        outcome: torch.Tensor,
        observers: Sequence[UpdateObserver],
        *,
        leaves_room: bool = False,
    ) -> None:
        """Queues the updates on their stream; the host waits for nothing.

        ``outcome``: fp32, two elements on the device: gradient scale, and 1.0 for a skipped step;
        ``leaves_room``: forward's kernels need not wait for those of updates to have begun.
        """
        limits = self._limits.leaving_room() if leaves_room else self._limits
        self._run(self.layers, hyper, outcome, observers, limits, leaves_room=leaves_room)

    def _run(
        self,
        layers: Sequence[LayerState],
        hyper: tuple[AdamHyper, ...],
        outcome: torch.Tensor,
        observers: Sequence[UpdateObserver],
        limits: GroupLimits,
        *,
        leaves_room: bool,
        lets_go: bool = True,
    ) -> None:
        gradients: list[torch.Tensor] = []
        for layer in layers:
            assert layer.update.gradient is not None
            gradients.append(layer.update.gradient)
        with self._streams.on_update():
            plan = self._current_plan(layers, gradients, len(hyper), limits)
            plan.grouped.begin_step(gradients, hyper)
            for observer in observers:
                observer.updates_begin()
            for batch in plan.batches:
                for layer in batch.layers:
                    if layer.holds_updates:
                        layer.before_update()
                    if layer.moving:
                        # State that has just left the host may not have arrived yet.
                        self._mover.wait(layer)
                if batch.launches is None:
                    self._update_alone(batch.layers[0], hyper, outcome)
                else:
                    for number in batch.launches:
                        plan.grouped.launch(number, outcome, leaves_room=leaves_room)
                self._queued(batch, observers, lets_go=lets_go)
            # The next decision drops it: compute could write there before the update has read it.
            self._streams.used_on_update(outcome)

    def _current_plan(
        self,
        layers: Sequence[LayerState],
        gradients: Sequence[torch.Tensor],
        num_groups: int,
        limits: GroupLimits,
    ) -> _Plan:
        """The plan for these layers' present memory; to be called within ``on_update``."""
        key = (
            num_groups,
            limits,
            *[
                (layer.index, layer.state_moves, layer.storage.moves, gradient.dtype)
                for layer, gradient in zip(layers, gradients, strict=True)
            ],
        )
        first = layers[0].index if layers else -1
        known = self._plans.get(first)
        if known is None or known[0] != key:
            known = self._plans[first] = key, _Plan(layers, num_groups, self._streams, limits)
        return known[1]

    def _update_alone(
        self, layer: LayerState, hyper: tuple[AdamHyper, ...], outcome: torch.Tensor
    ) -> None:
        gradient = layer.update.gradient
        assert gradient is not None
        for part in layer.update_parts():
            launch = part.launch
            with layer.storage.writing(launch.begin, launch.end, part.master) as weights:
                device_adam(
                    part.master,
                    part.m,
                    part.v,
                    gradient[part.begin : part.begin + part.master.numel()],
                    weights,
                    outcome,
                    hyper[launch.group],
                    launch.rounding,
                )

    def _queued(self, batch: Batch, observers: Sequence[UpdateObserver], *, lets_go: bool) -> None:
        if batch.updated is not None:
            # Behind each launch: the first layers' forward need not wait for the last's update.
            # Without it forward would read weights that are being written.
            batch.updated.record(self._streams.update)
        for layer in batch.layers:
            update = layer.update
            assert update.gradient is not None
            if lets_go:
                # It is dropped below, before the launch that reads it has run.
                self._streams.used_on_update(update.gradient)
            update.apply(batch.updated)
        for observer in observers:
            observer.layers_updated(batch.sizes)
