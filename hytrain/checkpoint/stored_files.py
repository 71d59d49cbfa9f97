"""The files of a checkpoint: which there are, and whether they are those that were saved.

With a manifest every byte of the wanted files is checked against its checksums; without one,
against the checksums that the archives themselves have (zip's CRC-32 of each record). This is one
pass, before anything is loaded from them.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hytrain.checkpoint import torch_files
from hytrain.checkpoint.gather import STATES
from hytrain.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from hytrain.checkpoint.progress import Progress
from hytrain.checkpoint.summed_files import BLOCK_BYTES, damaged_blocks
from hytrain.checkpoint.universal import CheckpointPaths
from hytrain.errors import DamagedCheckpointError

logger = logging.getLogger(__name__)

_THREADS = 8
"""They wait for the disk, or sum bytes: neither needs Python's lock."""
_UNIT_BLOCKS = 64
"""Blocks of a large file that one rank checks at once."""
_SHOWN = 5
_ADVICE = f"load another tag (or take {MANIFEST} away, if you have changed the file yourself)"


class _Unit(NamedTuple):
    """What a rank checks at once: a file, or its blocks ``[begin, end)``."""

    name: str
    num_bytes: int
    begin: int = 0
    end: int = 0


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The files in a checkpoint's folder.

    Attributes:
        found: path in the folder -> bytes, of all that might be a checkpoint's.
        manifest: what was saved; None if nothing says so.
    """

    paths: CheckpointPaths
    found: Mapping[str, int]
    manifest: Manifest | None

    @classmethod
    def of(cls, paths: CheckpointPaths) -> StoredFiles:
        """The files that this process finds.

        Raises:
            DamagedCheckpointError: the manifest is damaged, or does not have a file that is there,
                or has another length of it.
            CheckpointError: the manifest is of a later version.
        """
        files = cls.as_found(paths)
        if wrong := files.not_saved():
            raise DamagedCheckpointError(shortened(list(wrong.values()), "; "))
        return files

    @classmethod
    def as_found(cls, paths: CheckpointPaths) -> StoredFiles:
        """:meth:`of`, without comparing the files with the manifest.

        Raises:
            CheckpointError: the manifest is damaged or of a later version.
        """
        path = paths.zero / MANIFEST
        if path.is_file():
            return replace(cls.without_manifest(paths), manifest=read_manifest(path))
        logger.warning(
            "%s has no %s (plain DeepSpeed and older versions write none): damage is noticed only "
            "in files with checksums of their own, and files of another save are not noticed",
            paths.folder,
            MANIFEST,
        )
        return cls.without_manifest(paths)

    @classmethod
    def without_manifest(cls, paths: CheckpointPaths) -> StoredFiles:
        """The files that are there, as if there were no manifest."""
        return cls(paths, dict(_find(paths)), None)

    @property
    def hosts(self) -> dict[str, str]:
        """See :meth:`Manifest.hosts`."""
        return {} if self.manifest is None else self.manifest.hosts()

    @property
    def saved(self) -> Collection[str]:
        """Paths in the folder of the files that were saved; without a manifest, that are there."""
        return self.found if self.manifest is None else self.manifest.files

    @property
    def parameters(self) -> set[str]:
        """Names of the parameters that the checkpoint has state of."""
        # A name with "/" is a path, and on the way to it are folders that are no parameter's.
        # DeepSpeed's converter writes values of buffers and frozen weights, too, but no moments.
        states = map(CheckpointPaths.state_of, self.saved)
        return {state[0] for state in states if state is not None and state[1] != STATES[0]}

    def find_damage(self, wanted: Collection[str], rank: int = 0, num_ranks: int = 1) -> str | None:
        """Checks a rank's share of the wanted files' bytes; never raises.

        ``wanted``, paths in the folder, are the same on all ranks. Returns what is missing or
        damaged, as one message; None if nothing is.
        """
        problems = self.missing(wanted) or self._damage(wanted, rank, num_ranks)
        return shortened(problems, "; ") or None

    def all_damage(self) -> list[str]:
        """Reads every saved byte; returns all that is missing, damaged or not of this save."""
        wrong, saved = self.not_saved(), set(self.saved)
        there = sorted((saved & self.found.keys()) - wrong.keys())
        return [*wrong.values(), *self.missing(sorted(saved)), *self._damage(there, 0, 1)]

    def missing(self, wanted: Iterable[str]) -> list[str]:
        """Messages about those of these files that are not there."""
        return [
            f"{_named(self.paths, name)} {self._missing(name)}"
            for name in wanted
            if name not in self.found
        ]

    def _damage(self, wanted: Iterable[str], rank: int, num_ranks: int) -> list[str]:
        units = [unit for name in wanted for unit in self._units(name)]
        # What is used first is checked last: it is then still in memory if not all of it fits.
        mine = _share(units, rank, num_ranks)[::-1]
        total = sum(unit.num_bytes for unit in mine)
        progress = Progress(f"checking {self.paths.folder}", total, rank)

        def check(unit: _Unit) -> str | None:
            try:
                return self._damage_of(unit)
            except OSError as error:
                return _unreadable(self.paths.folder / unit.name, error)
            finally:
                progress.add(unit.num_bytes)

        with ThreadPoolExecutor(_THREADS) as pool:
            return [problem for problem in pool.map(check, mine) if problem is not None]

    def _units(self, name: str) -> Iterator[_Unit]:
        """A file's units: ranks share a large one, if the sums of its blocks are known."""
        if self.manifest is None:
            yield _Unit(name, self.found[name])
            return
        sums = self.manifest.files[name]
        for begin in range(0, len(sums.blocks), _UNIT_BLOCKS):
            end = min(begin + _UNIT_BLOCKS, len(sums.blocks))
            yield _Unit(name, sums.bounds(end - 1)[1] - sums.bounds(begin)[0], begin, end)

    def _damage_of(self, unit: _Unit) -> str | None:
        path, words = self.paths.folder / unit.name, _named(self.paths, unit.name)
        if self.manifest is None:
            return _damage_by_own_sums(path, words)
        sums = self.manifest.files[unit.name]
        blocks = damaged_blocks(path, sums, unit.begin, unit.end)
        if not blocks:
            return None
        low, high = sums.bounds(blocks[0])
        more = f" and {len(blocks) - 1} other places" if len(blocks) > 1 else ""
        return (
            f"{words} is damaged, or another save's (the checksum of bytes {low} to {high}{more} "
            f"is not the one that was saved); {_ADVICE}"
        )

    def _missing(self, name: str) -> str:
        if name not in self.hosts:
            return torch_files.IS_MISSING
        return (
            f"is missing: host {self.hosts[name]} has saved it, into a folder of its own; put the "
            "parts together with `hytrain checkpoint merge`"
        )

    def check(self, wanted: Iterable[str]) -> None:
        """Checks all bytes of the wanted files; raises a DamagedCheckpointError."""
        problem = self.find_damage(sorted(wanted))
        if problem is not None:
            raise DamagedCheckpointError(problem)

    def not_saved(self) -> dict[str, str]:
        """File -> message, for files that were not saved or have another length."""
        if self.manifest is None:
            return {}
        paths, found, manifest = self.paths, self.found, self.manifest.files
        wrong = {
            name: f"{paths.folder / name} was not saved with the checkpoint (its {MANIFEST} does "
            "not have it): take it away, or load another tag"
            for name in sorted(found.keys() - manifest.keys())
        }
        return wrong | {
            name: f"{_named(paths, name)} is damaged: it has {found[name]} bytes where "
            f"{manifest[name].num_bytes} were saved; {_ADVICE}"
            for name in sorted(found.keys() & manifest.keys())
            if found[name] != manifest[name].num_bytes
        }


def _find(paths: CheckpointPaths) -> Iterator[tuple[str, int]]:
    """Every file that some reader might take for a part of the checkpoint, and its bytes."""
    for path in paths.folder.glob("*_states.pt"):
        yield path.name, path.stat().st_size
    for folder, _, names in os.walk(paths.zero):
        for name in names:
            path = Path(folder, name)
            if name.endswith(".pt") and path.is_file():
                yield paths.name_of(path), path.stat().st_size


def _unreadable(path: object, error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return (
            f"{path}, which rank 0 has found, is not there for this rank: load from a folder that "
            "all hosts share"
        )
    return str(torch_files.unreadable(path, error))


def _damage_by_own_sums(path: Path, words: str) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            torch_files.check_records(infos, path.stat().st_size)
            has_sums = any(info.CRC for info in infos)  # torch need not write them
            if not has_sums or archive.testzip() is None:
                return None
    except Exception as error:  # zipfile may raise anything on a damaged directory
        return _unreadable(words, error)
    return f"{words} is damaged (by its own checksums); load another tag"


def _named(paths: CheckpointPaths, name: str) -> str:
    whose = CheckpointPaths.state_of(name)
    tensor = "" if whose is None else f" ({whose[1]} of parameter '{whose[0]}')"
    return f"{paths.folder / name}{tensor}"


def shortened(items: Sequence[str], separator: str) -> str:
    """The first items of a message's list, and how many more there are; empty for none."""
    more = len(items) - _SHOWN
    rest = [f"and {more} more"] if more > 0 else []
    return separator.join([*items[:_SHOWN], *rest])


def listed(names: Iterable[str]) -> str:
    """Names for a message: the first ones, and how many more there are."""
    return shortened([f"'{name}'" for name in names], ", ")


def _share(units: Sequence[_Unit], rank: int, num_ranks: int) -> list[_Unit]:
    """A rank's share: each unit goes, in order, to the rank that has the least so far."""
    loads = [0] * num_ranks
    mine: list[_Unit] = []
    for unit in units:
        least = loads.index(min(loads))
        loads[least] += unit.num_bytes + BLOCK_BYTES // 16  # opening a file takes time, too
        if least == rank:
            mine.append(unit)
    return mine
