"""Which tensor of a damaged file is damaged, for the message that refuses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hytrain.checkpoint.archive import Archive
from hytrain.checkpoint.checked_file import CheckedFile
from hytrain.checkpoint.manifest import MANIFEST
from hytrain.checkpoint.pickles import StoredTensor, stored_tensors
from hytrain.checkpoint.sums import FileSums, sum_file
from hytrain.checkpoint.universal import CheckpointPaths

ADVICE = f"load another tag (or take {MANIFEST} away, if you have changed the file yourself)"
_SHOWN = 3
"""Tensors that a message names at most."""
_PICKLE = "data.pkl"


def describe_damage(
    paths: CheckpointPaths, name: str, saved: Mapping[str, FileSums], blocks: Sequence[int]
) -> str:
    """What is wrong with a file, as one sentence; never raises.

    Args:
        paths: of the checkpoint.
        name: the file's path in the checkpoint's folder.
        saved: sums of all files as they were saved.
        blocks: those whose sum is another; empty where that is not known.
    """
    path = paths.folder / name
    try:
        now = sum_file(path)
        twin = next((other for other, sums in saved.items() if sums == now and other != name), None)
        if twin is not None:
            what = f"it is the file that was saved as {twin}"
        else:
            bounds = [saved[name].bounds(block) for block in blocks]
            what = _damaged_parts(Archive(CheckedFile(path, now)), bounds)
    except Exception:  # a damaged file may make anything of itself, which is no news
        what = "it is no longer an archive of tensors"
    whose = CheckpointPaths.state_of(name)
    tensor = "" if whose is None else f" ({whose[1]} of parameter '{whose[0]}')"
    seen = "by its own checksums"
    if blocks:
        low, high = saved[name].bounds(blocks[0])
        more = f" and {len(blocks) - 1} other places" if len(blocks) > 1 else ""
        seen = f"the checksum of bytes {low} to {high}{more} is not the one that was saved"
    return f"{path}{tensor} is damaged ({seen}): {what}; {ADVICE if blocks else 'load another tag'}"


def _damaged_parts(archive: Archive, bounds: Sequence[tuple[int, int]]) -> str:
    bad = archive.bad_records()
    if not bad:
        return (
            "its tensors are right by the file's own checksums, so it is another save's file, or "
            "was changed after it was saved"
        )
    if _PICKLE in bad:
        return "names, shapes and whatever is no tensor are not what was saved"
    tensors = stored_tensors(archive)
    parts = [part for record in bad for part in _parts(archive, record, tensors, bounds)]
    more = f" and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return f"not what was saved is, or is among, {', '.join(parts[:_SHOWN])}{more}"


def _parts(
    archive: Archive,
    record: str,
    tensors: Sequence[StoredTensor],
    bounds: Sequence[tuple[int, int]],
) -> list[str]:
    """What a damaged record has of damaged blocks; a layer's tensors may share one."""
    key = record.removeprefix("data/")
    here = [tensor for tensor in tensors if tensor.key == key]
    if not here:
        return [f"record {record}"]
    start = archive.elements(key).begin
    hit = [
        tensor.name
        for tensor in here
        if any(start + tensor.begin < high and low < start + tensor.end for low, high in bounds)
    ]
    return hit or [tensor.name for tensor in here]
