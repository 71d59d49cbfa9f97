"""What a save has written: every file's length and sums, in one file that is sure of itself.

It is in ``zero``, whose contents belong to one checkpoint only. Its first line has the
sum of all that follows, and the whole of it is JSON. Plain DeepSpeed does not look at it. A
checkpoint without it (plain DeepSpeed's, or an older one) is held against its files' own checksums.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hytrain.checkpoint.sums import BLOCK_BYTES, FileSums
from hytrain.errors import CheckpointError

MANIFEST = "hytrain_manifest.json"
MANIFEST_VERSION = 1


def pack_manifest(files: Mapping[str, FileSums]) -> bytes:
    """The manifest's contents.

    Args:
        files: path in the tag's folder, with "/" -> sums.
    """
    entries = {
        name: {
            "bytes": sums.num_bytes,
            "blocks": " ".join(f"{block:08x}" for block in sums.blocks),
        }
        for name, sums in sorted(files.items())
    }
    body = {
        "version": MANIFEST_VERSION,
        "sum": "crc32",
        "block_bytes": BLOCK_BYTES,
        "files": entries,
    }
    text = f'"manifest": {json.dumps(body, indent=1)}}}\n'.encode()
    return _head(text) + text


def unpack_manifest(path: Path) -> dict[str, FileSums]:
    """Reads a manifest.

    Raises:
        CheckpointError: it is damaged, or of a later version.
        OSError: it cannot be read.
    """
    content = path.read_bytes()
    head_bytes = len(_head(b""))
    head, text = content[:head_bytes], content[head_bytes:]
    if head != _head(text):
        raise CheckpointError(
            f"{path} is damaged: its own checksum is not that of its contents; load another tag "
            "(without this file the checkpoint loads, held against its files' own checksums only)"
        )
    body: Any = json.loads(content)["manifest"]
    if body["version"] > MANIFEST_VERSION:
        raise CheckpointError(
            f"{path} was written by a later hytrain (version {body['version']}, this one reads up "
            f"to {MANIFEST_VERSION}): update hytrain"
        )
    return {
        str(name): FileSums(
            int(entry["bytes"]), tuple(int(block, 16) for block in entry["blocks"].split())
        )
        for name, entry in body["files"].items()
    }


def _head(text: bytes) -> bytes:
    return f'{{"crc32": "{zlib.crc32(text):08x}",\n'.encode()
