"""A file system that is really full: a small tmpfs.

Wherever space ends, the save says so, what was saved before is whole, nothing is left that takes
space, training goes on bit for bit, and the next save works when there is room again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.resume import Run, Snapshot, assert_same, engine_of, snapshot, train

from hytrain.checkpoint import disk_room
from hytrain.errors import CheckpointError

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(180)]

DISK_BYTES = 24 << 20
BLOCK = 4096
WIDTH = 128  # a checkpoint of 3 MB, most of which is large tensors'
ROOM = r"takes [2-5]\.\d MiB", r"has [\d.]+( [KM]iB)? free|[\d.]+( [KM]iB)? are free"
"""What is needed and what there is, in every message about a disk that is full."""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    folder = tmp_path_factory.mktemp("disk")
    if shutil.which("mount") is None:
        pytest.skip("a file system cannot be made full: there is no mount command")
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "hytrain-test", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        pytest.skip(f"a file system cannot be made full: mounting needs root ({made.stderr!r})")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def folder(disk: Path) -> Iterator[Path]:
    """Empty, and emptied afterwards."""
    yield disk / "saves"
    for path in disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _fill(disk: Path, leave: int) -> None:
    """Takes all of the disk but so many bytes."""
    (disk / "ballast").unlink(missing_ok=True)
    with (disk / "ballast").open("wb") as file:
        left = shutil.disk_usage(disk).free - leave
        os.posix_fallocate(file.fileno(), 0, left // BLOCK * BLOCK)
    assert shutil.disk_usage(disk).free <= leave + BLOCK


def _make_room(disk: Path) -> None:
    (disk / "ballast").unlink()


def _used(disk: Path) -> int:
    usage = shutil.disk_usage(disk)
    return usage.total - usage.free


def _content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def _save(engine: Any, folder: Path, tag: str) -> None:
    """Saves and waits for it, if that is beside training."""
    engine.save_checkpoint(folder, tag=tag)
    engine.wait_for_checkpoint()


class _Training:
    """Two steps, a save, two more: what is to be refused, and what must not change for it."""

    def __init__(self, engine: Any, folder: Path, reader: Any) -> None:
        self.engine, self.folder, self.reader = engine, folder, reader
        train(engine, 0, 2)
        _save(engine, folder, "kept")
        self.saved = snapshot(engine)
        train(engine, 2, 4)
        self.now = snapshot(engine)
        self.files = _content(folder)

    def refuse(self, tag: str, *matches: str) -> None:
        """A save that fails, and harms nothing."""
        before = _used(self.folder.parent)
        with pytest.raises(CheckpointError) as raised:
            _save(self.engine, self.folder, tag)
        message = str(raised.value)
        assert "is unchanged" in message
        for match in matches:
            assert re.search(match, message), message
        assert _content(self.folder) == self.files
        assert not list(self.folder.rglob("hytrain-*[0-9a-f]"))
        assert _used(self.folder.parent) <= before

    def end(self, expected: Snapshot) -> None:
        """With room again: what was kept is whole, training goes on, and a save works."""
        self.reader.load_checkpoint(self.folder)
        assert_same(snapshot(self.reader), self.saved)
        assert_same(snapshot(self.engine), self.now)
        train(self.engine, 4, 5)
        assert_same(snapshot(self.engine), expected)
        _save(self.engine, self.folder, "kept")
        self.reader.load_checkpoint(self.folder)
        assert_same(snapshot(self.reader), expected)
        assert not list(self.folder.glob("hytrain-*"))


RUNS = [Run(width=WIDTH), Run(width=WIDTH, asynchronous=True)]


@pytest.fixture(scope="module")
def reader(process_group: None) -> Iterator[Any]:
    with engine_of(Run(width=WIDTH).another()) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(process_group: None) -> Snapshot:
    """After five steps, with no save."""
    with engine_of(RUNS[0]) as engine:
        train(engine, 0, 5)
        return snapshot(engine)


@pytest.mark.parametrize("run", RUNS, ids=["now", "beside training"])
def test_it_vanishes_while_files_are_written(
    run: Run,
    disk: Path,
    folder: Path,
    reader: Any,
    expected: Snapshot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen as free, and taken by somebody else: space ends in another file each time."""
    with engine_of(run) as engine:
        training = _Training(engine, folder, reader)
        size = sum(len(content) for content in training.files.values())
        with monkeypatch.context() as patch:
            for part in range(9):
                _fill(disk, part * size // 10)
                patch.setattr(disk_room, "free_bytes", _first_then_real(1 << 40))
                training.refuse("kept", "No space left on device", *ROOM)
        _make_room(disk)
        training.end(expected)


def _first_then_real(free: int) -> Any:
    """What the check before writing sees is no longer true when a message is made."""
    answers = iter([free])
    return lambda path: next(answers, None) or shutil.disk_usage(path).free
