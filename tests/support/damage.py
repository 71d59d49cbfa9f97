"""Damage done to a checkpoint's files, and undone."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hytrain.checkpoint.summed_files import BLOCK_BYTES, FileSums
from hytrain.errors import CheckpointError
from support.resume import assert_same, snapshot


@contextmanager
def damaged(path: Path, change: Callable[[bytearray], bytearray | None]) -> Generator[None]:
    """Changes a file's contents for the length of a block; None removes the file."""
    content = path.read_bytes()
    changed = change(bytearray(content))
    path.unlink()  # not overwritten: existing mappings keep the old contents
    if changed is not None:
        path.write_bytes(changed)
    try:
        yield
    finally:
        path.write_bytes(content)


def flip(bit: int) -> Callable[[bytearray], bytearray]:
    """Returns a change that flips one bit."""

    def change(content: bytearray) -> bytearray:
        content[bit // 8] ^= 1 << bit % 8
        return content

    return change


def random_flips(tag: Path, each: int, seed: int) -> list[tuple[Path, int]]:
    """Returns (file, bit): ``each`` for every kind of file of a checkpoint, also the manifest."""
    kinds: dict[str, list[Path]] = {}
    for path in sorted(tag.rglob("*")):
        if path.is_file():
            kinds.setdefault(path.name, []).append(path)
    chance = random.Random(seed)
    flips: list[tuple[Path, int]] = []
    for paths in kinds.values():
        for _ in range(each):
            path = chance.choice(paths)
            flips.append((path, chance.randrange(8 * path.stat().st_size)))
    return flips


def assert_refused(
    engine: Any, folder: Path, *words: str, tag: str | None = "last", **arguments: Any
) -> None:
    """Asserts that a load fails with these words in its message and leaves the engine as it was.

    Without a tag the newest whole checkpoint would be loaded.
    """
    before = snapshot(engine)
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, tag=tag, **arguments)
    for word in words:
        assert word in str(caught.value)
    assert_same(snapshot(engine), before)


def sums_of(content: bytes) -> FileSums:
    """Returns what a manifest says of a file with these contents, computed by zlib."""
    blocks = range(0, len(content), BLOCK_BYTES)
    return FileSums(
        len(content), tuple(zlib.crc32(content[at : at + BLOCK_BYTES]) for at in blocks)
    )
