"""Inspects checkpoints outside of training: which there are, and whether they are whole.

One process, no engine, no torch.distributed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hytrain.checkpoint import torch_files
from hytrain.checkpoint.commit import is_unfinished, saved_tags
from hytrain.checkpoint.gather import STATES
from hytrain.checkpoint.manifest import MANIFEST
from hytrain.checkpoint.stored_files import StoredFiles, shortened
from hytrain.checkpoint.tags import look_up_tag
from hytrain.checkpoint.universal import (
    LATEST,
    RECORD,
    STEP,
    CheckpointPaths,
    OptimizerRecord,
    no_parameters,
)
from hytrain.errors import CheckpointError, DamagedCheckpointError

OPTIMIZER_SHARD = "optim_states.pt"
_RANK_OF_ZERO3 = re.compile(r"zero_pp_rank_\d+_mp_rank_00_model_states\.pt")
_MOST_RANKS = 2**20

Kind = Literal["hytrain", "universal", "deepspeed", "unfinished", "damaged"]


_INSIDE = ("*/*", "*/checkpoint-*/*")
"""Where subfolders of a folder have checkpoints: their own, or a Trainer's."""


def locate(given: Path, tag: str | None) -> Path:
    """The folder of one checkpoint.

    ``given``: a folder of checkpoints, or a checkpoint's own. ``tag``: which of them; None: the
    latest.

    Raises:
        CheckpointError: there is none.
    """
    if tag is None and not (given / LATEST[0]).exists() and _is_checkpoint(given):
        return given
    name = look_up_tag(given, tag)
    if name is None:
        tags = ", ".join(saved_checkpoints(given))
        if tags:
            raise CheckpointError(f"{given} has no file '{LATEST[0]}': give --tag, one of {tags}")
        marks = [f"{at}/{mark}" for at in _INSIDE for mark in ("zero", "*_states.pt")]
        inside = {path.relative_to(given).parts[0] for mark in marks for path in given.glob(mark)}
        if inside:
            names = ", ".join(str(given / name) for name in sorted(inside))
            raise CheckpointError(f"{given} has no checkpoint, but these have: {names}: give one")
        raise CheckpointError(
            f"{given} has no checkpoint: no file '{LATEST[0]}', no folder with a zero/ or a file "
            "*_states.pt in it, and no checkpoint-N of a Trainer's with these; give the folder "
            "that save_checkpoint, or a Trainer, wrote to"
        )
    return given / name


def saved_checkpoints(folder: Path) -> list[str]:
    """Tags in a folder that have a checkpoint's files, and the one that is named the latest.

    Raises:
        CheckpointError: the latest one is gone.
    """
    found = [tag for tag in saved_tags(folder) if _is_checkpoint(folder / tag)]
    latest = look_up_tag(folder, None)
    return found if latest is None or latest in found else [*found, latest]


def _is_checkpoint(folder: Path) -> bool:
    paths = CheckpointPaths(folder)
    return paths.zero.is_dir() or any(folder.glob("*_states.pt"))


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What a checkpoint says of itself; None if it does not say.

    Attributes:
        kind: "hytrain" and "universal" load anywhere, "deepspeed" after its conversion, an
            "unfinished" save never; "damaged": it cannot be read.
        is_latest: whether a load without a tag takes it.
        parameters: number of trained elements.
        saved_at: seconds since 1970.
        dtype: of the training copy.
    """

    tag: str
    kind: Kind
    is_latest: bool
    num_bytes: int
    step: int | None = None
    skipped_steps: int | None = None
    num_ranks: int | None = None
    parameters: int | None = None
    tensors: int | None = None
    saved_at: float | None = None
    dtype: str | None = None
    versions: Mapping[str, str] | None = None
    problem: str | None = None


def describe_folder(folder: Path) -> Iterator[CheckpointFacts]:
    """All checkpoints and unfinished saves of a folder; only small files are read."""
    try:
        latest = look_up_tag(folder, None)
    except CheckpointError:
        latest = None
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        if is_unfinished(path):
            yield CheckpointFacts(path.name, "unfinished", False, _size(path))
        elif _is_checkpoint(path):
            yield describe(path, is_latest=path.name == latest)


def describe(folder: Path, *, is_latest: bool) -> CheckpointFacts:
    """What one checkpoint says of itself."""
    paths = CheckpointPaths(folder)
    size = _size(folder)
    if not paths.zero.is_dir():
        return CheckpointFacts(folder.name, "deepspeed", is_latest, size)
    try:
        return _facts(paths, is_latest, size)
    except Exception as error:  # a file may raise anything
        problem = _told(paths, error)
    return CheckpointFacts(folder.name, "damaged", is_latest, size, problem=problem)


def _told(paths: CheckpointPaths, error: Exception) -> str:
    if isinstance(error, (CheckpointError, OSError)):
        return str(error)
    seen = f"{type(error).__name__}: {str(error)[:200]}"
    return f"{paths.folder} cannot be read as a checkpoint ({seen}): load another tag"


def _facts(paths: CheckpointPaths, is_latest: bool, size: int) -> CheckpointFacts:
    files = StoredFiles.of(paths)
    files.check([paths.name_of(paths.optimizer_state)])
    # The weights are not read, nor are their bytes checked: there are too many.
    stored, wanted = _read(files)
    if missing := files.missing(wanted):
        raise DamagedCheckpointError(shortened(missing, "; "))
    module: Mapping[str, Any] = stored["module"]
    trained = files.parameters
    dtypes = {str(module[name].dtype).removeprefix("torch.") for name in trained & module.keys()}
    shapes: list[Mapping[str, Any]] = stored.get("param_shapes") or []
    own: Mapping[str, Any] = stored.get(RECORD) or {}
    versions = {
        "deepspeed": str(stored.get("ds_version", ""))[:40],
        "hytrain": str(own.get("version", ""))[:40],
    }
    return CheckpointFacts(
        tag=paths.folder.name,
        kind="hytrain" if files.manifest is not None else "universal",
        is_latest=is_latest,
        num_bytes=size,
        step=_count(stored, "global_steps"),
        skipped_steps=_count(stored, "skipped_steps"),
        num_ranks=_count(stored, "dp_world_size"),
        parameters=sum(shape.numel() for group in shapes for shape in group.values()),
        tensors=len(trained),
        saved_at=(files.manifest and files.manifest.saved_at) or None,
        dtype=", ".join(sorted(dtypes)) or None,
        versions={name: text for name, text in versions.items() if text},
    )


def _count(stored: Mapping[str, Any], key: str) -> int | None:
    value = stored.get(key)
    if value is not None and (type(value) is not int or not 0 <= value < 2**63):
        raise CheckpointError(f"its {key}, a value of type {type(value).__name__}, is no count")
    return value


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a checkpoint.

    Attributes:
        has_manifest: whether every byte was checked against what was saved; else against the files'
            own checksums, and files of another save would not be noticed.
        problems: all that were found; empty if it is whole.
    """

    folder: str
    has_manifest: bool
    num_files: int
    num_bytes: int
    problems: tuple[str, ...]


def verify(folder: Path) -> Verdict:
    """Checks every byte of a checkpoint against what was saved, and that no part is missing."""
    paths = CheckpointPaths(folder)
    has_manifest = (paths.zero / MANIFEST).is_file()
    if is_unfinished(folder):
        words = f"{folder} is a save that was broken off: load another tag"
        return Verdict(str(folder), has_manifest, 0, 0, (words,))
    problems: list[str] = []
    try:
        files = StoredFiles.as_found(paths)
    except Exception as error:  # a file may raise anything
        problems.append(_told(paths, error))
        files = StoredFiles.without_manifest(paths)
    try:
        problems += files.all_damage()
        if files.manifest is None or not problems:
            is_universal = paths.zero.is_dir()
            problems += files.missing(_read(files)[1] if is_universal else _shards(files))
    except Exception as error:
        problems.append(_told(paths, error))
    num_files = len(files.found) + has_manifest
    return Verdict(str(folder), has_manifest, num_files, _size(folder), tuple(problems))


def _read(files: StoredFiles) -> tuple[Mapping[str, Any], list[str]]:
    """A universal checkpoint's model states, and the state files that it must have.

    Raises:
        CheckpointError: one cannot be read.
    """
    paths = files.paths
    record = OptimizerRecord.read(paths.optimizer_state)
    stored = torch_files.load_states(paths.model_states)
    shapes: list[Mapping[str, Any]] = stored.get("param_shapes") or []
    names = {name for group in (*shapes, *(record.names or ())) for name in group}
    names |= files.parameters
    if not names or not isinstance(stored.get("module"), Mapping):
        raise DamagedCheckpointError(no_parameters(paths))
    steps = (STEP,) if RECORD in stored else ()
    states = [
        paths.state(str(name), kind)
        for name in sorted(names)
        for kind in (*record.kinds.get(str(name), STATES), *steps)
    ]
    return stored, [paths.name_of(path) for path in states]


def _shards(files: StoredFiles) -> list[str]:
    """The files that DeepSpeed's own checkpoint must have."""
    paths = files.paths
    shards = [name for name in files.found if name.endswith(OPTIMIZER_SHARD)]
    parts = [paths.folder / name for name in files.found if _RANK_OF_ZERO3.match(name)]
    is_zero3 = bool(parts) and not paths.model_states.is_file()
    stored = torch_files.load_states(parts[0] if is_zero3 else paths.model_states)
    if not shards and stored.get("optimizer") is not None:
        return []  # without ZeRO the optimizer's state is in there
    prefixes = {name.partition("zero_pp_rank_")[0] for name in shards if "zero_pp_rank_" in name}
    kinds = [(prefix, OPTIMIZER_SHARD) for prefix in sorted(prefixes if shards else {""})]
    kinds += [("", "model_states.pt")] if is_zero3 else []
    ranks, sharded = (_count(stored, key) or 1 for key in ("dp_world_size", "mp_world_size"))
    if ranks * sharded > _MOST_RANKS:
        raise CheckpointError(f"it is of {ranks} x {sharded} ranks, more than any job has")
    return [
        f"{prefix}zero_pp_rank_{rank}_mp_rank_{part:02d}_{end}"
        for rank in range(ranks)
        for part in range(sharded)
        for prefix, end in kinds
    ]


def trainer_folders(output: Path) -> list[Path]:
    """The checkpoint folders in a Trainer's output folder, oldest first; empty for any other."""
    if not output.is_dir() or (output / LATEST[0]).exists():
        return []
    found = [path for path in output.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name)]
    found = [path for path in found if (path / LATEST[0]).is_file()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def one_checkpoint(given: Path, tag: str | None) -> tuple[Path, str | None]:
    """Finds the checkpoint folder that is meant in a Trainer's output folder, and the tag there.

    ``tag``: a tag, or a folder's name such as "checkpoint-50"; None: the newest folder. In any
    other folder, and if there is none of that name, what was given is returned.
    """
    for folder in reversed(trainer_folders(given)):
        if tag is None or tag == folder.name:
            return folder, None
        if tag in [path.name for path in folder.iterdir() if path.is_dir()]:
            return folder, tag
    return given, tag
