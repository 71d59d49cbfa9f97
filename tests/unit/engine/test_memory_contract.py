"""Memory is what was said before it was taken: peaks of RSS beside predictions, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from support.processes import fresh_environment

TESTS = Path(__file__).resolve().parents[2]
MIB = 2**20

_MEASURE = f"""
    import json, sys
    sys.path.insert(0, {str(TESTS)!r})
    import torch
    from support.engines import built, join_process_group, make_config
    join_process_group()
    folder, stage, k, width, layers = sys.argv[1], *map(float, sys.argv[2:])
    width, model = int(width), torch.nn.Sequential()

    def make_layer():
        return torch.nn.Linear(width, width, bias=False, dtype=torch.bfloat16)

    def status(name):
        lines = open("/proc/self/status").read().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    def peak_of(action):
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # the peak begins anew
        action()
        return status("VmHWM")

    def step():
        for _ in range(2):
            engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().sum())
            engine.step()
        engine.synchronize()

    def evaluate():
        engine.eval()
        with torch.no_grad():
            engine(torch.ones(1, width, dtype=torch.bfloat16))
        engine.train()

    def build():
        global engine
        engine = context.__enter__()

    # Libraries, allocators and threads get what they take once from a small engine.
    small = make_config(offload={{"chunk_elements": 2**20}}, stage=int(stage))
    with built(torch.nn.Sequential(make_layer()), small) as engine:
        engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().sum())
        engine.step()
        engine.save_checkpoint(folder, tag="small")
        engine.load_checkpoint(folder, tag="small")
    model = torch.nn.Sequential(*(make_layer() for _ in range(int(layers))))
    config = make_config(
        gpu_fraction=k, stage=int(stage), offload={{"chunk_elements": 2**20}},
        hytrain={{"layers": {{"class": "Linear"}}}},
    )
    context = built(model, config)
    before = status("VmRSS")
    measured = {{"build": peak_of(build) - before}}
    for name, action in (
        ("step", step), ("save", lambda: engine.save_checkpoint(folder, tag="one")),
        ("load", lambda: engine.load_checkpoint(folder, tag="one")), ("evaluation", evaluate),
    ):
        measured[name] = peak_of(action) - before
    said = {{name: (peak.host, peak.pinned) for name, peak in engine.memory_peaks().items()}}
    context.__exit__(None, None, None)
    print("RESULT", json.dumps([measured, said]))
"""


def _run(script: str, *arguments: Any) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)],
        env=fresh_environment(MALLOC_MMAP_THRESHOLD_="65536"),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout[-1000:] + ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.parametrize(("stage", "k"), [(2, 0.0), (3, 0.5)])
def test_peaks_are_what_was_said(stage: int, k: float, tmp_path: Path) -> None:
    """64 M parameters: 768 MiB of state. What imports take is left out, and a small engine's."""
    output = _run(_MEASURE, tmp_path, stage, k, 2048, 16)
    measured, said = json.loads(output.partition("RESULT ")[2])
    for name, growth in measured.items():
        host, pinned = said[name]
        promised = host + pinned
        print(f"{name}: {growth / MIB:.0f} MiB, said {promised / MIB:.0f}")
    for name, growth in measured.items():
        assert 0.75 * sum(said[name]) <= growth <= 1.03 * sum(said[name]), name
