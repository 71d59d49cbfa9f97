"""Where a checkpoint goes: its tag, the folder it is written into, and whether there is room."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from hytrain.checkpoint.commit import TagLock, begin_save, remove_save, seen_from
from hytrain.checkpoint.disk_room import check_room
from hytrain.checkpoint.file_writers import UNCHANGED
from hytrain.checkpoint.host_parts import Parts, find_parts
from hytrain.checkpoint.save_contents import SaveContents
from hytrain.checkpoint.stored_files import listed
from hytrain.checkpoint.universal import is_plain_path
from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.exchange import from_first, raise_together
from hytrain.errors import CheckpointError

_ROOM_FACTOR = 1.1
"""Free space to require per checkpoint byte: sizes are rounded up, and others write meanwhile."""


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """Where a checkpoint is saved.

    Attributes:
        save_dir: folder of checkpoints; made if missing.
        tag: the checkpoint's name in it; the same on all ranks.
        is_latest: whether ``latest`` will name it.
    """

    save_dir: Path
    tag: str
    is_latest: bool

    @property
    def folder(self) -> Path:
        return self.save_dir / self.tag


@contextmanager
def writing(
    target: SaveTarget, contents: SaveContents, collectives: ShardCollectives
) -> Generator[tuple[SaveTarget, Path, Parts]]:
    """Makes the folder to write into, for the length of a block; a collective at its beginning.

    Yields the target as rank 0 has it, the folder, and which ranks share it.

    If the block fails with a CheckpointError, on all ranks, the folder is removed.

    Raises:
        CheckpointError: it cannot be made, another job saves under the tag, there is no room for
            the checkpoint, or a parameter's name cannot be a folder's. The tag is as it was.
    """
    wrong = sorted(place.name for place in contents.places if not is_plain_path(place.name))
    if wrong:
        raise CheckpointError(
            f"{listed(wrong)} cannot be the path of a folder, which a universal checkpoint has for "
            'each parameter: rename the modules, so that their names have no empty part, "." or '
            '".." between "/"'
        )
    lock: TagLock | None = None
    saving: Path | None = None

    def begin() -> tuple[str, str]:
        nonlocal lock, saving
        saving, lock = begin_save(target.folder)
        return target.tag, seen_from(target.save_dir, saving)

    try:
        # If tags differ, which DeepSpeed warns of, rank 0's counts: all write into one folder.
        tag, name = from_first(begin, collectives)
        target = replace(target, tag=tag)
        there, rank = target.save_dir / name, collectives.rank
        parts = find_parts(there, collectives)
        failure: str | None = None
        if parts.has_made(rank):
            saving = there
            try:
                lock = lock or begin_save(target.folder, saving)[1]
                size = contents.part_bytes(parts.share_of(rank))
                check_room(
                    saving.parent,
                    int(_ROOM_FACTOR * size),
                    "the checkpoint takes",
                    f"free space and save again; {UNCHANGED}",
                )
            except (CheckpointError, OSError) as error:
                failure = str(error)
        raise_together(failure, collectives)
        yield target, there, parts
    except CheckpointError:
        if saving is not None and saving.exists():
            remove_save(saving)
        raise
    finally:
        if lock is not None:
            lock.release()
