"""Which rank reads what of a checkpoint whose parts are on several hosts; see parts.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hytrain.checkpoint.manifest import MANIFEST
from hytrain.checkpoint.stored_files import StoredFiles, listed
from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.local_processes import Process, this_process
from hytrain.errors import CheckpointError, DamagedCheckpointError


def find_holders(
    files: StoredFiles, collectives: ShardCollectives
) -> tuple[StoredFiles, dict[str, int]]:
    """Looks which host has which files; a collective.

    ``files``: as rank 0 has found them, with this rank's paths.

    Returns:
        The files, all of which were found; and of each a rank of a host that has it, by which it is
        read and checked: of what all hosts have, one of this host.

    Raises:
        DamagedCheckpointError: some are on no host, or a host lacks what all need.
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
    for number, name in enumerate(sorted(files.manifest)):
        at = machines[collectives.rank]
        if name in files.hosts:
            at = machines[next(rank for rank, (names, *_) in enumerate(found) if name in names)]
        beside = [rank for rank, machine in enumerate(machines) if machine == at]
        holders[name] = beside[number % len(beside)]
    sizes = {name: sums.num_bytes for name, sums in files.manifest.items()}
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
    manifest: Mapping[str, object] = files.manifest or {}
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
    common = manifest.keys() - files.hosts.keys()
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
