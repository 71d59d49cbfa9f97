"""Threads that write files: what is in memory at a time, what is told when, what is raised."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from hytrain.checkpoint.file_writers import FileWriters
from hytrain.checkpoint.writer import Writes


def test_copies_are_limited() -> None:
    held, most, lock = 0, 0, threading.Lock()
    done = 0

    def write() -> None:
        nonlocal done
        threading.Event().wait(0.002)
        with lock:
            done += 1

    with FileWriters(4, 100) as files:
        for _ in range(30):
            files.hold(40)
            held = files.held
            most = max(most, held)
            files.write([write, write], write, 40)
        files.end_batch(lambda: None)
        files.finish()
        assert files.held == 0
    assert most == 80
    assert done == 90


def test_one_that_is_too_large_goes_alone() -> None:
    with FileWriters(2, 10) as files:
        for _ in range(3):
            files.hold(50)
            assert files.held == 50
            files.write([lambda: None], None, 50)


def test_batches_end_when_they_are_written() -> None:
    gate, ended = threading.Event(), list[int]()

    def wait() -> None:
        assert gate.wait(60)

    with FileWriters(2, 0) as files:
        files.write([wait], None, 0)
        files.end_batch(lambda: ended.append(0))
        files.write([lambda: None], None, 0)
        files.end_batch(lambda: ended.append(1))
        assert not ended
        gate.set()
        files.finish()
    assert ended == [0, 1]


def test_parts_of_the_archive_keep_their_order() -> None:
    found: list[int] = []
    with FileWriters(4, 0) as files:
        for number in range(200):
            files.write([], lambda number=number: found.append(number), 0)
    assert found == list(range(200))


def test_what_nobody_catches_is_raised() -> None:
    class _KilledError(BaseException):
        pass

    def die() -> None:
        raise _KilledError

    def run() -> None:
        with FileWriters(2, 0) as files:
            files.write([die], None, 0)
            files.end_batch(lambda: None)
            files.finish()

    with pytest.raises(_KilledError):
        run()


def test_too_many_open_files_are_no_full_disk(tmp_path: Path) -> None:
    writes = Writes(room=lambda: "0 GB are free")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = os.open(tmp_path, os.O_RDONLY)
    os.close(used)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
    try:
        writes.attempt(tmp_path / "state.pt", dict)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in str(writes.failure)
    assert "ulimit -n" in str(writes.failure)
    assert "free" not in str(writes.failure)
