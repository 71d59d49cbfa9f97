"""Which checkpoint is meant: the tag that was asked for, or the latest one."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

from hytrain.checkpoint.commit import (
    find_replaced,
    is_unfinished,
    saved_tags,
    seen_from,
    too_long,
    unusable_tag,
)
from hytrain.checkpoint.manifest import MANIFEST, read_manifest
from hytrain.checkpoint.universal import LATEST, CheckpointPaths
from hytrain.errors import CheckpointError, DamagedCheckpointError

logger = logging.getLogger(__name__)


def older_tags(load_dir: Path, damaged: str | None) -> list[str]:
    """The checkpoints that may be loaded if the latest one is damaged, newest first.

    Only those with a sound manifest: of others it is unknown whether they were ever whole, and when
    they were saved.

    ``damaged`` is the latest one; None: the file that names it is damaged.
    """
    dated: list[tuple[float, str]] = []
    for tag in saved_tags(load_dir):
        folder = find_replaced(load_dir / tag) or load_dir / tag
        try:
            manifest = read_manifest(CheckpointPaths(folder).zero / MANIFEST)
        except (CheckpointError, OSError):
            continue
        name = seen_from(load_dir, folder)
        if name != damaged:
            dated.append((manifest.saved_at, name))
    return [name for _, name in sorted(dated, reverse=True)]


def look_up_tag(load_dir: Path, tag: str | None) -> str | None:
    """The tag to load, as this process sees it; None if none is given and none is the latest.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    named_by = ""
    if tag is not None and (not PurePosixPath(tag).name or too_long(tag)):
        shown = tag if len(tag) <= 80 else f"{tag[:80]}..."
        raise CheckpointError(
            f"the tag '{shown}' names no checkpoint in {load_dir}: pass one's name"
        )
    if tag is None:
        found = _latest(load_dir)
        if found is None:
            return None
        tag, file = found
        named_by = f" (named by {file})"
    folder = load_dir / tag
    replaced = find_replaced(folder)
    if replaced is not None:
        logger.warning(
            "a save under the tag '%s' was broken off while it replaced another: that one is "
            "loaded, from %s; the next save under the tag tidies up",
            tag,
            replaced,
        )
        return seen_from(load_dir, replaced)
    if is_unfinished(folder):
        raise CheckpointError(
            f"{folder}{named_by} is a save that was broken off and is not whole: load another tag"
        )
    if not folder.is_dir():
        tags = saved_tags(load_dir)
        advice = f"pass one of the tags {', '.join(tags)}" if tags else "the folder has none at all"
        kind = DamagedCheckpointError if named_by else CheckpointError
        raise kind(f"there is no checkpoint '{tag}'{named_by} in {load_dir}: {advice}")
    return tag


def _latest(load_dir: Path) -> tuple[str, Path] | None:
    """The latest tag, and the file that names it."""
    files = [load_dir / name for name in LATEST]
    tags = [(_read_tag(path), path) for path in files if path.is_file()]
    if len(tags) < len(files):
        return tags[0] if tags else None
    newest, universal = (load_dir / tag for tag, _ in tags)
    # DeepSpeed's converter leaves the checkpoint that it has read named by "latest".
    has_state = (CheckpointPaths(newest).zero.is_dir(), CheckpointPaths(universal).zero.is_dir())
    if newest.is_dir() and has_state == (False, True):
        logger.warning(
            "%s names '%s', which is no universal checkpoint: '%s' is loaded, the latest one "
            "that was converted",
            files[0],
            tags[0][0],
            tags[1][0],
        )
        return tags[1]
    if newest != universal:
        logger.warning(
            "%s names '%s' and %s '%s': the first is loaded, plain DeepSpeed would load the second "
            "(a save writes the same into both)",
            files[0],
            tags[0][0],
            files[1],
            tags[1][0],
        )
    return tags[0]


def _read_tag(path: Path) -> str:
    """The tag that a file holds; raises a DamagedCheckpointError if it holds none."""
    content = path.read_bytes()
    try:
        tag = content.decode("utf-8").strip()
    except UnicodeDecodeError:
        tag = ""
    if unusable_tag(tag) is not None or not tag.isprintable():
        tags = ", ".join(saved_tags(path.parent)) or "those there are"
        raise DamagedCheckpointError(
            f"{path} is damaged: it holds {content[:80]!r}, which is no tag; write the tag to load "
            f"into it, or pass one of {tags}"
        )
    return tag
