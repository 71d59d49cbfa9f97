"""Are the files of a checkpoint those that were saved? Asked before anything is made of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hytrain.checkpoint.archive import Archive
from hytrain.checkpoint.checked_file import CheckedFile
from hytrain.checkpoint.damage import ADVICE, describe_damage
from hytrain.checkpoint.manifest import MANIFEST, unpack_manifest
from hytrain.checkpoint.parallel import in_threads
from hytrain.checkpoint.pickles import LAZY, load_archive
from hytrain.checkpoint.sums import BLOCK_BYTES, FileSums, damaged_blocks, sum_file
from hytrain.checkpoint.universal import CheckpointPaths
from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.exchange import from_first, raise_together
from hytrain.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_UNIT_BLOCKS = 64
"""Blocks that one rank checks in a row."""
_DESCRIBED = 3
"""Damaged files that a rank's message has."""


@dataclass(frozen=True, slots=True)
class CheckpointFiles:
    """The files of a checkpoint, all of which have been checked; what is read is checked again.

    Attributes:
        paths: where they are.
        sums: path in the checkpoint's folder -> sums; of those files that are to be read.
    """

    paths: CheckpointPaths
    sums: Mapping[str, FileSums]
    _prepared: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def has(self, path: Path) -> bool:
        """Whether a file is there."""
        return self._name(path) in self.sums

    def load(self, path: Path, wait: Sequence[str] = LAZY, *, trusted: bool = False) -> Any:
        """A file's contents.

        Args:
            path: in the checkpoint's folder.
            wait: keys whose tensors are read and checked where they are used.
            trusted: see :func:`load_archive`.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        return self._load(path, wait, trusted=trusted)[0]

    def prepare(self, path: Path) -> Any:
        """As :meth:`load`, for a file that :meth:`take` will be asked for: made once for both."""
        contents, file = self._load(path, LAZY)
        file.set_aside()
        self._prepared[self._name(path)] = contents
        return contents

    def take(self, path: Path) -> Any:
        """What :meth:`prepare` has returned, if it was asked for it, and else :meth:`load`."""
        name = self._name(path)
        return self._prepared.pop(name) if name in self._prepared else self.load(path)

    def _load(
        self, path: Path, wait: Sequence[str], *, trusted: bool = False
    ) -> tuple[Any, CheckedFile]:
        sums = self.sums.get(self._name(path))
        if sums is None:
            raise CheckpointError(missing_file(path))
        try:
            file = CheckedFile(path, sums)
            return load_archive(Archive(file), wait=wait, trusted=trusted), file
        except OSError as error:
            raise CheckpointError(_unreadable(path, error)) from error

    def _name(self, path: Path) -> str:
        return path.relative_to(self.paths.folder).as_posix()


@dataclass(frozen=True, slots=True)
class Listing:
    """What rank 0 finds in a checkpoint's folder.

    Attributes:
        found: path in the folder -> bytes, of all that might be a checkpoint's.
        manifest: what was saved; None where nothing says so.
    """

    found: Mapping[str, int]
    manifest: Mapping[str, FileSums] | None


def list_files(paths: CheckpointPaths, collectives: ShardCollectives) -> Listing:
    """What there is, the same on all ranks; a collective. See :func:`list_files_alone`."""
    listing = from_first(lambda: list_files_alone(paths), collectives)
    assert isinstance(listing, Listing)
    return listing


def check_files(
    paths: CheckpointPaths,
    listing: Listing,
    wanted: Sequence[str],
    collectives: ShardCollectives,
    look: Callable[[CheckpointFiles], _T],
) -> _T:
    """All bytes of the files to be read, each rank its share; a collective.

    Args:
        paths: of the checkpoint.
        listing: see :func:`list_files`.
        wanted: paths in the folder in the order in which they will be used, the same on all ranks.
        collectives: the ranks.
        look: makes something of the files, and touches nothing. Where a manifest has their sums it
            is called while they are checked, and they may be damaged: what it reads it checks.
            It must not raise, nor use collectives.

    Returns:
        What ``look`` has returned, if all files are what was saved.

    Raises:
        DamagedCheckpointError: one is missing or damaged; raised on all ranks.
    """
    raise_together(_missing(paths, listing, wanted), collectives, DamagedCheckpointError)
    mine = _Share(collectives.rank, collectives.world_size)
    manifest = listing.manifest
    if manifest is None:
        sums, failure = _sums_of(paths, listing.found, wanted, mine)
        raise_together(failure, collectives, DamagedCheckpointError)
        everywhere: list[dict[str, FileSums]] = collectives.gather_objects(sums, "the files' sums")
        sums = {name: made for part in everywhere for name, made in part.items()}
        return look(CheckpointFiles(paths, sums))
    saved = {name: manifest[name] for name in wanted}
    with ThreadPoolExecutor(1) as beside:
        check = beside.submit(_damage_of, paths, saved, manifest, mine)
        looked = look(CheckpointFiles(paths, saved))
        failure = check.result()
    raise_together(failure, collectives, DamagedCheckpointError)
    return looked


def check_files_alone(
    paths: CheckpointPaths, listing: Listing, wanted: Sequence[str]
) -> CheckpointFiles:
    """As :func:`check_files`, by one process that has no others.

    Raises:
        DamagedCheckpointError: a file is missing or damaged.
    """
    failure = _missing(paths, listing, wanted)
    sums: dict[str, FileSums] = {}
    if failure is None:
        sums, failure = _check_share(paths, listing, wanted, _Share(0, 1))
    if failure is not None:
        raise DamagedCheckpointError(failure)
    return CheckpointFiles(paths, sums)


@dataclass(frozen=True, slots=True)
class _Share:
    """Whose part of the bytes is to be looked at."""

    rank: int
    num_ranks: int


def _missing(paths: CheckpointPaths, listing: Listing, wanted: Sequence[str]) -> str | None:
    missing = [name for name in wanted if name not in listing.found]
    return _some([missing_file(paths.folder / name, _whose(name)) for name in missing]) or None


def missing_file(path: Path, whose: str = "") -> str:
    """The message about a file that is not there."""
    return (
        f"{path} {whose}is missing: the checkpoint is incomplete or another tool's; load another "
        "tag"
    )


def _unreadable(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"{path}, which rank 0 has found, is not there for this rank: load from a folder that "
            "all hosts share"
        )
    return (
        f"{path} cannot be read ({type(error).__name__}: {error}): mend the file system, or load "
        "another tag"
    )


def list_files_alone(paths: CheckpointPaths) -> Listing:
    """What this process finds.

    Raises:
        DamagedCheckpointError: the manifest is damaged, or names other files than there are.
        CheckpointError: the manifest is of a later version.
    """
    found = dict(_find(paths))
    manifest_path = paths.zero / MANIFEST
    if not manifest_path.is_file():
        logger.warning(
            "%s has no %s, as checkpoints of plain DeepSpeed and of older versions: damage is "
            "found by the files' own checksums where they have any, files of another save are not",
            paths.folder,
            MANIFEST,
        )
        return Listing(found, None)
    manifest = unpack_manifest(manifest_path)
    _check_sizes(paths, found, manifest.files)
    return Listing(found, manifest.files)


def _find(paths: CheckpointPaths) -> Iterator[tuple[str, int]]:
    """Every file that might be read by somebody as a part of the checkpoint, and its bytes."""
    for path in paths.folder.glob("*_states.pt"):
        yield path.name, path.stat().st_size
    for folder, _, names in os.walk(paths.zero):
        for name in names:
            path = Path(folder, name)
            if name.endswith(".pt") and path.is_file():
                yield path.relative_to(paths.folder).as_posix(), path.stat().st_size


def _check_sizes(
    paths: CheckpointPaths, found: Mapping[str, int], manifest: Mapping[str, FileSums]
) -> None:
    """
    Raises:
        DamagedCheckpointError: a file is there that was not saved, or has another length.
    """
    wrong = [
        f"{paths.folder / name} was not saved with the checkpoint (its {MANIFEST} does not have "
        "it): take it away, or load another tag"
        for name in sorted(found.keys() - manifest.keys())
    ]
    wrong += [
        f"{paths.folder / name} {_whose(name)}is damaged: it has {found[name]} bytes where "
        f"{manifest[name].num_bytes} were saved; {ADVICE}"
        for name in sorted(found.keys() & manifest.keys())
        if found[name] != manifest[name].num_bytes
    ]
    if wrong:
        raise DamagedCheckpointError(_some(wrong))


def _whose(name: str) -> str:
    whose = CheckpointPaths.state_of(name)
    return "" if whose is None else f"({whose[1]} of parameter '{whose[0]}') "


def _check_share(
    paths: CheckpointPaths, listing: Listing, wanted: Sequence[str], share: _Share
) -> tuple[dict[str, FileSums], str | None]:
    """Sums of the files, and what is wrong with this rank's share of them; None for nothing.

    Without a manifest the sums are those of the share only.
    """
    if listing.manifest is None:
        return _sums_of(paths, listing.found, wanted, share)
    sums = {name: listing.manifest[name] for name in wanted}
    return sums, _damage_of(paths, sums, listing.manifest, share)


def _damage_of(
    paths: CheckpointPaths,
    sums: Mapping[str, FileSums],
    manifest: Mapping[str, FileSums],
    share: _Share,
) -> str | None:
    units = [
        (name, begin, min(begin + _UNIT_BLOCKS, len(file.blocks)))
        for name, file in sums.items()
        for begin in range(0, len(file.blocks), _UNIT_BLOCKS)
    ]
    damaged: dict[str, list[int]] = {}
    failures: list[str] = []

    def check(unit: tuple[str, int, int]) -> list[int] | OSError:
        name, begin, end = unit
        try:
            return damaged_blocks(paths.folder / name, sums[name], begin, end)
        except OSError as error:
            return error

    sizes = [(end - begin) * BLOCK_BYTES for _, begin, end in units]
    # What is used first is checked last, and is then still in memory where not all finds room.
    mine = _shared(units, sizes, share)[::-1]
    results = in_threads(check, mine, waits=True)
    for (name, _, _), result in zip(mine[::-1], results[::-1], strict=True):
        if isinstance(result, OSError):
            failures.append(_unreadable(paths.folder / name, result))
        elif result:
            damaged.setdefault(name, []).extend(result)
    failures += [
        describe_damage(paths, name, manifest, blocks)
        for name, blocks in list(damaged.items())[:_DESCRIBED]
    ]
    more = len(damaged) - _DESCRIBED
    return _some(failures, more) or None


def _sums_of(
    paths: CheckpointPaths,
    found: Mapping[str, int],
    wanted: Sequence[str],
    share: _Share,
) -> tuple[dict[str, FileSums], str | None]:
    """Sums of files that no manifest lists, each held against its archive's checksums."""

    def check(name: str) -> FileSums | str:
        path = paths.folder / name
        try:
            sums = sum_file(path)
            if Archive(CheckedFile(path, sums)).bad_records():
                return describe_damage(paths, name, {name: sums}, [])
        except CheckpointError as error:
            return f"{_whose(name)}{error}"
        except OSError as error:
            return _unreadable(path, error)
        except Exception as error:  # the other ranks must hear of it, whatever it is
            return f"{path} cannot be read ({type(error).__name__}: {error}): load another tag"
        return sums

    mine = _shared(wanted, [found[name] for name in wanted], share)
    results = dict(zip(mine, in_threads(check, mine, waits=True), strict=True))
    failures = [text for text in results.values() if isinstance(text, str)]
    made = {name: sums for name, sums in results.items() if isinstance(sums, FileSums)}
    return made, _some(failures) or None


def _some(failures: Sequence[str], more: int = 0) -> str:
    more += max(0, len(failures) - _DESCRIBED)
    return "; ".join([*failures[:_DESCRIBED], *([f"and {more} more"] if more > 0 else [])])


def _shared(items: Sequence[_T], sizes: Iterable[int], share: _Share) -> list[_T]:
    """A rank's share: each goes, in order, to the rank that has the least so far."""
    loads = [0] * share.num_ranks
    mine: list[_T] = []
    for item, size in zip(items, sizes, strict=True):
        rank = loads.index(min(loads))
        loads[rank] += size + BLOCK_BYTES // 16  # opening a file takes time, too
        if rank == share.rank:
            mine.append(item)
    return mine
