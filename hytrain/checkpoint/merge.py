"""Makes one checkpoint of the parts that several hosts have saved; see host_parts.py."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hytrain.checkpoint.commit import (
    begin_save,
    discard_replaced,
    finish_save,
    name_latest,
    remove_save,
)
from hytrain.checkpoint.manifest import MANIFEST
from hytrain.checkpoint.stored_files import StoredFiles, listed
from hytrain.checkpoint.summed_files import sync_names, write_file
from hytrain.checkpoint.universal import CheckpointPaths
from hytrain.errors import CheckpointError, DamagedCheckpointError


def merge_parts(folders: Sequence[Path], out: Path) -> Path:
    """Puts all files into one folder, ``out``/<tag>, by links if that is possible.

    Every byte is checked against its checksum. What ``out`` has under the tag is replaced when all
    is there.

    Raises:
        DamagedCheckpointError: a part is missing or damaged; the message has its files and host.
        CheckpointError: they are not of one save, or ``out`` cannot be written.
    """
    parts = [StoredFiles.of(CheckpointPaths(folder)) for folder in folders]
    first = parts[0]
    for part in parts:
        if not part.hosts:
            raise CheckpointError(
                f"{part.paths.folder} is no part of a checkpoint of several hosts"
            )
        if part.manifest != first.manifest:
            raise CheckpointError(
                f"{first.paths.folder} and {part.paths.folder} are not of one save: give the "
                "folders that the hosts of one job have saved, under one tag"
            )
    assert first.manifest is not None
    sources = {name: part for part in reversed(parts) for name in part.found}
    if missing := sorted(first.manifest.files.keys() - sources.keys()):
        hosts = ", ".join(sorted({first.hosts.get(name, "each host") for name in missing}))
        raise DamagedCheckpointError(
            f"{listed(missing)} ({len(missing)} files) are in none of the folders: give those of "
            f"{hosts}, too"
        )
    for part in parts:
        part.check(name for name, source in sources.items() if source is part)
    tag = first.paths.folder.name
    saving, lock = begin_save(out / tag)
    try:
        for name, part in sources.items():
            _bring(part.paths.folder / name, saving / name)
        manifest = CheckpointPaths(saving).zero / MANIFEST
        whole = {name: replace(sums, host=None) for name, sums in first.manifest.files.items()}
        write_file(manifest, replace(first.manifest, files=whole).pack())
        sync_names(saving, [manifest, *(saving / name for name in sources)])
        finish_save(saving, out / tag)
    except OSError as error:
        remove_save(saving)
        raise CheckpointError(f"{out} cannot be written ({error}): nothing was changed") from error
    finally:
        lock.release()
    discard_replaced(out / tag)
    name_latest(out, tag)
    return out / tag


def _bring(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or one without links
        shutil.copyfile(source, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())
