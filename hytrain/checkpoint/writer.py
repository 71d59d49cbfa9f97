"""Writes a checkpoint: all ranks in parallel, one parameter at a time.

Every file is written under a temporary name and renamed when it is whole; ``latest`` is written
when all ranks have said that theirs are. Whatever fails on one rank fails the save on all of them
and leaves ``latest`` as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hytrain.checkpoint.checks import unusable_names
from hytrain.checkpoint.gather import Delivery, ParameterPlace, gather_states, list_parameters
from hytrain.checkpoint.universal import (
    LATEST,
    STATES,
    STEP,
    CheckpointPaths,
    pack_optimizer_state,
    pack_tensor,
)
from hytrain.errors import CheckpointError
from hytrain.optim.zero_optimizer import HyTrainZeroOptimizer
from hytrain.parallel.exchange import raise_together


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


def write_file(path: Path, stored: object) -> None:
    """Writes a file with ``torch.save``, or text as it is; it exists whole or not at all.

    Raises:
        OSError: the file cannot be written; nothing is left behind.
    """
    # The name must not look like a state file: plain DeepSpeed reads whatever ends in ".pt".
    temporary = path.with_name(f"{path.stem}.tmp{os.getpid()}")
    try:
        if isinstance(stored, str):
            temporary.write_text(stored, encoding="utf-8")
        else:
            torch.save(stored, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@dataclass(slots=True)
class _Writes:
    """This rank's writes; the first failure is kept, and nothing is written after it."""

    failure: str | None = None

    def attempt(self, path: Path, make: Callable[[], object]) -> None:
        if self.failure is not None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, make())
        except Exception as error:
            # A rank that raised here would leave the others waiting; it raises with them later.
            self.failure = (
                f"{path} could not be written ({type(error).__name__}: {error}): free space or "
                'mend the folder and save again; "latest" is unchanged'
            )


def write_checkpoint(
    save_dir: Path,
    tag: str,
    optimizer: HyTrainZeroOptimizer,
    model_states: Callable[[], dict[str, Any]],
    *,
    save_latest: bool,
) -> None:
    """Saves everything that a run needs to go on; a collective.

    Args:
        save_dir: folder of checkpoints; made where missing.
        tag: the checkpoint's name in it; the same on all ranks.
        optimizer: whose state is written; it is flushed, which changes no number.
        model_states: contents of the model states' file; called on rank 0 only.
        save_latest: whether ``latest`` shall name this checkpoint.

    Raises:
        CheckpointError: a file could not be written on some rank; raised on all. Or a parameter's
            name cannot be a folder's.
    """
    places = list_parameters(optimizer.layer_states)
    wrong = unusable_names(place.name for place in places)
    if wrong is not None:
        raise CheckpointError(wrong)
    optimizer.flush()
    collectives = optimizer.collectives
    paths = CheckpointPaths(save_dir / tag)
    writes = _Writes()

    def deliver(place: ParameterPlace, kind: str, tensor: torch.Tensor) -> None:
        writes.attempt(paths.state(place.name, kind), lambda: pack_tensor(tensor))
        if kind == STATES[-1]:
            step = torch.tensor(float(optimizer.steps[place.group]))
            writes.attempt(paths.state(place.name, STEP), lambda: step)

    rounds = plan_rounds(places, collectives.world_size)
    gather_states(rounds, collectives, optimizer.pipeline.streams.device, deliver)
    if collectives.rank == 0:
        writes.attempt(paths.optimizer_state, lambda: _optimizer_state(optimizer, places))
        writes.attempt(paths.model_states, model_states)
    raise_together(writes.failure, collectives)
    if collectives.rank == 0 and save_latest:
        for name in LATEST:
            writes.attempt(save_dir / name, lambda: tag)
    # Nobody returns before the checkpoint is there for all.
    raise_together(writes.failure, collectives)


def _optimizer_state(
    optimizer: HyTrainZeroOptimizer, places: Sequence[ParameterPlace]
) -> dict[str, Any]:
    return pack_optimizer_state(
        optimizer.param_groups,
        optimizer.steps,
        places,
        clip=optimizer.pipeline.norm.settings.max_norm,
        num_ranks=optimizer.collectives.world_size,
    )
