"""Writes a checkpoint: all ranks in parallel, one parameter at a time.

All files go into a folder of the save's own, which takes the tag's place when every rank has said
that its files are whole (``commit.py``); ``latest`` is written after that. Whatever fails on one
rank fails the save on all of them and leaves the tag and ``latest`` as they were.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from hytrain.checkpoint import beside
from hytrain.checkpoint.archive_writer import ArchiveWriter, write_objects
from hytrain.checkpoint.commit import finish_save, give_up_save
from hytrain.checkpoint.contents import (
    ModelStates,
    ModelStatesLater,
    SaveContents,
    take_contents,
)
from hytrain.checkpoint.file_writers import WRITERS, FileWriters
from hytrain.checkpoint.gather import Delivery, ParameterPlace, StateSource, list_parameters
from hytrain.checkpoint.manifest import MANIFEST, pack_manifest
from hytrain.checkpoint.parameter_files import ParameterFiles, most_bytes
from hytrain.checkpoint.rounds import plan_rounds
from hytrain.checkpoint.sums import FileSums, SummingFile
from hytrain.checkpoint.sync import sync_names
from hytrain.checkpoint.target import UNCHANGED, SaveTarget, room_text, writing
from hytrain.checkpoint.universal import (
    LATEST,
    LATEST_SUM,
    MODEL_STATES_OF_ZERO3,
    CheckpointPaths,
    pack_latest_sum,
)
from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.exchange import raise_together
from hytrain.errors import CheckpointError
from hytrain.optimizer.kept_state import KeptState
from hytrain.testing import faults


def write_file(path: Path, stored: object) -> FileSums:
    """Writes what ``torch.save`` would, or bytes as they are; it exists whole or not at all.

    Returns:
        The sums of what was written.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    return _finish_file(path, begin_file(path, stored))


def begin_file(path: Path, stored: object) -> SummingFile:
    """Writes a file under its temporary name."""
    temporary = temporary_name(path)
    try:
        file = SummingFile(temporary)
        try:
            if isinstance(stored, bytes):
                file.write(stored)
            else:
                write_objects(file, stored)
            file.end()
        except BaseException:
            file.give_up()
            raise
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return file


def _finish_file(path: Path, file: SummingFile) -> FileSums:
    """Waits until it is on the disk, and gives it its name."""
    try:
        rename_file(file, path)
    except BaseException:
        file.give_up()
        temporary_name(path).unlink(missing_ok=True)
        raise
    return file.sums


def temporary_name(path: Path) -> Path:
    """Of a file that is not whole.

    It does not look like a state file: plain DeepSpeed reads whatever ends in ".pt".
    """
    return path.with_name(f"{path.stem}.tmp{os.getpid()}")


def rename_file(file: SummingFile, path: Path) -> None:
    """A file that was written under its temporary name gets its own, when it is on the disk."""
    file.sync()
    file.close()
    temporary_name(path).replace(path)


logger = logging.getLogger(__name__)

_SYNCS = 8
"""Threads that wait for the disk."""
_UNSYNCED = 64
"""Files that may be open to be synced."""


class Writes:
    """This rank's writes; the first failure is kept, and nothing is written after it.

    Whether a file has reached the disk is waited for by threads of their own, half of the time
    that it takes: those that write go on with the next.
    """

    def __init__(self, failure: str | None = None, room: Callable[[], str] = str) -> None:
        """
        Args:
            failure: why nothing is to be written, if there is a reason.
            room: what to say of the disk where it is full.
        """
        self.failure = failure
        self._room = room
        self.sums: dict[Path, FileSums] = {}
        self._syncs = ThreadPoolExecutor(_SYNCS, "hytrain-sync")
        # Without a limit small files, which are written sooner than synced, take all descriptors.
        self._may_wait = threading.Semaphore(_UNSYNCED)

    def attempt(self, path: Path, make: Callable[[], object]) -> None:
        """Writes what ``make`` returns; the file has its name when :meth:`finish` has returned."""
        problem = f"{path} could not be written"

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = begin_file(path, make())
            self._may_wait.acquire()
            self._syncs.submit(finish, file)

        def finish(file: SummingFile) -> None:
            try:
                # After a failure, too: what is of no use is not left open.
                sums = _finish_file(path, file)
                self.sums[path] = sums
            except Exception as error:
                self._note(problem, UNCHANGED, error)
            finally:
                self._may_wait.release()

        self.try_to(write, problem, UNCHANGED)

    def finish(self) -> None:
        """Waits until all files are on the disk and have their names, or have failed to.

        To be called before the folder is renamed or removed; nothing can be attempted after it.
        """
        self._syncs.shutdown(wait=True)

    def try_to(self, act: Callable[[], None], problem: str, outcome: str) -> None:
        """Calls ``act`` where nothing has failed before.

        Args:
            act: what is to be done.
            problem: how the message begins where it fails.
            outcome: what there is then.
        """
        if self.failure is not None:
            return
        try:
            act()
        except Exception as error:
            # A rank that raised here would leave the others waiting; it raises with them later.
            self._note(problem, outcome, error)

    def _note(self, problem: str, outcome: str, error: Exception) -> None:
        if self.failure is None:
            is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            room = f"{self._room()}; " if is_full else ""
            remedy = f"{room}free space or mend the folder and save again"
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "close files, or allow more (ulimit -n), and save again"
            self.failure = f"{problem} ({type(error).__name__}: {error}): {remedy}; {outcome}"


class ModelStatesFile:
    """The model states' file on rank 0, whose weights come one after another; nothing elsewhere."""

    def __init__(self, path: Path, writes: Writes, states: ModelStates | None) -> None:
        """
        Args:
            path: the file's.
            writes: takes the first failure, after which nothing is written.
            states: None: this rank does not write it.
        """
        self._writes = writes
        self._states = states
        self._path = path
        self._problem = f"{path} could not be written"
        self._file: SummingFile | None = None
        self._archive: ArchiveWriter | None = None
        self._constants = dict(states.constants) if states is not None else {}
        if states is not None:
            writes.try_to(lambda: self._open(states), self._problem, UNCHANGED)

    def _open(self, states: ModelStates) -> None:
        self._file = SummingFile(temporary_name(self._path))
        self._archive = ArchiveWriter(self._file)
        self._archive.write_objects(states.objects.content)
        for key, tensor in states.objects.storages.items():
            self._archive.write_elements(key, tensor)

    def write(
        self, key: str, make: Callable[[], torch.Tensor], dtype: torch.dtype | None = None
    ) -> None:
        """Writes a tensor's elements; see :meth:`ArchiveWriter.write_elements`."""
        archive = self._archive
        if archive is not None:
            self._writes.try_to(
                lambda: archive.write_elements(key, make(), dtype), self._problem, UNCHANGED
            )

    def write_constants(self, copies: Mapping[int, torch.Tensor]) -> None:
        """Writes what no step changes: copies of parameters, by ``id``."""
        for key, constant in list(self._constants.items()):
            copy = copies.get(id(constant.tensor))
            if copy is not None:
                self.write(key, lambda copy=copy: copy)
                del self._constants[key]

    def finish(self) -> None:
        """Writes the other constants, where they are; the file then exists, or never will."""
        if self._states is not None:
            for key, constant in self._constants.items():
                self.write(key, constant.read)
            self._writes.try_to(self._close, self._problem, UNCHANGED)
        if self._file is not None:
            self._file.give_up()  # unless it has been closed, nobody will read it
            self._file = None

    def _close(self) -> None:
        assert self._archive is not None
        assert self._file is not None
        self._archive.close()
        rename_file(self._file, self._path)
        self._writes.sums[self._path] = self._file.sums


def write_checkpoint(
    target: SaveTarget,
    kept: KeptState,
    model_states: Callable[[list[ParameterPlace]], ModelStatesLater],
    frozen: Iterable[Mapping[int, torch.Tensor]],
) -> None:
    """Saves everything that a run needs to go on; a collective.

    Host memory grows by state tensors of no more elements than the largest parameter has (on one
    rank by none: they are written from where they are), and on rank 0 by the module's buffers.

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
    delivered: Callable[[Sequence[Delivery]], None] = lambda _: None,
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
        delivered: called when a round's parameters have been sent and written.
        threads: that write.

    Raises:
        CheckpointError: see :func:`write_checkpoint`.
    """
    paths = CheckpointPaths(saving)
    failure = contents.failure and f"{contents.failure}; {UNCHANGED}"
    writes = Writes(failure or _missing(saving), partial(room_text, saving, contents))
    try:
        _write_files(
            contents, paths, writes, frozen, collectives, device, source, delivered, threads
        )
    finally:
        writes.finish()
    writes.try_to(
        lambda: sync_names(saving, list(writes.sums)), f"{saving} could not be synced", UNCHANGED
    )
    faults.point("save.synced")
    _finish(target, saving, writes, collectives)


def _write_files(
    contents: SaveContents,
    paths: CheckpointPaths,
    writes: Writes,
    frozen: Iterable[Mapping[int, torch.Tensor]],
    collectives: ShardCollectives,
    device: torch.device,
    source: StateSource,
    delivered: Callable[[Sequence[Delivery]], None],
    threads: int,
) -> None:
    """Writes all but the manifest; arguments as above. A collective."""
    archive = ModelStatesFile(paths.model_states, writes, contents.model_states)
    with FileWriters(threads, most_bytes(contents.places)) as files:
        parameters = ParameterFiles(contents, paths, writes.attempt, archive.write, files)
        for deliveries in plan_rounds(contents.places, collectives.world_size):
            parameters.write(deliveries, collectives, device, source)
            files.end_batch(partial(delivered, deliveries))
        files.finish()
    for copies in frozen:
        archive.write_constants(copies)
    if collectives.rank == 0:
        writes.attempt(paths.optimizer_state, lambda: contents.optimizer_state)
        if contents.model_states is not None:
            metadata = contents.model_states.metadata
            writes.attempt(paths.folder / MODEL_STATES_OF_ZERO3, lambda: metadata)
    archive.finish()


def _finish(
    target: SaveTarget, saving: Path, writes: Writes, collectives: ShardCollectives
) -> None:
    is_first = collectives.rank == 0
    paths = CheckpointPaths(saving)
    try:
        raise_together(writes.failure, collectives)
        sums = _all_sums(writes, saving, collectives)
        if is_first:
            writes.try_to(
                lambda: _write_manifest(paths, sums), f"{MANIFEST} could not be written", UNCHANGED
            )
            faults.point("save.manifest")
            _commit(writes, saving, target)
        # No rank returns before the checkpoint is there for all.
        raise_together(writes.failure, collectives)
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


def _all_sums(writes: Writes, saving: Path, collectives: ShardCollectives) -> dict[str, FileSums]:
    """Path in the tag's folder -> sums, of all files that all ranks have written; a collective."""
    mine = {path.relative_to(saving).as_posix(): sums for path, sums in writes.sums.items()}
    everywhere: list[dict[str, FileSums]] = collectives.gather_objects(mine, "the files' sums")
    return {name: sums for part in everywhere for name, sums in part.items()}


def _write_manifest(paths: CheckpointPaths, sums: dict[str, FileSums]) -> None:
    path = paths.zero / MANIFEST
    path.parent.mkdir(exist_ok=True)
    write_file(path, pack_manifest(sums, saved_at=time.time()))
    sync_names(paths.folder, [path])


def _commit(writes: Writes, saving: Path, target: SaveTarget) -> None:
    """On rank 0, when all files of all ranks are whole: the tag is the new checkpoint's."""
    problem = f"{target.folder} could not be replaced by {saving}"
    writes.try_to(lambda: finish_save(saving, target.folder), problem, UNCHANGED)
    faults.point("save.renamed")
    if not target.is_latest or writes.failure is not None:
        return
    _put_beside(target.save_dir)
    tag = target.tag
    # The first of them is the one that is read first: it changes last, and the sum after it.
    contents = {target.save_dir / name: tag.encode() for name in reversed(LATEST)}
    contents[target.save_dir / LATEST_SUM] = pack_latest_sum(tag)
    for path, content in contents.items():
        faults.point(f"save.{path.name}")
        writes.try_to(
            lambda path=path, content=content: _write_latest(path, content),
            f"{path} could not be written",
            f"the checkpoint is whole all the same: pass the tag '{tag}' to load it",
        )


def _put_beside(save_dir: Path) -> None:
    """Ways out and in that users of DeepSpeed look for, in this version's form."""
    try:
        for name, content in beside.contents().items():
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
