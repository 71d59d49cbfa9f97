"""Looks at checkpoints from outside of a training: which there are, and are they whole.

One process, no engine, no torch.distributed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hytrain.checkpoint.checks import stored_names
from hytrain.checkpoint.commit import is_unfinished, saved_tags
from hytrain.checkpoint.file_checks import CheckpointFiles, check_files_alone, list_files_alone
from hytrain.checkpoint.manifest import MANIFEST, unpack_manifest
from hytrain.checkpoint.stored_weights import open_checkpoint, stored_model
from hytrain.checkpoint.tags import look_up_tag
from hytrain.checkpoint.universal import LATEST, CheckpointPaths, OptimizerRecord
from hytrain.errors import CheckpointError

Kind = Literal["hytrain", "universal", "deepspeed", "unfinished", "damaged"]


def locate(given: Path, tag: str | None) -> Path:
    """The folder of one checkpoint.

    Args:
        given: a folder of checkpoints, or a checkpoint's own.
        tag: which of them; None: the latest.

    Raises:
        CheckpointError: there is none.
    """
    if not given.is_dir():
        raise CheckpointError(
            f"{given} is no folder: give the folder that checkpoints were saved in"
        )
    if tag is None and not (given / LATEST[0]).exists() and _is_checkpoint(given):
        return given
    name = look_up_tag(given, tag)
    if name is None:
        tags = ", ".join(saved_checkpoints(given)) or "none"
        raise CheckpointError(
            f"{given} has no file '{LATEST[0]}': give --tag (checkpoints there: {tags})"
        )
    return given / name


def saved_checkpoints(folder: Path) -> list[str]:
    """Tags in a folder that are checkpoints by their files."""
    return [tag for tag in saved_tags(folder) if _is_checkpoint(folder / tag)]


def _is_checkpoint(folder: Path) -> bool:
    paths = CheckpointPaths(folder)
    return paths.zero.is_dir() or any(folder.glob("*_states.pt"))


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """What a checkpoint says of itself.

    Attributes:
        tag: its folder's name.
        kind: "hytrain" and "universal" load anywhere, "deepspeed" after its conversion; a save that
            is "unfinished" never; "damaged": it cannot be read.
        is_latest: a load without a tag takes it.
        step, skipped_steps: of the training; None where it does not say.
        num_ranks: that saved it.
        parameters: elements that are trained.
        num_bytes: of its files.
        saved_at: seconds since 1970; None where it does not say.
        dtype: of the training copy.
        versions: of what saved it.
        problem: why it is "damaged".
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
    """All checkpoints and unfinished saves of a folder; nothing but small files is read.

    Raises:
        OSError: the folder cannot be read.
    """
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
    except (CheckpointError, OSError) as error:
        problem = str(error)
    return CheckpointFacts(folder.name, "damaged", is_latest, size, problem=problem)


def _facts(paths: CheckpointPaths, is_latest: bool, size: int) -> CheckpointFacts:
    listing = list_files_alone(paths)
    small = [path.relative_to(paths.folder).as_posix() for path in (paths.optimizer_state,)]
    files = check_files_alone(paths, listing, small)
    OptimizerRecord.unpack(files.load(paths.optimizer_state))
    # The file with the model's weights is large: what is read of it is checked as it is read.
    states = paths.model_states.name
    if listing.manifest is None or states not in listing.manifest:
        files, _ = open_checkpoint(paths.folder)
    else:
        files = CheckpointFiles(paths, {**files.sums, states: listing.manifest[states]})
    stored: Mapping[str, Any] = files.load(paths.model_states)
    module: Mapping[str, Any] = stored.get("module") or {}
    trained = stored_names(listing.found)
    dtypes = {str(module[name].dtype).removeprefix("torch.") for name in trained & module.keys()}
    shapes: list[Mapping[str, Any]] = stored.get("param_shapes") or []
    manifest = paths.zero / MANIFEST
    saved_at = unpack_manifest(manifest).saved_at if manifest.is_file() else 0.0
    record: Mapping[str, Any] = stored.get("hytrain") or {}
    versions = {
        "deepspeed": str(stored.get("ds_version", "")),
        "hytrain": record.get("version", ""),
    }
    return CheckpointFacts(
        tag=paths.folder.name,
        kind="hytrain" if listing.manifest is not None else "universal",
        is_latest=is_latest,
        num_bytes=size,
        step=stored.get("global_steps"),
        skipped_steps=stored.get("skipped_steps"),
        num_ranks=stored.get("dp_world_size"),
        parameters=sum(shape.numel() for group in shapes for shape in group.values()),
        tensors=len(trained),
        saved_at=saved_at or None,
        dtype=", ".join(sorted(dtypes)) or None,
        versions={name: text for name, text in versions.items() if text},
    )


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verifying a checkpoint has found.

    Attributes:
        folder: the checkpoint's.
        has_manifest: whether every byte was held against what was saved; else against the files'
            own checksums, and files of another save would not be noticed.
        num_files, num_bytes: that were read.
        problem: None: it is whole.
    """

    folder: str
    has_manifest: bool
    num_files: int
    num_bytes: int
    problem: str | None


def verify(folder: Path) -> Verdict:
    """Reads every byte of a checkpoint and holds it against what was saved."""
    paths = CheckpointPaths(folder)
    has_manifest = (paths.zero / MANIFEST).is_file()
    checked: list[int] = []
    problem: str | None = None
    try:
        listing = list_files_alone(paths)
        wanted = sorted(listing.found if listing.manifest is None else listing.manifest)
        files = check_files_alone(paths, listing, wanted)
        checked = [sums.num_bytes for sums in files.sums.values()]
        if listing.manifest is None and paths.zero.is_dir():
            # Nothing says which files there were: that it has what a load needs is asked here.
            stored_model(*open_checkpoint(folder), None)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    return Verdict(str(folder), has_manifest, len(checked), sum(checked), problem)
