"""Threads that write files: what is in memory at a time, what is told when, what is raised."""

from __future__ import annotations

import os
import resource
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from hytrain.checkpoint import file_writers
from hytrain.checkpoint.file_writers import FileWriters


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files take a while; names of those that were begun."""
    begun: list[str] = []
    begin_file = file_writers.begin_file

    def begin(path: Path, stored: Any) -> Any:
        threading.Event().wait(0.002)
        begun.append(path.name)
        return begin_file(path, stored)

    monkeypatch.setattr(file_writers, "begin_file", begin)
    return begun


def test_copies_are_limited(slow: list[str], tmp_path: Path) -> None:
    most = 0
    with closing(FileWriters(4, 100)) as files:
        for number in range(30):
            files.hold(40)
            most = max(most, files.held)
            pair = [(tmp_path / f"{number}{kind}.pt", b"x") for kind in "ab"]
            files.write(pair, lambda: None, 40)
        files.wait()
        assert files.held == 0
        for number in range(3):  # one that is too large goes alone
            files.hold(500)
            assert files.held == 500
            files.write([(tmp_path / f"large{number}.pt", b"x")], held=500)
        files.wait()
    assert most == 80
    assert len(slow) == 63
    assert len(files.sums) == 63
    assert files.failure is None


def test_what_is_written_is_told(tmp_path: Path) -> None:
    gate, told, parts = threading.Event(), list[int](), list[int]()

    def wait() -> None:
        assert gate.wait(60)
        parts.append(0)

    with closing(FileWriters(2, 0)) as files:
        files.write([(tmp_path / "a.pt", b"")], wait, then=lambda: told.append(0))
        # Behind the other part of the archive.
        files.write([], lambda: parts.append(1), then=lambda: told.append(1))
        assert not told
        assert not parts
        gate.set()
        files.wait()
        assert sorted(told) == [0, 1]
    assert parts == [0, 1]


def test_too_many_open_files_are_no_full_disk(tmp_path: Path) -> None:
    with closing(FileWriters(1, 0, room=lambda: "0 GB are free")) as files:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = os.open(tmp_path, os.O_RDONLY)
        os.close(used)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
        try:
            files.put(tmp_path / "state.pt", {})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in str(files.failure)
    assert "ulimit -n" in str(files.failure)
    assert "free" not in str(files.failure)
