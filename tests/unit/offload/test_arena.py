"""Host memory of an exact size."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch

from hytrain.offload.arena import Arena

CPU = torch.device("cpu")


def test_takes_do_not_overlap_and_are_aligned() -> None:
    arena = Arena(1000, CPU)
    assert arena.num_bytes == mmap.PAGESIZE
    first, second = arena.take(100), arena.take(10)
    assert first % 64 == second % 64 == 0
    assert first + 100 <= second
    ctypes.memset(first, 1, 100)
    assert ctypes.string_at(second, 10) == bytes(10)
    assert not arena.is_pinned
    arena.close()


def test_more_than_it_has_is_refused() -> None:
    arena = Arena(mmap.PAGESIZE, CPU)
    arena.take(mmap.PAGESIZE)
    with pytest.raises(MemoryError, match="cannot give 1 more"):
        arena.take(1)
    arena.close()


def test_close_twice() -> None:
    arena = Arena(1, CPU)
    arena.close()
    arena.close()


def test_what_the_machine_has_not_is_a_clear_error() -> None:
    with pytest.raises(MemoryError, match=r'raise "hytrain\.gpu_fraction"'):
        Arena(1 << 60, CPU)
