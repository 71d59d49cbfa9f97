"""A training on one rank whose chosen steps are recorded: what is in the file, and what is not."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support.engines import built, join_process_group, make_config
from support.models import Mlp, make_batch, make_model
from support.traces import Trace, traced_config, train
from torch.utils.checkpoint import checkpoint
from torch.utils.data import dataloader

from hytrain.engine import trace_session
from hytrain.errors import ConfigError
from hytrain.formats import trace_file as names
from hytrain.hardware.energy import EnergyReading
from hytrain.tools import cli

pytestmark = pytest.mark.usefixtures("process_group")

LAYERS = 6  # of the MLP: before, four blocks, after
FIRST, END = 4, 7
STEPS = range(FIRST, END)


def _user_code(_step: int, loss: torch.Tensor) -> None:
    loss.item()


def traced(config: dict[str, Any], steps: int, folder: Path, **options: Any) -> Trace:
    """What a training of so many steps records."""
    train(config, steps, **options)
    return Trace.read(folder / "trace_rank0.json")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """Steps 4 to 6 of 12, with half of the layers on the GPU's side."""
    join_process_group()
    folder = tmp_path_factory.mktemp("trace")
    config = traced_config(folder, (FIRST, END), gpu_fraction=0.5, accumulation=2)
    return traced(config, 12, folder, accumulation=2, after_step=_user_code)


def test_the_header(trace: Trace) -> None:
    header = trace.header
    assert header.rank == 0
    assert header.world_size == 1
    assert header.steps == (FIRST, END - 1)
    assert header.layers == LAYERS
    assert header.device == "cpu"
    assert header.gpu_fraction == 0.5
    assert header.gpu_layers == (0, 1, 2)
    assert header.gradient_clipping == 1.0
    assert header.micro_batches == 2
    assert header.dropped_spans == 0
    assert not header.overwritten
    assert header.clock_offset_us == 0.0
    assert header.peaks.cores is not None
    assert header.peaks.dram_bytes_per_s is not None
    assert header.peaks.adam_parameters_per_s is not None


def test_a_report_says_that_there_was_no_gpu(
    trace: Trace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", "report", str(trace.file.path)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("The device (the CPU: no GPU was recorded) computes ")
    for of_gpu in ("of peak", "GPU busy", "GPU is idle", "fix, each alone"):
        assert of_gpu not in text
    assert "\nRecord a run with a GPU: " in text, "no advice"
    assert cli.main(["trace", "report", "--verbose", str(trace.file.path)]) == 0
    assert "rate while it runs" in capsys.readouterr().out


def test_what_it_cost_is_measured_beside_it(trace: Trace) -> None:
    header = trace.header
    steps = sorted(end - begin for begin, end in trace.steps().values())
    assert header.unprofiled_step_s is not None
    assert header.recording_overhead is not None
    expected = steps[1] / 1e6 / header.unprofiled_step_s - 1.0
    assert header.recording_overhead == pytest.approx(expected, abs=1e-6)


def test_the_steps_follow_one_another(trace: Trace) -> None:
    steps = trace.steps()
    assert list(steps) == list(STEPS)
    gaps = [steps[step + 1][0] - steps[step][1] for step in range(FIRST, END - 1)]
    # What is done between two steps is in neither; a busy machine does something else there too.
    assert min(gaps) >= 0.0
    assert min(gaps) < 20_000


def test_nothing_is_there_of_other_steps(trace: Trace) -> None:
    steps = trace.steps()
    begin = steps[FIRST][0]
    spans = [e for e in trace.file.events if e["ph"] == "X"]
    assert all(e["ts"] + e["dur"] >= begin - 1.0 for e in spans)
    assert all(e["args"].get("step", FIRST) < END for e in spans)
    # Of the step before there may be updates that were still under way.
    early = {e["cat"] for e in spans if e["args"].get("step", FIRST) < FIRST}
    assert early <= {"cpu_update", "d2h", "h2d"}


def test_every_layer_is_updated_in_every_step(trace: Trace) -> None:
    for step, (begin, end) in trace.steps().items():
        on_gpu = trace.spans(names.GPU_UPDATE, step=step)
        assert [e["args"]["layer"] for e in on_gpu] == [0, 1, 2]
        on_cpu = trace.spans(names.CPU_ADAM, step=step)
        assert {e["args"]["layer"] for e in on_cpu} == {3, 4, 5}
        # Where the step's backward has begun and the next forward has not waited for it all.
        next_end = trace.steps().get(step + 1, (0, end + 60e6))[1]
        assert all(begin <= e["ts"] and e["ts"] + e["dur"] <= next_end for e in on_cpu)
        tasks = {"preview", "commit", "commit_then_preview", "publish"}
        assert {e["args"]["task"] for e in on_cpu} <= tasks


def test_each_chunk_is_copied_then_updated_then_sent(trace: Trace) -> None:
    for step in STEPS:
        updates = trace.spans(names.CPU_ADAM, step=step)
        chunks = {(e["args"]["layer"], e["args"]["chunk"]) for e in updates}
        assert len(chunks) > 6  # 1024 elements each
        slots = [e["args"]["slot"] for e in trace.spans(names.D2H, step=step)]
        assert len(set(slots)) == len(slots) == len(chunks)  # all of them are kept
        for layer, chunk in chunks:
            where = {"step": step, "layer": layer, "chunk": chunk}
            (copied,) = trace.spans(names.D2H, **where)
            updated, sent = trace.spans(names.CPU_ADAM, **where), trace.spans(names.H2D, **where)
            assert copied["ts"] + copied["dur"] <= updated[0]["ts"] + 0.5
            # A held layer is committed first, and sent after its preview.
            assert updated[-1]["ts"] + updated[-1]["dur"] <= sent[-1]["ts"] + 0.5
            parameters = updated[0]["args"]["parameters"]
            assert copied["args"]["bytes"] == sent[0]["args"]["bytes"] == 2 * parameters


@pytest.mark.parametrize(("moments", "state"), [("fp32", 12), ("bf16", 8), ("8bit", 6)])
def test_an_updates_bytes_are_its_moments(tmp_path: Path, moments: str, state: int) -> None:
    """Master weight and moments are read and written, two gradients read, a weight written."""
    trace = traced(traced_config(tmp_path, (3, 4), hytrain={"moments": moments}), 5, tmp_path)
    updates = [
        e["args"] for e in trace.spans(names.CPU_ADAM) if e["args"]["task"] == "commit_then_preview"
    ]
    assert updates
    assert all(u["bytes"] == (2 * state + 3 * 2) * u["parameters"] for u in updates)


def test_forward_and_backward_of_each_layer(trace: Trace) -> None:
    for step in STEPS:
        order: dict[str, list[int]] = defaultdict(list)
        for span in trace.spans(names.GPU_COMPUTE, step=step):
            order[span["args"]["pass"]].append(span["args"]["layer"])
        assert order["forward"] == [*range(LAYERS)] * 2
        assert order["backward"] == [*reversed(range(LAYERS))] * 2
    spans = trace.spans(names.GPU_COMPUTE)
    assert all(a["ts"] + a["dur"] <= b["ts"] + 0.5 for a, b in itertools.pairwise(spans))


def test_phases_and_waits(trace: Trace) -> None:
    for step, (begin, end) in trace.steps().items():
        phases = trace.spans("Python: MainThread", step=step)
        assert [e["name"] for e in phases] == ["forward", "backward", "optimizer step"] * 2
        assert all(begin <= e["ts"] and e["ts"] + e["dur"] <= end + 0.5 for e in phases)
        waits = trace.spans(names.WAITS_OF_FORWARD, step=step)
        assert [e["args"]["layer"] for e in waits] == list(range(LAYERS))
        assert ["CPU" in e["args"]["what"] for e in waits] == [False] * 3 + [True] * 3
    assert not trace.spans(names.HOST_WAITS)  # on a CPU .item() waits for nothing


def test_arrows_link_a_layer_through_its_step(trace: Trace) -> None:
    ways: dict[int, list[dict]] = defaultdict(list)
    for phase in "stf":
        for flow in trace.of_phase(phase):
            ways[flow["id"]].append(flow)
    of_step: dict[int, set[int]] = defaultdict(set)
    for flows in ways.values():
        flows.sort(key=lambda e: e["ts"])
        assert [e["ph"] for e in flows] == ["s", *["t"] * (len(flows) - 2), "f"]
        spans = [trace.span_at(flow) for flow in flows]
        (layer,) = {e["args"]["layer"] for e in spans}
        step = spans[0]["args"]["step"]
        of_step[step].add(layer)
        lanes = ["gpu", "gpu_update"] if layer < 3 else ["gpu", "d2h", "cpu_update", "h2d"]
        # Of the last step the next forward is not recorded.
        expected = lanes if step == END - 1 else [*lanes, "gpu"]
        if step < FIRST:  # its end was still under way
            assert [e["cat"] for e in spans] == expected[-len(spans) :]
            continue
        assert [e["cat"] for e in spans] == expected
        assert spans[0]["name"] == f"backward layer {layer}"
        if step < END - 1:
            assert spans[-1]["args"]["step"] == step + 1
    assert {step: set(range(LAYERS)) for step in STEPS}.items() <= of_step.items()


def test_counters(trace: Trace) -> None:
    values: dict[str, list[float]] = defaultdict(list)
    for event in sorted(trace.of_phase("C"), key=lambda e: e["ts"]):
        values[event["name"]].append(event["args"]["value"])
    assert values[names.COUNTER_GPU_FRACTION] == [0.5] * len(STEPS)
    pending = values[names.COUNTER_PENDING]
    assert max(pending) <= LAYERS
    assert min(pending) >= 0
    assert pending[-1] == 0
    assert len(pending) >= 2 * LAYERS * len(STEPS)
    assert min(values[names.COUNTER_HOST_MEMORY]) > 1e7
    assert min(values[names.COUNTER_PINNED_MEMORY]) > 1e3


def test_each_steps_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = itertools.count(100)

    class Meter:
        has_gpu, gpu_watts = True, staticmethod(lambda: 300.0)

        def __init__(self, _device: torch.device) -> None: ...

        def read(self) -> EnergyReading:
            joules = float(next(used))
            return EnergyReading(joules, 2.0 * joules)

    monkeypatch.setattr(trace_session, "EnergyMeter", Meter)
    trace = traced(traced_config(tmp_path, (2, 4)), 5, tmp_path)
    steps = trace.spans(names.STEPS)
    for step in steps:
        assert (step["args"]["gpu_energy_j"], step["args"]["cpu_energy_j"]) == (1.0, 2.0)
    values: dict[str, list[float]] = defaultdict(list)
    for event in trace.of_phase("C"):
        values[event["name"]].append(event["args"]["value"])
    expected = [2.0 / (step["dur"] * 1e-6) for step in steps]
    assert values[names.COUNTER_CPU_POWER] == pytest.approx(expected)
    assert set(values[names.COUNTER_GPU_POWER]) == {300.0}


@pytest.mark.parametrize(
    ("accumulation", "expected"),
    [("micro_batch_major", []), ("layer_major", [4, 4, 3, 3, 2, 2, 1, 1])],
)
def test_checkpointed_blocks_are_recomputed(
    tmp_path: Path, accumulation: str, expected: list[int]
) -> None:
    section = {"accumulation": accumulation}
    config = traced_config(tmp_path, (3, 5), hytrain=section, accumulation=2)
    with built(make_model("mlp"), config) as engine:
        for step in range(5):
            batches = (make_batch("mlp", 2 * step + micro) for micro in range(2))
            engine.train_batch(batches, num_valid=lambda _batch: torch.tensor(1.0))
    trace = Trace.read(tmp_path / "trace_rank0.json")
    again = trace.spans(names.GPU_COMPUTE, **{"pass": "recompute"}, step=3)
    assert [e["args"]["layer"] for e in again] == expected
    loads = [e for e in trace.spans("Python: MainThread") if e["name"] == "data loading"]
    assert len(loads) >= 4


class _Checkpointed(Mlp):
    """Its blocks are recomputed by what ends their forward as soon as it can."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x).pow(2).mean()


def test_backward_follows_a_recomputed_forward_that_is_left_early(tmp_path: Path) -> None:
    """torch's checkpointing ends it with an exception as soon as backward has what it needs."""
    with built(_Checkpointed(), traced_config(tmp_path, (2, 3))) as engine:
        for step in range(8):
            engine.backward(engine(**make_batch("mlp", step)))
            engine.step()
    trace = Trace.read(tmp_path / "trace_rank0.json")
    again = trace.spans(names.GPU_COMPUTE, **{"pass": "recompute"}, step=2)
    assert again
    for span in again:
        layer, end = span["args"]["layer"], span["ts"] + span["dur"]
        after = trace.spans(names.GPU_COMPUTE, **{"pass": "backward"}, layer=layer, step=2)
        assert any(abs(one["ts"] - end) < 1.0 and one["dur"] > 0.0 for one in after)


def test_warns_of_a_full_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_session, "RING_SPANS", 16)
    with caplog.at_level(logging.WARNING):
        trace = traced(traced_config(tmp_path, (2, 4)), 4, tmp_path)
    header = trace.header
    assert header.overwritten
    written = len(trace.spans(names.CPU_ADAM)) + len(trace.spans(names.D2H))
    assert header.dropped_spans > 10
    assert written > 0
    assert f"has lost {header.dropped_spans} spans" in caplog.text


def test_a_lane_a_thread(tmp_path: Path) -> None:
    offload = {"offload": {"chunk_elements": 2**20, "cpu_threads": 2}}
    config = traced_config(tmp_path, (2, 4), trace={"threads": True}, hytrain=offload)

    with built(Mlp(width=256), config) as engine:
        for _ in range(4):
            engine.backward(engine(inputs=torch.ones(2, 256)))
            engine.step()
    trace = Trace.read(tmp_path / "trace_rank0.json")
    assert trace.spans(names.CPU_ADAM)
    assert trace.spans(f"{names.CPU_ADAM} 2")


def test_warns_of_steps_that_never_come(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(traced_config(tmp_path, (10, 14)), 2)
    assert "asks for steps 10 to 13, but steps 1 to 2 were made" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_training_that_ends_early_leaves_what_there_is(tmp_path: Path) -> None:
    trace = traced(traced_config(tmp_path, (2, 50)), 4, tmp_path)
    assert trace.header.steps == (2, 4)
    assert list(trace.steps()) == [2, 3, 4]


def test_the_file_is_announced_where_the_run_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="hytrain.run"):
        train(traced_config(tmp_path, (2, 3)), 3)
    told = [r.getMessage() for r in caplog.records if r.name == "hytrain.run"]
    file = tmp_path / "trace_rank0.json"
    (said,) = [text for text in told if text.startswith("hytrain: steps 2 to 2 are recorded")]
    assert f"`hytrain trace report {file}`" in said


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigError, match=r"hytrain\.trace\.dir"):
        train(traced_config(blocked / "traces", (2, 4)), 1)


@pytest.mark.parametrize("steps", [[4, 4], [0, 3], [7, 2]])
def test_steps_out_of_order_are_refused(tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"trace\.steps.*records 10 to 13"):
        train(make_config(hytrain={"trace": {"dir": str(tmp_path), "steps": steps}}), 1)


def test_hooks_and_patches_are_gone_afterwards(tmp_path: Path) -> None:
    model = make_model("mlp")
    before = (vars(torch.Tensor).get("item"), dataloader._BaseDataLoaderIter.__next__)
    with built(model, traced_config(tmp_path, (2, 3))) as engine:
        counts = []
        for step in range(4):
            counts.append(len(model.blocks[0]._forward_hooks))
            engine.backward(engine(**make_batch("mlp", step)))
            engine.step()
        assert counts == [0, 1, 0, 0]
        assert engine.optimizer.pipeline.trace is None
        assert engine.optimizer.passes.trace is None
        assert engine.optimizer.collectives.trace is None
    assert before == (vars(torch.Tensor).get("item"), dataloader._BaseDataLoaderIter.__next__)


def test_without_a_trace_no_layer_makes_a_call() -> None:
    """A part asks whether there is a recorder, and calls none; a step has a few calls in all."""
    few, many = _calls_of_a_step(num_blocks=2), _calls_of_a_step(num_blocks=8)
    assert few == many
    assert len(few) < 10


def _calls_of_a_step(num_blocks: int) -> list[str]:
    """Functions of the recording that a step calls which is not recorded."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        name = str(frame.f_globals.get("__name__", ""))
        if name == "hytrain.trace.profiler_spans":
            return  # torch's profiler; test_host_calls.py counts it
        if event == "call" and name.startswith(("hytrain.trace", "hytrain.engine.trac")):
            calls.append(frame.f_code.co_name)

    with built(Mlp(num_blocks), make_config(gpu_fraction=0.5)) as engine:
        for step in range(3):
            sys.setprofile(note if step == 2 else None)
            engine.backward(engine(**make_batch("mlp", step)))
            engine.step()
        sys.setprofile(None)
    return calls
