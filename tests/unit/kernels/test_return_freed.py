"""Memory that loading a model has freed is the system's again before the host's is counted."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CHILD = """
import torch
from hytrain.kernels.host_memory import return_freed

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

held = [torch.ones(25_000) for _ in range(2_000)]  # 100 kB each: below what malloc maps by itself
size, full = 2_000 * 100_000, resident()
del held[:-1]  # the last one lies above the others, so that free() gives nothing back
before = resident()
return_freed()
print(full - before, before - resident(), size)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc keeps what was freed")
def test_freed_pieces_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    by_itself, returned, size = map(int, done.stdout.split())
    assert by_itself < 0.2 * size  # else there is nothing to be seen
    assert returned > 0.8 * size
