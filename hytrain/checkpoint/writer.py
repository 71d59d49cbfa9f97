"""Writes a checkpoint: all ranks in parallel, one parameter at a time.

All files go into a folder of the save's own, which takes the tag's place when every rank has said
that its files are whole (``commit.py``); ``latest`` is written after that. Whatever fails on one
rank fails the save on all of them and leaves the tag and ``latest`` as they were.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hytrain.checkpoint.archive_writer import ArchiveWriter
from hytrain.checkpoint.commit import discard_replaced, finish_save, name_latest, undo_save
from hytrain.checkpoint.disk_room import room_text
from hytrain.checkpoint.file_writers import UNCHANGED, WRITERS, FileWriters
from hytrain.checkpoint.gather import (
    STATES,
    Delivery,
    ParameterPlace,
    StateSource,
    gather_round,
    plan_rounds,
    whole_on_host,
)
from hytrain.checkpoint.host_parts import Parts, copy_to_parts
from hytrain.checkpoint.manifest import MANIFEST, Manifest
from hytrain.checkpoint.save_contents import ModelStates, SaveContents, key_of
from hytrain.checkpoint.save_target import SaveTarget, writing
from hytrain.checkpoint.summed_files import (
    FileSums,
    SummingFile,
    finish_file,
    sync_names,
    write_file,
)
from hytrain.checkpoint.universal import (
    CAT_DIM,
    LATEST,
    MODEL_STATES_OF_ZERO3,
    PARAM,
    STEP,
    CheckpointPaths,
)
from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.exchange import raise_together
from hytrain.errors import CheckpointError
from hytrain.kernels.host_memory import host_copy
from hytrain.testing import faults


def write_contents(
    target: SaveTarget,
    contents: SaveContents,
    frozen: Iterable[Mapping[int, torch.Tensor]],
    collectives: ShardCollectives,
    device: torch.device,
    source: StateSource = ParameterPlace.read,
    written: Callable[[ParameterPlace], None] = lambda _: None,
    threads: int = WRITERS,
) -> None:
    """Writes a checkpoint and puts it in its tag's place; a collective.

    Host memory grows by state tensors of no more elements than the largest parameter has (with one
    rank by none: they are written from where they are), and on rank 0 by one parameter's training
    copy and the module's buffers.

    Args:
        contents: all but the state tensors.
        frozen: copies on rank 0, by ``id``, of frozen parameters that are not whole there, a few at
            a time; all ranks walk through it.
        source: reads this rank's pieces of the state tensors.
        written: called, in any thread, when this rank's piece of one of a parameter's state tensors
            is not read any more.

    Raises:
        CheckpointError: a file could not be written on some rank; raised on all. The tag and
            ``latest`` are as they were, unless the message says otherwise.
    """
    with writing(target, contents, collectives) as (target, saving, parts):
        save = _Save(saving, contents, collectives, device, source, written, threads, parts)
        files = save.files
        try:
            save.write(frozen)
        finally:
            files.close()
        files.try_to(lambda: sync_names(saving, list(files.sums)), f"{saving} could not be synced")
        faults.point("save.synced")
        raise_together(files.failure, collectives)
        manifest = _manifest(files, saving, parts, collectives)
        if has_made := parts.has_made(collectives.rank):
            write = partial(_write_manifest, saving, manifest)
            files.try_to(write, f"{MANIFEST} could not be written")
            faults.point("save.manifest")
            problem = f"{target.folder} could not be replaced by {saving}"
            files.try_to(lambda: finish_save(saving, target.folder), problem)
        if parts.are_several:
            _agree(files, saving, target, collectives)
        if has_made:
            _commit(files, target)
        # No rank returns before the checkpoint is there for all.
        raise_together(files.failure, collectives)
        if parts.are_several and collectives.rank == 0:
            parts.tell(target.folder)


class _ModelStatesFile:
    """The model states' file on rank 0, whose weights come one by one; elsewhere does nothing."""

    def __init__(self, path: Path, files: FileWriters, states: ModelStates | None) -> None:
        self._path, self._files = path, files
        self._archive: ArchiveWriter | None = None
        self._constants = dict(states.constants) if states is not None else {}
        if states is not None:
            self._try_to(partial(self._open, states))

    def _open(self, states: ModelStates) -> None:
        self._archive = ArchiveWriter(SummingFile(self._path), states.objects.content)
        for key, tensor in states.objects.storages.items():
            self._archive.write_elements(key, tensor)

    def _try_to(self, act: Callable[[], object]) -> None:
        self._files.try_to(act, f"{self._path} could not be written")

    def write(self, key: str, make: Callable[[], torch.Tensor]) -> None:
        """Writes a tensor's elements; does not raise."""
        if (archive := self._archive) is not None:
            self._try_to(lambda: archive.write_elements(key, make()))

    def write_constants(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Writes the constants that ``copies``, by ``id`` of the parameter, has copies of."""
        for key, constant in list(self._constants.items()):
            copy = copies.get(id(constant.tensor))
            if copy is not None:
                self.write(key, lambda copy=copy: copy)
                del self._constants[key]

    def finish(self) -> None:
        """Writes the other constants from where they are; then the file is whole, or never is."""
        for key, constant in self._constants.items():
            self.write(key, constant.read)
        if (archive := self._archive) is not None:
            self._try_to(partial(self._close, archive))
            archive.file.close()  # unless it has ended, nobody will read it

    def _close(self, archive: ArchiveWriter) -> None:
        archive.close()
        self._files.sums[self._path] = finish_file(archive.file)


class _Save:
    """This rank's files: state tensors one parameter after another, weights as they arrive."""

    def __init__(
        self,
        saving: Path,
        contents: SaveContents,
        collectives: ShardCollectives,
        device: torch.device,
        source: StateSource,
        written: Callable[[ParameterPlace], None],
        threads: int,
        parts: Parts,
    ) -> None:
        """Takes the arguments of :func:`write_contents`."""
        self._paths, self._contents, self._parts = CheckpointPaths(saving), contents, parts
        self._collectives, self._device = collectives, device
        self._source, self._written = source, written
        self._keys = {place.name: key_of(index) for index, place in enumerate(contents.places)}
        failure = contents.failure and f"{contents.failure}; {UNCHANGED}"
        # Copies may take, at a time, as much as one state tensor of the largest parameter.
        most_bytes = 4 * max((place.numel for place in contents.places), default=0)
        room = partial(room_text, saving, contents.num_bytes)
        self.files = FileWriters(threads, most_bytes, failure, room)
        self._archive = _ModelStatesFile(
            self._paths.model_states, self.files, contents.model_states
        )

    def write(self, frozen: Iterable[Mapping[int, torch.Tensor]]) -> None:
        """Writes all of them; a collective."""
        for deliveries in plan_rounds(self._contents.places, self._collectives.world_size):
            self._write_round(deliveries)
        self.files.wait()
        for copies in frozen:
            self._archive.write_constants(copies)
        if self._collectives.rank == 0:
            self.files.put(self._paths.optimizer_state, self._contents.optimizer_state)
        states = self._contents.model_states
        if states is not None:
            self.files.put(self._paths.folder / MODEL_STATES_OF_ZERO3, states.metadata)
        self._archive.finish()
        paths = self._paths
        for_all = paths.model_states, paths.folder / MODEL_STATES_OF_ZERO3, paths.optimizer_state
        copy_to_parts(for_all, self.files, self._parts, self._collectives, self._device)

    def _write_round(self, deliveries: Sequence[Delivery]) -> None:
        """Brings a round's parameters to the ranks that write them; a collective."""
        rank, is_alone = self._collectives.rank, self._collectives.world_size == 1
        mine = sum(4 * d.place.numel for d in deliveries if d.destination == rank)
        for kind in deliveries[0].place.kinds:
            if is_alone:
                for delivery in deliveries:
                    self._write_own(delivery.place, kind)
                continue
            self.files.hold(mine)
            put = partial(self._put, held=mine)
            gather_round(deliveries, kind, self._collectives, self._device, put, self._source)
            for delivery in deliveries:
                if kind == STATES[0] and delivery.destination != 0:
                    self._send_copy(delivery.place)
                self._written(delivery.place)

    def _write_own(self, place: ParameterPlace, kind: str) -> None:
        """Writes a state tensor that this rank owns whole."""
        # A function of its own: a loop would keep a copy alive beside the next one.
        rounded = place.dtype.itemsize * place.numel if kind == STATES[0] else 0
        whole, held = whole_on_host(
            place, kind, self._source, lambda num_bytes: self.files.hold(num_bytes + rounded)
        )
        self._put(place, kind, whole, held=held + rounded, then=partial(self._written, place))

    def _send_copy(self, place: ParameterPlace) -> None:
        """Sends a parameter's training copy to rank 0, whose file has all the module's weights."""
        held = place.dtype.itemsize * place.numel if self._collectives.rank == 0 else 0

        def deliver(place: ParameterPlace, _: str, tensor: torch.Tensor) -> None:
            self.files.write([], self._part(place, tensor), held)

        self.files.hold(held)
        gather_round(
            [Delivery(place, 0)],
            STATES[0],
            self._collectives,
            self._device,
            deliver,
            self._source,
            as_trained=True,
        )

    def _put(
        self,
        place: ParameterPlace,
        kind: str,
        tensor: torch.Tensor,
        *,
        held: int,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        faults.point("save.file")
        stored = {PARAM: tensor, CAT_DIM: 0}
        files: list[tuple[Path, object]] = [(self._paths.state(place.name, kind), stored)]
        if kind == place.kinds[-1]:
            step = torch.tensor(float(self._contents.steps[place.group]))
            files.append((self._paths.state(place.name, STEP), step))
        is_in_archive = kind == STATES[0] and self._collectives.rank == 0
        part = self._part(place, tensor) if is_in_archive else None
        self.files.write(files, part, held, then)

    def _part(self, place: ParameterPlace, tensor: torch.Tensor) -> Callable[[], None]:
        """Returns what writes the weights as the training copy has them."""
        key, purpose = self._keys[place.name], f"the weights of '{place.name}' to save"

        def rounded() -> torch.Tensor:
            is_right = tensor.dtype == place.dtype
            return tensor if is_right else host_copy(tensor, place.dtype, purpose=purpose)

        return lambda: self._archive.write(key, rounded)


def _manifest(
    files: FileWriters, saving: Path, parts: Parts, collectives: ShardCollectives
) -> bytes:
    """The manifest of all ranks' files, on the ranks that write it; a collective."""
    mine = {path.relative_to(saving).as_posix(): sums for path, sums in files.sums.items()}
    everywhere: list[dict[str, FileSums]] = collectives.objects_on_first(mine, "the files' sums")
    manifest = b""
    if collectives.rank == 0:
        hosts = parts.hosts_of(everywhere)
        sums = {
            name: replace(sums, host=hosts.get(name))
            for part in everywhere
            for name, sums in part.items()
        }
        manifest = Manifest(sums, time.time()).pack()
    if parts.are_several:
        manifest = collectives.object_from_first(manifest, "the manifest")
    return manifest


def _write_manifest(saving: Path, content: bytes) -> None:
    path = CheckpointPaths(saving).zero / MANIFEST
    write_file(path, content)
    sync_names(saving, [path])


def _agree(
    files: FileWriters, saving: Path, target: SaveTarget, collectives: ShardCollectives
) -> None:
    """Ensures that all hosts have put their parts in the tag's place, or none; a collective."""
    try:
        raise_together(files.failure, collectives)
    except CheckpointError:
        if files.failure is None and not saving.exists():
            undo_save(saving, target.folder)
        raise


def _commit(files: FileWriters, target: SaveTarget) -> None:
    """Ends a save when the tag is the new checkpoint's, on all hosts."""
    problem = f"the checkpoint that {target.folder} has replaced could not be removed"
    files.try_to(lambda: discard_replaced(target.folder), problem)
    faults.point("save.renamed")
    if target.is_latest:
        files.try_to(
            lambda: name_latest(target.save_dir, target.tag),
            f"{target.save_dir / LATEST[0]} could not be written",
            f"the checkpoint is whole all the same: pass the tag '{target.tag}' to load it",
        )
