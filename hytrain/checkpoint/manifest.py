"""The manifest of a save: every file's length and sums, in one file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hytrain.checkpoint.summed_files import BLOCK_BYTES, FileSums
from hytrain.checkpoint.universal import is_plain_path
from hytrain.errors import CheckpointError, DamagedCheckpointError
from hytrain.formats.record import Record, checked, parse_json

MANIFEST = "hytrain_manifest.json"
MANIFEST_VERSION = 2
"""Version 1 is written if one folder has all files: older versions of hytrain read that."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a save has written: every file's length and sums, in one file with its own checksum.

    It is in ``zero``, whose contents belong to one checkpoint only. Its first line has the sum of
    all that follows, and the whole file is JSON. Plain DeepSpeed does not look at it.

    Attributes:
        files: path in the tag's folder, with "/" -> sums.
        saved_at: when it was written, in seconds since 1970; 0 if an older version wrote it.
    """

    files: Mapping[str, FileSums]
    saved_at: float

    def hosts(self) -> dict[str, str]:
        """File -> host, of files that only one host has saved."""
        return {name: sums.host for name, sums in self.files.items() if sums.host is not None}

    def pack(self) -> bytes:
        """The file's contents."""
        entries = {
            name: {
                "bytes": sums.num_bytes,
                "blocks": " ".join(f"{block:08x}" for block in sums.blocks),
                **({"host": sums.host} if sums.host is not None else {}),
            }
            for name, sums in sorted(self.files.items())
        }
        body = {
            "version": MANIFEST_VERSION if self.hosts() else 1,
            "sum": "crc32",
            "block_bytes": BLOCK_BYTES,
            "saved_at": self.saved_at,
            "files": entries,
        }
        text = f'"manifest": {json.dumps(body, indent=1)}}}\n'.encode()
        return _head(text) + text


def read_manifest(path: Path) -> Manifest:
    """Reads a manifest.

    Raises:
        DamagedCheckpointError: it is damaged.
        CheckpointError: it is of a later version.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    head_bytes = len(_head(b""))
    head, text = content[:head_bytes], content[head_bytes:]
    if head != _head(text):
        raise DamagedCheckpointError(
            f"{path} is damaged: its own checksum is not that of its contents; load another tag "
            "(without this file the checkpoint loads, held against its files' own checksums only)"
        )
    values = parse_json(content, f"the manifest {path}", DamagedCheckpointError)
    if not isinstance(values, dict) or not isinstance(values.get("manifest"), dict):
        raise DamagedCheckpointError(f"{path} holds no manifest: load another tag")
    body: dict[str, Any] = values["manifest"]
    version = body.get("version")
    if isinstance(version, int) and version > MANIFEST_VERSION:
        raise CheckpointError(
            f"{path} was written by a later hytrain (version {version}, this one reads up "
            f"to {MANIFEST_VERSION}): update hytrain"
        )
    stored: _Body = checked(_Body, body, f"the manifest {path}", DamagedCheckpointError)
    files: dict[str, FileSums] = {}
    for name, entry in stored.files.items():
        blocks = tuple(int(block, 16) for block in entry.blocks.split())
        # Names are joined to the folder, and sums to their files: others would lead elsewhere.
        if not is_plain_path(name) or len(blocks) != -(-entry.bytes // BLOCK_BYTES):
            raise DamagedCheckpointError(f"{path} has sums of {name[:80]!r} that are none")
        files[name] = FileSums(entry.bytes, blocks, entry.host)
    return Manifest(files, stored.saved_at)


class _Entry(Record):
    bytes: int = Field(ge=0)
    blocks: str = Field(pattern=r"^([0-9a-f]{8}( [0-9a-f]{8})*)?$")
    host: str | None = None


class _Body(Record):
    version: int
    sum: Literal["crc32"] = "crc32"
    block_bytes: Literal[1048576] = BLOCK_BYTES
    saved_at: float = Field(default=0.0, ge=0.0, lt=2.0**36)
    files: dict[str, _Entry]


def _head(text: bytes) -> bytes:
    return f'{{"crc32": "{zlib.crc32(text):08x}",\n'.encode()
