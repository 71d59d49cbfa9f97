"""Writes a checkpoint: all ranks in parallel, one parameter at a time.

All files go into a folder of the save's own, which takes the tag's place when every rank has said
that its files are whole (``commit.py``); ``latest`` is written after that. Whatever fails on one
rank fails the save on all of them and leaves the tag and ``latest`` as they were.
"""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from hytrain.checkpoint import export_script
from hytrain.checkpoint.archive_writer import ArchiveWriter
from hytrain.checkpoint.checksums import FileSums, SummingFile
from hytrain.checkpoint.commit import finish_save, give_up_save
from hytrain.checkpoint.contents import (
    ModelStates,
    ModelStatesLater,
    SaveContents,
    key_of,
    take_contents,
)
from hytrain.checkpoint.file_writers import (
    UNCHANGED,
    WRITERS,
    FileWriters,
    finish_file,
    temporary_name,
    write_file,
)
from hytrain.checkpoint.gather import (
    Delivery,
    ParameterPlace,
    StateSource,
    gather_round,
    list_parameters,
    plan_rounds,
    whole_on_host,
)
from hytrain.checkpoint.manifest import MANIFEST, pack_manifest
from hytrain.checkpoint.sync import sync_names
from hytrain.checkpoint.target import SaveTarget, room_text, writing
from hytrain.checkpoint.universal import (
    LATEST,
    LATEST_SUM,
    MODEL_STATES_OF_ZERO3,
    STATES,
    STEP,
    CheckpointPaths,
    pack_latest_sum,
    pack_tensor,
)
from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.exchange import raise_together
from hytrain.errors import CheckpointError
from hytrain.kernels.host_memory import host_copy
from hytrain.optimizer.kept_state import KeptState
from hytrain.testing import faults

logger = logging.getLogger(__name__)


def write_checkpoint(
    target: SaveTarget,
    kept: KeptState,
    model_states: Callable[[list[ParameterPlace]], ModelStatesLater],
    frozen: Iterable[Mapping[int, torch.Tensor]],
) -> None:
    """Saves everything that a run needs to go on; a collective.

    Host memory grows by state tensors of no more elements than the largest parameter has (on one
    rank by none: they are written from where they are), and on rank 0 by one parameter's training
    copy and the module's buffers.

    Args:
        target: where to.
        kept: whose state is written; it is flushed, which changes no number.
        model_states: see :func:`take_contents`.
        frozen: see :func:`write_contents`.

    Raises:
        CheckpointError: a file could not be written on some rank; raised on all. The tag and
            ``latest`` are as they were, unless the message says otherwise. Or a parameter's name
            cannot be a folder's.
    """
    kept.flush()
    places = list_parameters(kept.layers)
    contents = take_contents(kept, places, model_states, kept.collectives)()
    with writing(target, contents, kept.collectives) as saving:
        write_contents(target, saving, contents, frozen, kept.collectives, kept.device)


def write_contents(
    target: SaveTarget,
    saving: Path,
    contents: SaveContents,
    frozen: Iterable[Mapping[int, torch.Tensor]],
    collectives: ShardCollectives,
    device: torch.device,
    source: StateSource = ParameterPlace.read,
    written: Callable[[ParameterPlace], None] = lambda _: None,
    threads: int = WRITERS,
) -> None:
    """Writes a checkpoint and puts it in its tag's place; a collective.

    Args:
        target: where to.
        saving: what :func:`writing` gave.
        contents: all but the state tensors.
        frozen: parameters that are not trained and not whole on rank 0: copies there, by ``id``, a
            few at a time; all ranks walk through it.
        collectives: the ranks.
        device: the layers'.
        source: this rank's pieces of the state tensors.
        written: called, in any thread, when this rank's piece of one of a parameter's state tensors
            (:data:`STATES`) is not read any more.
        threads: that write.

    Raises:
        CheckpointError: see :func:`write_checkpoint`.
    """
    paths = CheckpointPaths(saving)
    failure = contents.failure and f"{contents.failure}; {UNCHANGED}"
    # Of copies there may be, at a time, one state tensor of the largest parameter.
    most_bytes = 4 * max((place.numel for place in contents.places), default=0)
    room = partial(room_text, saving, contents)
    files = FileWriters(threads, most_bytes, failure or _missing(saving), room)
    try:
        archive = _ModelStatesFile(paths.model_states, files, contents.model_states)
        parameters = _ParameterWriter(
            contents, paths, files, archive, collectives, device, source, written
        )
        for deliveries in plan_rounds(contents.places, collectives.world_size):
            parameters.write(deliveries)
        files.wait()
        for copies in frozen:
            archive.write_constants(copies)
        if collectives.rank == 0:
            files.put(paths.optimizer_state, contents.optimizer_state)
        if contents.model_states is not None:
            files.put(paths.folder / MODEL_STATES_OF_ZERO3, contents.model_states.metadata)
        archive.finish()
    finally:
        files.close()
    files.try_to(
        lambda: sync_names(saving, list(files.sums)), f"{saving} could not be synced", UNCHANGED
    )
    faults.point("save.synced")
    _finish(target, saving, files, collectives)


class _ModelStatesFile:
    """The model states' file on rank 0, whose weights come one after another; nothing elsewhere."""

    def __init__(self, path: Path, files: FileWriters, states: ModelStates | None) -> None:
        """
        Args:
            path: the file's.
            files: takes the first failure, after which nothing is written.
            states: None: this rank does not write it.
        """
        self._path, self._files = path, files
        self._file: SummingFile | None = None
        self._archive: ArchiveWriter | None = None
        self._constants = dict(states.constants) if states is not None else {}
        if states is not None:
            self._try_to(partial(self._open, states))

    def _open(self, states: ModelStates) -> None:
        self._file = SummingFile(temporary_name(self._path))
        self._archive = ArchiveWriter(self._file)
        self._archive.write_objects(states.objects.content)
        for key, tensor in states.objects.storages.items():
            self._archive.write_elements(key, tensor)

    def _try_to(self, act: Callable[[], object]) -> None:
        self._files.try_to(act, f"{self._path} could not be written", UNCHANGED)

    def write(self, key: str, make: Callable[[], torch.Tensor]) -> None:
        """Writes a tensor's elements; does not raise."""
        if self._archive is not None:
            archive = self._archive
            self._try_to(lambda: archive.write_elements(key, make()))

    def write_constants(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Writes what no step changes: copies of parameters, by ``id``."""
        for key, constant in list(self._constants.items()):
            copy = copies.get(id(constant.tensor))
            if copy is not None:
                self.write(key, lambda copy=copy: copy)
                del self._constants[key]

    def finish(self) -> None:
        """Writes the other constants, where they are; the file then exists, or never will."""
        for key, constant in self._constants.items():
            self.write(key, constant.read)
        if self._archive is not None:
            self._try_to(self._close)
        if self._file is not None:
            self._file.close()  # unless it has ended, nobody will read it

    def _close(self) -> None:
        assert self._archive is not None
        assert self._file is not None
        self._archive.close()
        self._files.sums[self._path] = finish_file(self._file, self._path)


class _ParameterWriter:
    """State tensors of all parameters to their files, and the weights to the model states' file."""

    def __init__(
        self,
        contents: SaveContents,
        paths: CheckpointPaths,
        files: FileWriters,
        archive: _ModelStatesFile,
        collectives: ShardCollectives,
        device: torch.device,
        source: StateSource,
        written: Callable[[ParameterPlace], None],
    ) -> None:
        """Arguments as of :func:`write_contents`."""
        self._paths, self._files, self._archive = paths, files, archive
        self._collectives, self._device = collectives, device
        self._source, self._written = source, written
        self._steps: dict[str, float] = {}
        self._keys: dict[str, str] = {}
        for index, (place, step) in enumerate(zip(contents.places, contents.steps, strict=True)):
            self._steps[place.name], self._keys[place.name] = step, key_of(index)

    def write(self, deliveries: Sequence[Delivery]) -> None:
        """Brings a round's parameters to where they are written; a collective."""
        rank, is_alone = self._collectives.rank, self._collectives.world_size == 1
        mine = sum(4 * d.place.numel for d in deliveries if d.destination == rank)
        for kind in STATES:
            if is_alone:
                for delivery in deliveries:
                    self._write_own(delivery.place, kind)
                continue
            self._files.hold(mine)
            put = partial(self._put, held=mine)
            gather_round(deliveries, kind, self._collectives, self._device, put, self._source)
            for delivery in deliveries:
                if kind == STATES[0] and delivery.destination != 0:
                    self._send_copy(delivery.place)
                self._written(delivery.place)

    def _write_own(self, place: ParameterPlace, kind: str) -> None:
        """Writes what one rank has all of."""
        # In a function of its own: a copy that a loop still refers to is there beside the next.
        rounded = place.dtype.itemsize * place.numel if kind == STATES[0] else 0
        whole, held = whole_on_host(
            place, kind, self._source, lambda num_bytes: self._files.hold(num_bytes + rounded)
        )
        self._put(place, kind, whole, held=held + rounded, then=partial(self._written, place))

    def _send_copy(self, place: ParameterPlace) -> None:
        """The module's weights are in one file, rank 0's: one after another they come to it."""
        held = place.dtype.itemsize * place.numel if self._collectives.rank == 0 else 0

        def deliver(place: ParameterPlace, _: str, tensor: torch.Tensor) -> None:
            self._files.write([], self._part(place, tensor), held)

        self._files.hold(held)
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
        files: list[tuple[Path, object]] = [
            (self._paths.state(place.name, kind), pack_tensor(tensor))
        ]
        if kind == STATES[-1]:
            step = torch.tensor(self._steps[place.name])
            files.append((self._paths.state(place.name, STEP), step))
        is_in_archive = kind == STATES[0] and self._collectives.rank == 0
        part = self._part(place, tensor) if is_in_archive else None
        self._files.write(files, part, held, then)

    def _part(self, place: ParameterPlace, tensor: torch.Tensor) -> Callable[[], None]:
        """Writes the weights as the training copy has them."""
        key, purpose = self._keys[place.name], f"the weights of '{place.name}' to save"

        def rounded() -> torch.Tensor:
            is_right = tensor.dtype == place.dtype
            return tensor if is_right else host_copy(tensor, place.dtype, purpose=purpose)

        return lambda: self._archive.write(key, rounded)


def _finish(
    target: SaveTarget, saving: Path, files: FileWriters, collectives: ShardCollectives
) -> None:
    is_first = collectives.rank == 0
    paths = CheckpointPaths(saving)
    try:
        raise_together(files.failure, collectives)
        sums = _all_sums(files, saving, collectives)
        if is_first:
            files.try_to(
                lambda: _write_manifest(paths, sums), f"{MANIFEST} could not be written", UNCHANGED
            )
            faults.point("save.manifest")
            _commit(files, saving, target)
        # No rank returns before the checkpoint is there for all.
        raise_together(files.failure, collectives)
    except CheckpointError:
        if is_first and saving.exists():
            give_up_save(saving)
        raise


def _missing(saving: Path) -> str | None:
    if saving.is_dir():
        return None
    return (
        f"{saving}, which rank 0 has made, is not there for this rank: save into a folder that all "
        "hosts share (node-local storage is not possible); nothing was saved"
    )


def _all_sums(
    files: FileWriters, saving: Path, collectives: ShardCollectives
) -> dict[str, FileSums]:
    """Path in the tag's folder -> sums, of all files that all ranks have written; a collective."""
    mine = {path.relative_to(saving).as_posix(): sums for path, sums in files.sums.items()}
    everywhere: list[dict[str, FileSums]] = collectives.gather_objects(mine, "the files' sums")
    return {name: sums for part in everywhere for name, sums in part.items()}


def _write_manifest(paths: CheckpointPaths, sums: dict[str, FileSums]) -> None:
    path = paths.zero / MANIFEST
    path.parent.mkdir(exist_ok=True)
    write_file(path, pack_manifest(sums, saved_at=time.time()))
    sync_names(paths.folder, [path])


def _commit(files: FileWriters, saving: Path, target: SaveTarget) -> None:
    """On rank 0, when all files of all ranks are whole: the tag is the new checkpoint's."""
    problem = f"{target.folder} could not be replaced by {saving}"
    files.try_to(lambda: finish_save(saving, target.folder), problem, UNCHANGED)
    faults.point("save.renamed")
    if not target.is_latest or files.failure is not None:
        return
    _put_beside(target.save_dir)
    tag = target.tag
    # The first of them is the one that is read first: it changes last, and the sum after it.
    contents = {target.save_dir / name: tag.encode() for name in reversed(LATEST)}
    contents[target.save_dir / LATEST_SUM] = pack_latest_sum(tag)
    for path, content in contents.items():
        faults.point(f"save.{path.name}")
        files.try_to(
            lambda path=path, content=content: _write_latest(path, content),
            f"{path} could not be written",
            f"the checkpoint is whole all the same: pass the tag '{tag}' to load it",
        )


def _put_beside(save_dir: Path) -> None:
    """Ways out and in that users of DeepSpeed look for, in this version's form."""
    try:
        for name, content in export_script.contents().items():
            path = save_dir / name
            if not path.is_file() or path.read_bytes() != content:
                write_file(path, content)
                if path.suffix == ".py":
                    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    except OSError as error:
        # The checkpoint is whole without them.
        logger.warning("what explains checkpoints could not be put in %s: %s", save_dir, error)


def _write_latest(path: Path, content: bytes) -> None:
    # Only when the tag is there for good: after a loss of power it must not name what is gone.
    write_file(path, content)
    sync_names(path.parent, [path])
