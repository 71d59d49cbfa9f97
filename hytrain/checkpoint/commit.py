"""A checkpoint appears under its tag whole, or not at all; what was there stays until then.

A save writes into a folder of its own beside the tag's. When all ranks have finished, and their
files have reached the disk, rank 0 makes two renames: the old checkpoint is moved aside, the new
one takes its place. Then the old one is removed. Wherever a run ends meanwhile, the tag has one of
the two, or, between the renames, neither: the old one is then found under the name it was given.

<save_dir>/hytrain-saving-<tag>-<random>    being written, or being removed: never loaded
<save_dir>/hytrain-replaced-<tag>           moved aside: loaded if there is no <tag>
<save_dir>/hytrain-lock-<tag>               locked (flock) while a save runs; says by whom

All of this is done by rank 0, and by the first rank of each further host that has a folder of its
own (host_parts.py). The others only write into the folder that rank 0 names.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath

from hytrain.checkpoint.files_beside import NAMES, put_beside
from hytrain.checkpoint.summed_files import sync_folder, write_file
from hytrain.checkpoint.universal import LATEST
from hytrain.errors import CheckpointError
from hytrain.testing import faults

logger = logging.getLogger(__name__)

_SAVING = "hytrain-saving-"
_REPLACED = "hytrain-replaced-"
_MOST_BYTES = 255 - len(_SAVING) - 16
_ABANDONED_SECONDS = 3600.0
"""A save that has not made a folder for this long has ended."""


PREFIX = "hytrain-lock-"


class TagLock:
    """A lock by which one job at a time saves under a tag, until :meth:`release` or process end.

    If a file system has no such locks (as some between hosts), a second job is not noticed.
    """

    def __init__(self, folder: Path) -> None:
        """Takes the lock of a tag's folder, whose parent exists.

        Raises:
            CheckpointError: another save under this tag runs, in this process or another.
            OSError: the lock's file cannot be made.
        """
        self._path = folder.with_name(PREFIX + folder.name)
        self._descriptor = -1
        while self._descriptor < 0:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(descriptor, folder)
                # The last holder may have removed it meanwhile: then another file has the name.
                with suppress(FileNotFoundError):
                    if os.path.samestat(os.fstat(descriptor), os.stat(self._path)):
                        self._descriptor = descriptor
            finally:
                if self._descriptor < 0:
                    os.close(descriptor)
        who = f"process {os.getpid()} on {socket.gethostname()}"
        with suppress(OSError):  # if the disk is full, the lock holds all the same
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, who.encode(), 0)

    def _lock(self, descriptor: int, folder: Path) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                return  # there are no locks here
            who = os.pread(descriptor, 200, 0).decode("utf-8", "replace") or "another process"
            raise CheckpointError(
                f"another job is saving under the tag '{folder.name}' in {folder.parent} ({who}): "
                "give each job a folder or tags of its own, or save again when that one has "
                "ended; nothing was changed"
            ) from None

    def release(self) -> None:
        """Releases the lock; never raises."""
        with suppress(OSError):
            self._path.unlink()
        with suppress(OSError):
            # Forked processes have the descriptor, too.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        with suppress(OSError):
            os.close(self._descriptor)


def unusable_tag(tag: str) -> str | None:
    """What is wrong with a tag to save under; None if nothing is."""
    path = PurePosixPath(tag)
    if too_long(tag):
        return (
            f"the tag '{tag[:80]}...' has a name of more than {_MOST_BYTES} bytes, which no folder "
            "can have: pass a shorter one"
        )
    if tag != tag.strip() or not tag.isprintable():
        return (
            f"the tag {tag!r} begins or ends with a space, or has characters that cannot be "
            "printed: it could not be read back from 'latest'; pass another"
        )
    if path.name in (*LATEST, *NAMES):
        return f"the tag '{tag}' is the name of a file in save_dir: pass another"
    if not path.name or path.is_absolute() or ".." in path.parts:
        return f"the tag '{tag}' names no folder in save_dir: pass a name such as global_step100"
    if path.name.startswith((_SAVING, _REPLACED, PREFIX)):
        return f"the tag '{tag}' begins as folders of unfinished saves do: pass another"
    return None


def too_long(tag: str) -> bool:
    """Whether a tag's name, with what a save puts before it, is too long for file systems."""
    parts = PurePosixPath(tag).parts
    return any(len(part.encode(errors="surrogatepass")) > _MOST_BYTES for part in parts)


def begin_save(folder: Path, saving: Path | None = None) -> tuple[Path, TagLock]:
    """Makes the folder to write into, beside the tag's, and tidies up what earlier saves have left.

    Its name is new: no host has seen another folder under it, which a file system that caches names
    might still show. No other job saves under the tag until the lock is released.

    ``saving``: that folder, if it is there already, under a name that another host has chosen.

    Raises:
        CheckpointError: it cannot be made, or another job saves under the tag, which is as it was.
    """
    folder = _target(folder)
    lock: TagLock | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = TagLock(folder)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(f"{folder} is a file")
        _tidy(folder, but=saving)  # first, as it may be what fills the disk
        if saving is None:
            saving = _unused_name(folder)
            saving.mkdir()
    except OSError as error:
        if lock is not None:
            lock.release()
        raise CheckpointError(
            f"nothing can be saved in {folder.parent} ({type(error).__name__}: {error}): free "
            "space or mend the folder and save again; what was saved before is unchanged"
        ) from error
    return saving, lock


def finish_save(saving: Path, folder: Path) -> None:
    """Puts a checkpoint that all ranks have written in its tag's place, the old one beside it.

    Raises:
        OSError: it cannot be renamed for good; the tag is as it was.
    """
    folder = _target(folder)
    replaced = _replaced_name(folder)
    if folder.exists():
        folder.rename(replaced)
    faults.point("save.renaming")
    try:
        saving.rename(folder)
        # Before the old one goes: after a loss of power there is one of the two.
        sync_folder(folder.parent)
    except OSError:
        undo_save(saving, folder)
        raise


def undo_save(saving: Path, folder: Path) -> None:
    """Undoes the renames of :func:`finish_save`."""
    folder = _target(folder)
    replaced = _replaced_name(folder)
    if not saving.exists():
        folder.rename(saving)
    if replaced.exists():
        replaced.rename(folder)


def discard_replaced(folder: Path) -> None:
    """Removes the checkpoint that was replaced."""
    folder = _target(folder)
    if (replaced := _replaced_name(folder)).exists():
        _discard(replaced, folder)


def name_latest(save_dir: Path, tag: str) -> None:
    """Makes a tag the latest; when this returns, a loss of power does not undo it.

    Raises:
        OSError: it cannot be written; it is the latest for nobody, or only for plain DeepSpeed.
    """
    put_beside(save_dir)
    # The first of them is the one that is read first: it changes last.
    for path in (save_dir / name for name in reversed(LATEST)):
        faults.point(f"save.{path.name}")
        write_file(path, tag.encode())
        sync_folder(save_dir)


def find_replaced(folder: Path) -> Path | None:
    """The checkpoint that a tag without a folder had when its replacement was interrupted."""
    if folder.is_dir():
        return None
    replaced = _replaced_name(_target(folder))
    return replaced if replaced.is_dir() else None


def saved_tags(load_dir: Path) -> list[str]:
    """Tags in a folder of checkpoints that a load may be asked for, sorted."""
    folders = [path for path in load_dir.iterdir() if path.is_dir()] if load_dir.is_dir() else []
    return sorted({p.name.removeprefix(_REPLACED) for p in folders if not is_unfinished(p)})


def is_unfinished(folder: Path) -> bool:
    """Whether a folder is a save's own, which is not known to be whole."""
    return folder.name.startswith(_SAVING)


def seen_from(save_dir: Path, path: Path) -> str:
    """A path for other ranks, where save_dir may have another name: relative to it, if inside."""
    return str(path.relative_to(save_dir) if path.is_relative_to(save_dir) else path)


def _target(folder: Path) -> Path:
    # A tag may be a link to another disk: what it leads to is replaced, not the link.
    return folder.resolve() if folder.is_symlink() else folder


def _replaced_name(folder: Path) -> Path:
    return folder.with_name(_REPLACED + folder.name)


def _unused_name(folder: Path) -> Path:
    return folder.with_name(f"{_SAVING}{folder.name}-{secrets.token_hex(4)}")


def _tidy(folder: Path, but: Path | None) -> None:
    """Tidies up after interrupted saves. Another tag's folder may be that of a running job."""
    for path in list(folder.parent.iterdir()):
        if path == but:
            continue
        if path.name.startswith(PREFIX) and path.name != PREFIX + folder.name:
            _try_lock(path.with_name(path.name.removeprefix(PREFIX)))  # which removes it
        elif is_unfinished(path):
            tag = path.name.removeprefix(_SAVING).rpartition("-")[0]
            is_old = time.time() - _last_change(path) > _ABANDONED_SECONDS
            if tag == folder.name or (is_old and _try_lock(path.with_name(tag))):
                remove_save(path)
        elif path.name.startswith(_REPLACED):
            owner = path.with_name(path.name.removeprefix(_REPLACED))
            if owner.exists():
                _discard(path, owner)
            elif owner == folder:
                path.rename(folder)


def _try_lock(folder: Path) -> bool:
    """Whether no job saves under a tag now."""
    try:
        TagLock(folder).release()
    except (CheckpointError, OSError):
        return False
    return True


def _last_change(saving: Path) -> float:
    newest = 0.0
    for path in (saving, *saving.glob("zero"), *saving.glob("zero/*")):
        with suppress(FileNotFoundError):  # its run may be renaming it just now
            newest = max(newest, path.stat().st_mtime)
    return newest


def _discard(replaced: Path, folder: Path) -> None:
    """Removes a replaced checkpoint; what users have put into it moves to the new one."""
    try:
        for path in list(replaced.iterdir()):
            is_checkpoint = path.name == "zero" or path.name.endswith("_states.pt")
            if not is_checkpoint and not (folder / path.name).exists():
                path.rename(folder / path.name)
        # Half removed, it must not look like a checkpoint to fall back to.
        remains = _unused_name(folder)
        replaced.rename(remains)
    except OSError as error:
        logger.warning("%s, which was replaced, cannot be removed: %s", replaced, error)
    else:
        remove_save(remains)


def remove_save(path: Path) -> None:
    """Removes what a failed save has written, or what was replaced; never raises."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s cannot be removed: %s; it takes space and is not loaded", path, error)
