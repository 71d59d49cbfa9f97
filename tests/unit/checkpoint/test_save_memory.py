"""A save takes the host memory of one parameter, however large the model is."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.engines import OFFLOAD_AT_SCALE
from support.scripts import run_script

TESTS = Path(__file__).resolve().parents[2]
MIB = 2**20
full = pytest.mark.parity_full
_MEASURE = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import torch
from support.engines import built, join_process_group, make_config
join_process_group()
stage, moments, width, count = int(sys.argv[2]), sys.argv[3], *map(int, sys.argv[4:])
layers = [torch.nn.Linear(width, width, bias=False) for _ in range(count)]
layers[3].requires_grad_(False)
config = make_config(stage=stage, gpu_fraction=0.0, offload={OFFLOAD_AT_SCALE!r},
                     hytrain={{"moments": moments}})
with built(torch.nn.Sequential(*layers), config) as engine:
    engine.save_checkpoint(sys.argv[1], tag="first")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    def peak():
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    before = peak()
    engine.save_checkpoint(sys.argv[1], tag="second")
    print(peak() - before)
"""


def _grown(tmp_path: Path, *arguments: object) -> float:
    """MiB."""
    script = tmp_path / "measure.py"
    script.write_text(_MEASURE)
    ended = run_script(script, str(tmp_path), *map(str, arguments))
    assert ended.returncode == 0, ended.stderr[-3000:]
    return int(ended.stdout.split()[-1]) / MIB


@pytest.mark.parametrize("stage", [pytest.param(2, marks=full), 3])
def test_it_grows_by_one_parameter(stage: int, tmp_path: Path) -> None:
    """Of 24 parameters of 4 MiB in fp32, the state is 276 MiB."""
    # One state of one parameter, what torch.save and the allocator take, and a huge page for each
    # of nine threads.
    assert _grown(tmp_path, stage, "fp32", 1024, 24) < 14 + 36


@pytest.mark.parametrize("moments", [pytest.param("bf16", marks=full), "8bit"])
def test_moments_in_fewer_bytes_are_whole_one_at_a_time(moments: str, tmp_path: Path) -> None:
    """Each state of a parameter is 64 MiB in fp32, a tensor of its own: two would be 128."""
    # What else a save takes is 14 to 32 MiB: a huge page more or less for each of nine threads.
    assert _grown(tmp_path, 2, moments, 4096, 4) < 64 + 46
