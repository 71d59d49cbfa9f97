"""Under a VizTracer, hytrain's spans are in VizTracer's file, beside Python's and torch's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.engines import built, join_process_group, make_config
from support.models import make_batch, make_model
from support.traces import Trace, traced_config
from viztracer import VizTracer

from hytrain.formats import trace_file as names

SCRIPT = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from support.engines import join_process_group, make_config
from support.traces import train
join_process_group()
train(make_config(gpu_fraction=0.5), 3)
"""
ROOT = Path(__file__).resolve().parents[3]


def _check(trace: Trace, steps: list[int]) -> None:
    header = trace.header
    assert list(trace.steps()) == steps
    assert header.steps == (steps[0], steps[-1])
    for step in steps:
        updates = trace.spans(names.CPU_ADAM, step=step)
        assert {e["args"]["layer"] for e in updates} == {3, 4, 5}
        assert len(trace.spans(names.GPU_COMPUTE, step=step)) == 12
    assert any(trace.of_phase("f"))
    ours = [e for e in trace.file.events if e.get("cat") in names.CATEGORY.values()]
    assert {e["pid"] for e in ours} == {0}


def test_the_command_line(tmp_path: Path) -> None:
    script, out = tmp_path / "script.py", tmp_path / "trace.json"
    script.write_text(SCRIPT.format(root=str(ROOT), tests=str(ROOT / "tests")))
    limits = ["--ignore_frozen", "--max_stack_depth", "4", "--quiet"]
    subprocess.run(
        [sys.executable, "-m", "viztracer", "--log_torch", *limits, "-o", out, "--", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    trace = Trace.read(out)
    _check(trace, [1, 2, 3])
    # One process of one rank, in which Python, torch and hytrain are on one clock.
    functions = [e for e in trace.spans("Python: MainThread") if "(" in e["name"]]
    assert functions
    operators = [e for e in trace.spans("Python: MainThread") if e.get("cat") == "cpu_op"]
    begin, end = trace.steps()[2]
    multiplied = [e for e in operators if e["name"] == "aten::addmm" and begin < e["ts"] < end]
    forwards = trace.spans(names.GPU_COMPUTE, step=2, **{"pass": "forward"})
    assert len(multiplied) == 10  # two in each block, one before and one behind
    inside = [e for e in multiplied for f in forwards if f["ts"] <= e["ts"] <= f["ts"] + f["dur"]]
    assert len(inside) == 10


@pytest.mark.parametrize("delays", [None, "3:20000"])
def test_a_tracer_of_some_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delays: str | None
) -> None:
    join_process_group()
    if delays is not None:  # the worker is at the last step's updates when the tracer ends
        monkeypatch.setenv("HYTRAIN_DELAYS", delays)
    out = tmp_path / "trace.json"
    with built(make_model("mlp"), make_config(gpu_fraction=0.5)) as engine:
        tracer = VizTracer(output_file=str(out), verbose=0, max_stack_depth=3)
        for number in range(6):
            if number == 2:
                tracer.start()
            engine.backward(engine(**make_batch("mlp", number)))
            engine.step()
            if number == 4:
                tracer.stop()
                tracer.save()
                tracer.terminate()
    # It runs from the middle of a step on: the next one is the first that is whole.
    _check(Trace.read(out), [4, 5])


def test_steps_and_folder_beside_a_tracer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One recording: the chosen steps, in VizTracer's file."""
    join_process_group()
    out, folder = tmp_path / "trace.json", tmp_path / "folder"
    config = traced_config(folder, (2, 4), gpu_fraction=0.5)
    with (
        caplog.at_level("INFO"),
        VizTracer(output_file=str(out), verbose=0, max_stack_depth=3),
        built(make_model("mlp"), config) as engine,
    ):
        for number in range(5):
            engine.backward(engine(**make_batch("mlp", number)))
            engine.step()
    _check(Trace.read(out), [2, 3])
    assert list(folder.iterdir()) == []
    assert "goes to its file" in caplog.text
