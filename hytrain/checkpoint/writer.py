"""Writes a checkpoint: all ranks in parallel, one parameter at a time.

All files go into a folder of the save's own, which takes the tag's place when every rank has said
that its files are whole (``commit.py``); ``latest`` is written after that. Whatever fails on one
rank fails the save on all of them and leaves the tag and ``latest`` as they were.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist

from hytrain.checkpoint.checks import unusable_names
from hytrain.checkpoint.commit import begin_save, finish_save, give_up_save, seen_from
from hytrain.checkpoint.gather import Delivery, ParameterPlace, gather_states, list_parameters
from hytrain.checkpoint.manifest import MANIFEST, pack_manifest
from hytrain.checkpoint.sums import FileSums, SummingFile
from hytrain.checkpoint.sync import sync_files
from hytrain.checkpoint.universal import (
    LATEST,
    STATES,
    STEP,
    CheckpointPaths,
    pack_optimizer_state,
    pack_tensor,
)
from hytrain.comm.collectives import ShardCollectives
from hytrain.comm.exchange import from_first, raise_together
from hytrain.errors import CheckpointError
from hytrain.optimizer.kept_state import KeptState


def assign_writers(owned: Sequence[Sequence[int]], num_ranks: int) -> list[int]:
    """Which rank writes each parameter: balanced by size, and near the data where that is free.

    Args:
        owned: for each parameter, the elements of it that each rank owns.
        num_ranks: ranks that write.

    Returns:
        A rank for each parameter; the same on all ranks, since only the arguments decide.
    """
    sizes = [sum(parts) for parts in owned]
    writers = [0] * len(sizes)
    loads = [0] * num_ranks
    target = sum(sizes) / num_ranks
    # Large ones first: what is left to even out at the end is small.
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        by_ownership = sorted(range(num_ranks), key=lambda r: (-owned[index][r], loads[r], r))
        fitting = [rank for rank in by_ownership if loads[rank] + sizes[index] <= target]
        lightest = min(range(num_ranks), key=lambda r: (loads[r], -owned[index][r], r))
        writers[index] = fitting[0] if fitting else lightest
        loads[writers[index]] += sizes[index]
    return writers


def plan_rounds(places: Sequence[ParameterPlace], num_ranks: int) -> list[list[Delivery]]:
    """Rounds in which every rank gets at most one parameter, of about the same size for all."""
    owned = [[0] * num_ranks for _ in places]
    for parts, place in zip(owned, places, strict=True):
        for piece in place.pieces:
            parts[piece.rank] = piece.end - piece.begin
    writers = assign_writers(owned, num_ranks)
    queues: list[list[ParameterPlace]] = [[] for _ in range(num_ranks)]
    for place, writer in zip(places, writers, strict=True):
        queues[writer].append(place)
    for queue in queues:
        queue.sort(key=lambda place: -place.numel)
    return [
        [Delivery(queue[turn], rank) for rank, queue in enumerate(queues) if turn < len(queue)]
        for turn in range(max(map(len, queues), default=0))
    ]


def write_file(path: Path, stored: object) -> FileSums:
    """Writes a file with ``torch.save``, or bytes as they are; it exists whole or not at all.

    Returns:
        The sums of what was written.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    # The name must not look like a state file: plain DeepSpeed reads whatever ends in ".pt".
    temporary = path.with_name(f"{path.stem}.tmp{os.getpid()}")
    try:
        with SummingFile(temporary) as file:
            if isinstance(stored, bytes):
                file.write(stored)
            else:
                torch.save(stored, cast("IO[bytes]", file))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return file.sums


logger = logging.getLogger(__name__)

SCRIPT = Path(__file__).with_name("zero_to_fp32.py")
"""A copy of it is beside the checkpoints."""

_UNCHANGED = '"latest" is unchanged, and so is what was saved under the tag before'


@dataclass(slots=True)
class _Writes:
    """This rank's writes; the first failure is kept, and nothing is written after it."""

    failure: str | None = None
    sums: dict[Path, FileSums] = field(default_factory=dict[Path, FileSums])

    def attempt(self, path: Path, make: Callable[[], object]) -> None:
        """Writes what ``make`` returns."""

        def write() -> None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.sums[path] = write_file(path, make())

        self.try_to(write, f"{path} could not be written", _UNCHANGED)

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
            self.failure = (
                f"{problem} ({type(error).__name__}: {error}): free space or mend the folder and "
                f"save again; {outcome}"
            )


def write_checkpoint(
    save_dir: Path,
    tag: str,
    kept: KeptState,
    model_states: Callable[[], dict[str, Any]],
    *,
    save_latest: bool,
) -> None:
    """Saves everything that a run needs to go on; a collective.

    Args:
        save_dir: folder of checkpoints; made where missing.
        tag: the checkpoint's name in it; the same on all ranks.
        kept: whose state is written; it is flushed, which changes no number.
        model_states: contents of the model states' file; called on rank 0 only.
        save_latest: whether ``latest`` will name this checkpoint.

    Raises:
        CheckpointError: a file could not be written on some rank; raised on all. The tag and
            ``latest`` are as they were, unless the message says otherwise. Or a parameter's name
            cannot be a folder's.
    """
    places = list_parameters(kept.layers)
    wrong = unusable_names(place.name for place in places)
    if wrong is not None:
        raise CheckpointError(wrong)
    kept.flush()
    collectives = kept.collectives
    is_first = collectives.rank == 0
    folder = save_dir / tag
    # Of different tags, which DeepSpeed warns of, rank 0's counts: all write into one folder.
    name = from_first(lambda: seen_from(save_dir, begin_save(folder)), collectives)
    saving = save_dir / str(name)
    paths = CheckpointPaths(saving)
    writes = _Writes(_missing(saving))

    def deliver(place: ParameterPlace, kind: str, tensor: torch.Tensor) -> None:
        writes.attempt(paths.state(place.name, kind), lambda: pack_tensor(tensor))
        if kind == STATES[-1]:
            step = torch.tensor(float(kept.hyper.steps[place.group]))
            writes.attempt(paths.state(place.name, STEP), lambda: step)

    rounds = plan_rounds(places, collectives.world_size)
    gather_states(rounds, collectives, kept.device, deliver)
    if is_first:
        writes.attempt(paths.optimizer_state, lambda: _optimizer_state(kept, places))
        writes.attempt(paths.model_states, model_states)
    writes.try_to(
        lambda: sync_files(saving, list(writes.sums)), f"{saving} could not be synced", _UNCHANGED
    )
    try:
        raise_together(writes.failure, collectives)
        sums = _all_sums(writes, saving, collectives)
        if is_first:
            writes.try_to(
                lambda: _write_manifest(paths, sums), f"{MANIFEST} could not be written", _UNCHANGED
            )
            _commit(writes, saving, folder, save_dir if save_latest else None, tag)
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


def _all_sums(writes: _Writes, saving: Path, collectives: ShardCollectives) -> dict[str, FileSums]:
    """Path in the tag's folder -> sums, of all files that all ranks have written; a collective."""
    mine = {path.relative_to(saving).as_posix(): sums for path, sums in writes.sums.items()}
    if collectives.world_size == 1:
        return mine
    everywhere: list[dict[str, FileSums]] = [{} for _ in range(collectives.world_size)]
    dist.all_gather_object(everywhere, mine, group=collectives.group)
    return {name: sums for part in everywhere for name, sums in part.items()}


def _write_manifest(paths: CheckpointPaths, sums: dict[str, FileSums]) -> None:
    path = paths.zero / MANIFEST
    path.parent.mkdir(exist_ok=True)
    write_file(path, pack_manifest(sums, saved_at=time.time()))
    sync_files(paths.folder, [path])


def _commit(writes: _Writes, saving: Path, folder: Path, latest_in: Path | None, tag: str) -> None:
    """On rank 0, when all files of all ranks are whole: the tag is the new checkpoint's."""
    problem = f"{folder} could not be replaced by {saving}"
    writes.try_to(lambda: finish_save(saving, folder), problem, _UNCHANGED)
    if latest_in is None or writes.failure is not None:
        return
    _put_script(latest_in)
    # The first of them is the one that is read first: it changes last.
    for path in [latest_in / name for name in reversed(LATEST)]:
        writes.try_to(
            lambda path=path: _write_latest(path, tag),
            f"{path} could not be written",
            f"the checkpoint is whole all the same: pass the tag '{tag}' to load it",
        )


def _put_script(save_dir: Path) -> None:
    """The way out that users of DeepSpeed look for, in this version's form."""
    path = save_dir / SCRIPT.name
    try:
        content = SCRIPT.read_bytes()
        if not path.is_file() or path.read_bytes() != content:
            write_file(path, content)
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
    except OSError as error:
        # The checkpoint is whole without it.
        logger.warning("%s could not be written: %s", path, error)


def _write_latest(path: Path, tag: str) -> None:
    # Only when the tag is there for good: after a loss of power it must not name what is gone.
    write_file(path, tag.encode())
    sync_files(path.parent, [path])


def _optimizer_state(kept: KeptState, places: Sequence[ParameterPlace]) -> dict[str, Any]:
    return pack_optimizer_state(
        kept.hyper.groups,
        kept.hyper.steps,
        places,
        clip=kept.pipeline.norm.settings.max_norm,
        num_ranks=kept.collectives.world_size,
    )
