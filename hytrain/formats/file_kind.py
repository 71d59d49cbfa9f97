"""Tells the kind of a training's file by its first bytes: traces may have gigabytes."""

from __future__ import annotations

import gzip
import re
import zlib
from pathlib import Path

_HEAD = 2**14
_KINDS = {
    "page of `hytrain trace`": (rb'<meta name="generator" content="hytrain trace">', "a browser"),
    "trace": (rb'^\s*\{\s*"(traceEvents|schemaVersion)"', "`hytrain trace report`"),
    "metrics file": (rb'^\s*\{("rank": \d+, )?"kind": "(step|decision)"', "`hytrain explain`"),
    "hybrid plan": (rb'^\s*\{\s*"kind":\s*"hybrid"', "`hytrain plan hybrid --export`"),
    "plan": (rb'^\s*\{\s*"version".*"global_batch"', 'training, as "hytrain": {"plan": FILE}'),
    "profile": (rb'^\s*\{\s*"version".*"devices"', "`hytrain plan --profile`"),
    "DeepSpeed configuration": (
        rb'^\s*\{.*"(hytrain|zero_optimization|train_(micro_)?batch_size\w*)"\s*:',
        "`hytrain explain`",
    ),
    "model's config": (
        rb'^\s*\{.*"(model_type|architectures)"\s*:',
        "--model of `hytrain explain`",
    ),
}
"""Kind -> a pattern of the file's first bytes, and what reads it."""


def kind_of(path: Path) -> str:
    """One of :data:`_KINDS`; empty for other files and those that cannot be read."""
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if is_packed else path.open("rb") as file:
            head = file.read(_HEAD)
    except (OSError, EOFError, zlib.error):
        return ""
    return next((kind for kind, (mark, _) in _KINDS.items() if re.search(mark, head, re.S)), "")


def other_kind(path: Path, *wanted: str) -> str:
    """Says that a file is of a known kind that is not wanted, and what reads it; else empty."""
    kind = kind_of(path)
    return f"{path} is a {kind}, for {_KINDS[kind][1]}" if kind and kind not in wanted else ""
