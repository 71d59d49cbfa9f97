"""Are the files of a checkpoint those that were saved? One pass, before anything is made of them.

With a manifest every byte of the wanted files is held against its checksums; without one, against
the checksums that the archives themselves have (zip's CRC-32 of each record).
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from hytrain.checkpoint import inert
from hytrain.checkpoint.files import BLOCK_BYTES, FileSums, damaged_blocks
from hytrain.checkpoint.manifest import MANIFEST, unpack_manifest
from hytrain.checkpoint.universal import CheckpointPaths
from hytrain.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_R = TypeVar("_R")

_THREADS = 8
"""They wait for the disk, or sum bytes: neither needs Python's lock."""
_SHOWN = 5
"""Problems that a message names at most."""
_IS_MISSING = "is missing: the checkpoint is incomplete or another tool's; load another tag"
_ADVICE = f"load another tag (or take {MANIFEST} away, if you have changed the file yourself)"


@dataclass(frozen=True, slots=True)
class Listing:
    """What is in a checkpoint's folder.

    Attributes:
        found: path in the folder -> bytes, of all that might be a checkpoint's.
        manifest: what was saved; None where nothing says so.
        saved_at: when, in seconds since 1970; 0 where nothing says so.
    """

    found: Mapping[str, int]
    manifest: Mapping[str, FileSums] | None
    saved_at: float = 0.0


def list_files(paths: CheckpointPaths) -> Listing:
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
    return Listing(found, manifest.files, manifest.saved_at)


def _find(paths: CheckpointPaths) -> Iterator[tuple[str, int]]:
    """Every file that might be read by somebody as a part of the checkpoint, and its bytes."""
    for path in paths.folder.glob("*_states.pt"):
        yield path.name, path.stat().st_size
    for folder, _, names in os.walk(paths.zero):
        for name in names:
            path = Path(folder, name)
            if name.endswith(".pt") and path.is_file():
                yield paths.name_of(path), path.stat().st_size


def _check_sizes(
    paths: CheckpointPaths, found: Mapping[str, int], manifest: Mapping[str, FileSums]
) -> None:
    """Raises a DamagedCheckpointError where a file was not saved, or has another length."""
    wrong = [
        f"{paths.folder / name} was not saved with the checkpoint (its {MANIFEST} does not have "
        "it): take it away, or load another tag"
        for name in sorted(found.keys() - manifest.keys())
    ]
    wrong += [
        f"{_named(paths, name)} is damaged: it has {found[name]} bytes where "
        f"{manifest[name].num_bytes} were saved; {_ADVICE}"
        for name in sorted(found.keys() & manifest.keys())
        if found[name] != manifest[name].num_bytes
    ]
    if wrong:
        raise DamagedCheckpointError(first_of(wrong))


def find_damage(
    paths: CheckpointPaths,
    listing: Listing,
    wanted: Sequence[str],
    rank: int = 0,
    num_ranks: int = 1,
) -> str | None:
    """Reads a rank's share of the wanted files' bytes; never raises.

    ``listing`` and ``wanted``, paths in the folder, are the same on all ranks. Returns what is
    missing or damaged, as one message.
    """
    missing = [name for name in wanted if name not in listing.found]
    if missing:
        return first_of([missing_file(paths, name) for name in missing])
    if listing.manifest is None:
        sizes = [listing.found[name] for name in wanted]
        mine = [wanted[index] for index in _share(sizes, rank, num_ranks)]
        problems = _in_threads(partial(_damage_by_own_sums, paths), mine)
    else:
        problems = _damage_by_manifest(paths, listing.manifest, wanted, rank, num_ranks)
    return first_of([problem for problem in problems if problem is not None]) or None


def check_files(paths: CheckpointPaths, listing: Listing, wanted: Sequence[str]) -> None:
    """As :func:`find_damage`, for all of the bytes; raises a DamagedCheckpointError."""
    problem = find_damage(paths, listing, wanted)
    if problem is not None:
        raise DamagedCheckpointError(problem)


def load_file(path: Path, *, trusted: bool = False) -> Any:
    """A file's contents, tensors on the CPU: its elements are mapped, and read where they are used.

    ``trusted``: objects of all classes are made, which runs code that the file names.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        return inert.load(path, mmap=True, trusted=trusted)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} {_IS_MISSING}") from error
    except OSError as error:
        raise CheckpointError(_unreadable(path, error)) from error


def load_states(path: Path, *, trusted: bool = False) -> Mapping[str, Any]:
    """As :func:`load_file`, of a file whose contents have names.

    Raises:
        DamagedCheckpointError: they have none.
        CheckpointError: it cannot be read.
    """
    stored = load_file(path, trusted=trusted)
    if not isinstance(stored, Mapping):
        raise DamagedCheckpointError(
            f"{path} holds an object of type {type(stored).__name__} where a checkpoint has a "
            "mapping of names: load another tag"
        )
    return cast("Mapping[str, Any]", stored)


def missing_file(paths: CheckpointPaths, name: str) -> str:
    """The message about a file (its path in the folder) that is not there."""
    return f"{_named(paths, name)} {_IS_MISSING}"


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


def _damage_by_manifest(
    paths: CheckpointPaths,
    manifest: Mapping[str, FileSums],
    wanted: Sequence[str],
    rank: int,
    num_ranks: int,
) -> list[str]:
    """Large files are shared by blocks."""
    step = 64
    units = [
        (name, begin, min(begin + step, len(manifest[name].blocks)))
        for name in wanted
        for begin in range(0, len(manifest[name].blocks), step)
    ]
    sizes = [(end - begin) * BLOCK_BYTES for _, begin, end in units]
    # What is used first is checked last, and is then still in memory where not all finds room.
    mine = [units[index] for index in reversed(_share(sizes, rank, num_ranks))]

    def check(unit: tuple[str, int, int]) -> list[int] | str:
        name, begin, end = unit
        try:
            return damaged_blocks(paths.folder / name, manifest[name], begin, end)
        except OSError as error:
            return _unreadable(paths.folder / name, error)

    damaged: dict[str, list[int]] = {}
    problems: list[str] = []
    for (name, _, _), result in zip(mine, _in_threads(check, mine), strict=True):
        if isinstance(result, str):
            problems.append(result)
        elif result:
            damaged.setdefault(name, []).extend(result)
    for name, blocks in damaged.items():
        low, high = manifest[name].bounds(min(blocks))
        more = f" and {len(blocks) - 1} other places" if len(blocks) > 1 else ""
        problems.append(
            f"{_named(paths, name)} is damaged, or another save's (the checksum of bytes {low} to "
            f"{high}{more} is not the one that was saved); {_ADVICE}"
        )
    return problems


def _damage_by_own_sums(paths: CheckpointPaths, name: str) -> str | None:
    path = paths.folder / name
    try:
        if _is_whole(path):
            return None
    except OSError as error:
        return _unreadable(path, error)
    except Exception as error:  # what zipfile makes of a damaged directory is manifold
        return str(inert.unreadable(_named(paths, name), error))
    return f"{_named(paths, name)} is damaged (by its own checksums); load another tag"


def _is_whole(path: Path) -> bool:
    """Whether all records are what was written by their own checksums; may raise anything."""
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        inert.check_records(infos, path.stat().st_size)
        if not any(info.CRC for info in infos):
            return True  # torch.serialization.set_crc32_options(False)
        try:
            return archive.testzip() is None
        except OSError:
            raise
        except Exception:  # what zipfile makes of damaged headers is manifold
            return False


def _named(paths: CheckpointPaths, name: str) -> str:
    whose = CheckpointPaths.state_of(name)
    tensor = "" if whose is None else f" ({whose[1]} of parameter '{whose[0]}')"
    return f"{paths.folder / name}{tensor}"


def first_of(problems: Sequence[str]) -> str:
    """A message of the first problems, and how many more there are; empty for none."""
    more = len(problems) - _SHOWN
    return "; ".join([*problems[:_SHOWN], *([f"and {more} more"] if more > 0 else [])])


def _share(sizes: Sequence[int], rank: int, num_ranks: int) -> list[int]:
    """Indices of a rank's share: each goes, in order, to the rank that has the least so far."""
    loads = [0] * num_ranks
    mine: list[int] = []
    for index, size in enumerate(sizes):
        least = loads.index(min(loads))
        loads[least] += size + BLOCK_BYTES // 16  # opening a file takes time, too
        if least == rank:
            mine.append(index)
    return mine


def _in_threads(call: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(call, items))
