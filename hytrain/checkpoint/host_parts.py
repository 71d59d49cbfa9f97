"""Hosts that share no folder: each keeps a part of a checkpoint, in a folder of its own.

Whether they share one is found by making it. Rank 0 has made a folder of a random name; if another
rank does not see it and can make it, the two have different ones (if it were shared, the server
would say that it is there, whatever this host has cached). The first rank of a host then does for
its folder what rank 0 does for its own: lock, rename, ``latest``, all at the same time.

A parameter's state is in one part, that of the host whose rank wrote it; all else is in each. The
manifest, the same in all, says which host has what. ``hytrain checkpoint merge`` joins the parts.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from hytrain.checkpoint.file_writers import FileWriters
from hytrain.checkpoint.manifest import MANIFEST
from hytrain.checkpoint.stored_files import StoredFiles, listed
from hytrain.checkpoint.summed_files import SummingFile, finish_file
from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.exchange import raise_together
from hytrain.comm.local_processes import Process, this_process
from hytrain.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)

_MARK = "part"
_BLOCK_BYTES = 16 * 2**20
_ADVICE = "save into a folder that all ranks of a host share; nothing was saved"


@dataclass(frozen=True, slots=True)
class Parts:
    """Which ranks have which part of a checkpoint.

    Attributes:
        makers: for each rank, the rank that made its folder.
        hosts: for each rank, its host's name.
    """

    makers: Sequence[int]
    hosts: Sequence[str]

    @property
    def are_several(self) -> bool:
        return len(set(self.makers)) > 1

    def has_made(self, rank: int) -> bool:
        """Whether a rank made its folder: that rank does what is done once per folder."""
        return self.makers[rank] == rank

    def share_of(self, rank: int) -> float:
        """The approximate share of the state that is in a rank's folder."""
        return Counter(self.makers)[self.makers[rank]] / len(self.makers)

    def hosts_of(self, written: Sequence[Collection[str]]) -> dict[str, str]:
        """File -> host, of files in one part only; ``written``: the files of each rank."""
        if not self.are_several:
            return {}
        makers: dict[str, set[int]] = {}
        for rank, names in enumerate(written):
            for name in names:
                makers.setdefault(name, set()).add(self.makers[rank])
        return {name: self.hosts[min(of)] for name, of in makers.items() if len(of) == 1}

    def tell(self, folder: Path) -> None:
        """Logs that there are several parts, and what that means."""
        ranks_of = Counter(self.hosts[maker] for maker in self.makers)
        each = ", ".join(f"{host} ({number} ranks)" for host, number in ranks_of.items())
        logger.warning(
            "%s is not one folder for all hosts: each has saved a part of the checkpoint into its "
            "own, %s. All of them are needed: load it on these hosts, or put the parts together "
            "with `hytrain checkpoint merge`",
            folder,
            each,
        )


def find_parts(saving: Path, collectives: ShardCollectives) -> Parts:
    """Makes the folder that rank 0 has made, if this rank does not see it; a collective.

    Raises:
        CheckpointError: it cannot be made, or a rank sees another folder than an earlier rank of
            its host. What was made here is removed.
    """
    rank = collectives.rank
    failure, has_made = None, rank == 0
    if rank != 0:
        try:
            has_made = _make(saving, rank)
        except OSError as error:
            failure = f"{saving} cannot be made ({type(error).__name__}: {error}): {_ADVICE}"
    found: list[tuple[str | None, bool, Process]] = collectives.gather_objects(
        (failure, has_made, this_process()), "the ranks' folders to save in"
    )
    machines = [process.machine for _, _, process in found]
    apart = [r for r, (_, made, _) in enumerate(found) if made and machines[r] in machines[:r]]
    if apart or any(problem for problem, *_ in found):
        if has_made and rank != 0:
            shutil.rmtree(saving, ignore_errors=True)
        if rank in apart:
            failure = f"{saving}, which a rank of this host has made, is not there: {_ADVICE}"
        raise_together(failure, collectives)
    makers = [0] * collectives.world_size
    if any(made for _, made, _ in found[1:]):
        makers = collectives.gather_objects(_maker(saving), "the makers of the ranks' folders")
        if has_made:
            (saving / _MARK).unlink(missing_ok=True)
    return Parts(makers, [process.host for _, _, process in found])


def _make(saving: Path, rank: int) -> bool:
    """Makes a folder, unless it is there; returns whether it was made."""
    if saving.is_dir():
        return False
    saving.parent.mkdir(parents=True, exist_ok=True)
    try:
        saving.mkdir()
    except FileExistsError:
        return False
    (saving / _MARK).write_text(str(rank))
    return True


def _maker(saving: Path) -> int:
    try:
        return int((saving / _MARK).read_text())
    except FileNotFoundError:
        return 0


def copy_to_parts(
    paths: Iterable[Path],
    files: FileWriters,
    parts: Parts,
    collectives: ShardCollectives,
    device: torch.device,
) -> None:
    """Copies files that rank 0 has written to the other folders; a collective.

    Their sums, or what failed, are in ``files``.
    """
    if not parts.are_several:
        return
    rank = collectives.rank
    for path in paths:
        content = torch.empty(0, dtype=torch.uint8)
        if rank == 0 and files.failure is None:
            size = path.stat().st_size
            content = torch.from_file(str(path), size=size, dtype=torch.uint8)  # mapped
        size = collectives.object_from_first(content.numel(), "the size of a file for all hosts")
        copies: list[SummingFile] = []
        if rank != 0 and parts.has_made(rank):
            files.try_to(partial(_open, path, copies), f"{path} could not be written")
        for begin in range(0, size, _BLOCK_BYTES):
            block = torch.empty(min(_BLOCK_BYTES, size - begin), dtype=torch.uint8)
            if rank == 0:
                block.copy_(content[begin : begin + block.numel()])
            sent = block.to(device) if collectives.is_nccl else block
            collectives.broadcast_from_first(sent)
            for copy in copies:
                copy.write(sent.cpu().numpy().data)
        for copy in copies:
            files.try_to(partial(_finish, path, copy, files), f"{path} could not be written")


def _open(path: Path, copies: list[SummingFile]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    copies.append(SummingFile(path))


def _finish(path: Path, copy: SummingFile, files: FileWriters) -> None:
    files.sums[path] = finish_file(copy)


def find_holders(
    files: StoredFiles, collectives: ShardCollectives
) -> tuple[StoredFiles, dict[str, int]]:
    """Finds which host has which files; a collective.

    ``files``: as rank 0 has found them, with this rank's paths.

    Returns:
        The files, all of which were found; and for each the rank that reads and checks it, on a
        host that has it: for a file that all hosts have, a rank of this host.

    Raises:
        DamagedCheckpointError: a file is on no host, or a host lacks one that all need.
    """
    assert files.manifest is not None, "which says that there are parts"
    found: list[tuple[frozenset[str], str | None, Process]] = collectives.gather_objects(
        (*_found_here(files), this_process()), "the ranks' parts of a checkpoint"
    )
    if problems := {f"on host {at.host}: {text}" for _, text, at in found if text is not None}:
        raise DamagedCheckpointError("; ".join(sorted(problems)))
    _refuse_missing(files, found)
    machines = [at.machine for *_, at in found]
    holders: dict[str, int] = {}
    for number, name in enumerate(sorted(files.manifest.files)):
        at = machines[collectives.rank]
        if name in files.hosts:
            at = machines[next(rank for rank, (names, *_) in enumerate(found) if name in names)]
        beside = [rank for rank, machine in enumerate(machines) if machine == at]
        holders[name] = beside[number % len(beside)]
    sizes = {name: sums.num_bytes for name, sums in files.manifest.files.items()}
    return replace(files, found=sizes), holders


def _found_here(files: StoredFiles) -> tuple[frozenset[str], str | None]:
    """This rank's files, and what is wrong with them."""
    if not (files.paths.zero / MANIFEST).is_file():
        return frozenset(), None
    try:
        here = StoredFiles.of(files.paths)
    except (CheckpointError, OSError) as error:
        return frozenset(), str(error)
    if here.manifest != files.manifest:
        return frozenset(), f"{files.paths.folder} is of another save than rank 0's"
    return frozenset(here.found), None


def _refuse_missing(
    files: StoredFiles, found: Sequence[tuple[frozenset[str], str | None, Process]]
) -> None:
    here = sorted({at.host for *_, at in found})
    anywhere = frozenset[str]().union(*(names for names, *_ in found))
    missing = sorted(files.hosts.keys() - anywhere)
    words: list[str] = []
    if missing:
        whose = sorted({files.hosts[name] for name in missing})
        words.append(
            f"{listed(missing)} ({len(missing)} files), which {' and '.join(whose)} saved, are on "
            f"none of the hosts {', '.join(here)}"
        )
    common = set(files.saved) - files.hosts.keys()
    for host in here:
        of_host = [names for names, _, at in found if at.host == host]
        if lacking := sorted(common - frozenset[str]().union(*of_host)):
            words.append(f"{host} has no {listed(lacking)}")
    if words:
        hosts = ", ".join(sorted(set(files.hosts.values())))
        raise DamagedCheckpointError(
            f"parts of {files.paths.folder} are missing: {'; '.join(words)}. It was saved into "
            f"folders of their own by {hosts}: load it there, or put the parts together with "
            "`hytrain checkpoint merge`"
        )
