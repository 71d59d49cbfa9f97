"""State tensors of all parameters into their files, and the weights into the model states' file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from hytrain.checkpoint.contents import SaveContents, key_of
from hytrain.checkpoint.file_writers import FileWriters
from hytrain.checkpoint.gather import (
    Delivery,
    ParameterPlace,
    StateSource,
    gather_round,
    whole_on_host,
)
from hytrain.checkpoint.universal import STATES, STEP, CheckpointPaths, pack_tensor
from hytrain.comm.collectives import ShardCollectives
from hytrain.testing import faults


class ParameterFiles:
    """Writes the state tensors of one parameter after another; some are being written at a time."""

    def __init__(
        self,
        contents: SaveContents,
        paths: CheckpointPaths,
        attempt: Callable[[Path, Callable[[], object]], None],
        archive: Callable[[str, Callable[[], torch.Tensor], torch.dtype | None], None],
        files: FileWriters,
    ) -> None:
        """
        Args:
            contents: what is saved.
            paths: of the checkpoint.
            attempt: writes to a path what a function returns; does not raise.
            archive: writes what a function returns, rounded to a dtype, under a key in the model
                states' file, on rank 0; does not raise.
            files: the threads in which both are called.
        """
        self._paths, self._attempt, self._archive, self._files = paths, attempt, archive, files
        self._steps = {
            place.name: step for place, step in zip(contents.places, contents.steps, strict=True)
        }

    def write(
        self,
        deliveries: Sequence[Delivery],
        collectives: ShardCollectives,
        device: torch.device,
        source: StateSource,
    ) -> None:
        """Brings a round's parameters to where they are written; a collective."""
        if collectives.world_size == 1:
            for delivery in deliveries:
                for kind in STATES:
                    self._write_own(delivery.place, kind, source)
            return
        rank = collectives.rank
        mine = sum(4 * d.place.numel for d in deliveries if d.destination == rank)

        def deliver(place: ParameterPlace, kind: str, tensor: torch.Tensor) -> None:
            self._write(place, kind, tensor, in_archive=rank == 0, held=mine)

        for kind in STATES:
            self._files.hold(mine)
            gather_round(deliveries, kind, collectives, device, deliver, source)
        # The module's weights are in one file, rank 0's: one after another they come to it.
        for delivery in deliveries:
            if delivery.destination != 0:
                self._send_copy(delivery.place, collectives, device, source)

    def _write_own(self, place: ParameterPlace, kind: str, source: StateSource) -> None:
        """Writes what one rank has all of."""
        # In a function of its own: a copy that a loop still refers to is there beside the next.
        whole, held = whole_on_host(place, kind, source, self._files.hold)
        self._write(place, kind, whole, in_archive=True, held=held)

    def _send_copy(
        self,
        place: ParameterPlace,
        collectives: ShardCollectives,
        device: torch.device,
        source: StateSource,
    ) -> None:
        held = place.dtype.itemsize * place.numel if collectives.rank == 0 else 0

        def deliver(place: ParameterPlace, _: str, tensor: torch.Tensor) -> None:
            part = partial(self._archive, key_of(place), lambda: tensor, None)
            self._files.write([], part, held)

        self._files.hold(held)
        first = [Delivery(place, 0)]
        gather_round(first, STATES[0], collectives, device, deliver, source, as_trained=True)

    def _write(
        self, place: ParameterPlace, kind: str, tensor: torch.Tensor, *, in_archive: bool, held: int
    ) -> None:
        faults.point("save.file")
        attempt, paths = self._attempt, self._paths
        files = [partial(attempt, paths.state(place.name, kind), lambda: pack_tensor(tensor))]
        if kind == STATES[-1]:
            step = torch.tensor(self._steps[place.name])
            files.append(partial(attempt, paths.state(place.name, STEP), lambda: step))
        part = None
        if kind == STATES[0] and in_archive:
            # As the training copy has it.
            part = partial(self._archive, key_of(place), lambda: tensor, place.dtype)
        self._files.write(files, part, held)


def most_bytes(places: Sequence[ParameterPlace]) -> int:
    """Of copies that may be there at a time: one state tensor of the largest parameter."""
    return 4 * max((place.numel for place in places), default=0)
