"""The parts of a recording: a device's clock, kernels in place of layers, arrows, lanes, lines."""

from __future__ import annotations

import ctypes
import errno
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO

import pytest
import torch
from support.traces import Trace

from hytrain.formats import trace_file as names
from hytrain.trace import clock as clock_module
from hytrain.trace import writer
from hytrain.trace.clock import TraceClock
from hytrain.trace.counters import CounterSampler
from hytrain.trace.flows import flow_events, pending_gradients, ways
from hytrain.trace.kernels import with_kernels
from hytrain.trace.recorder import Final, Recorder, Span
from hytrain.trace.user_code import user_line, watch_user_code
from hytrain.trace.writer import Recording

CPU = torch.device("cpu")
HEADER = names.TraceHeader(rank=3, world_size=4, steps=(1, 1), layers=1, device="cpu")


class Device:
    """A GPU whose clock runs too fast and has another zero; what is recorded is done at once."""

    rate = 1.0 + 200e-6
    host = 50_000_000_000
    """The host's clock, in ns: it moves by a microsecond when it is asked, and by :meth:`pass_`."""

    @classmethod
    def now(cls) -> int:
        cls.host += 1000
        return cls.host

    @classmethod
    def pass_(cls, seconds: float) -> None:
        cls.host += round(seconds * 1e9)


class Event:
    """As torch.cuda.Event on that GPU; differences are float32, as CUDA's."""

    cuda_event = 77

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ms = 0.0

    def record(self, _stream: object) -> None:
        self.at_ms = (Device.host - 123) * Device.rate / 1e6

    def synchronize(self) -> None:
        """It is done."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Event) -> float:
        return ctypes.c_float(other.at_ms - self.at_ms).value


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: None)
    monkeypatch.setattr(clock_module.time, "monotonic_ns", Device.now)
    return torch.device("cuda", 0)


@pytest.mark.parametrize("with_anchors", [False, True])
def test_a_devices_marks_are_on_the_hosts_clock(device: torch.device, with_anchors: bool) -> None:
    seconds, steps = (6.0, 20) if with_anchors else (0.1, 20)
    clock = TraceClock(device)
    clock.start()
    found: list[tuple[float, float]] = []
    for _ in range(steps):
        Device.pass_(seconds)
        found.append((Device.host, clock.ns(clock.mark())))
        moved = clock.advance()
        assert not moved or with_anchors
    clock.stop()
    # 200 millionths of two minutes are 24 ms: of the drift nothing is left.
    errors = [abs(clock.corrected(ns) - host) for host, ns in found]
    assert max(errors) < 15_000
    if not with_anchors:
        uncorrected = [abs(ns - host) for host, ns in found]
        assert max(uncorrected) > 300_000


def test_a_hosts_marks_are_its_time() -> None:
    clock = TraceClock(CPU)
    clock.start()
    before, mark, after = time.monotonic_ns(), clock.mark(), time.monotonic_ns()
    clock.stop()
    assert before <= clock.corrected(clock.ns(mark)) <= after
    assert clock.anchor == (0, 0)


def span(lane: str, begin_us: float, end_us: float, **args: Any) -> Span:
    return Span(lane, lane, begin_us * 1e3, end_us * 1e3, args)


def kineto(category: str, name: str, ts: float, dur: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "args": args, "tid": 5}


def test_kernels_take_the_place_of_layers() -> None:
    recorded = [
        span(names.GPU_COMPUTE, 100, 200, layer=0, step=3, **{"pass": "forward"}),
        span(names.GPU_COMPUTE, 200, 300, layer=1, step=3, **{"pass": "forward"}),
        span(names.D2H, 150, 160, layer=0, step=3),
        span(names.GPU_UPDATE, 120, 140, layer=0, step=2),
        span(names.GPU_COMMUNICATION, 250, 260, layer=1),
    ]
    found = [
        kineto("cuda_runtime", "cudaLaunchKernel", 90, 4, correlation=9),
        kineto("kernel", "gemm", 110, 60, stream=7, correlation=9),
        kineto("kernel", "gemm", 210, 60, stream=7),
        kineto("kernel", "adam", 125, 10, stream=20),  # the recorder has the update
        kineto("kernel", "other", 400, 5, stream=20),
        kineto("kernel", "ncclDevKernel_AllGather", 251, 8, stream=30),
        kineto("kernel", "ncclDevKernel_SendRecv", 252, 6, stream=30),  # a user's all_to_all
        kineto("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 151, 8, stream=16, bytes=10),
        kineto("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 170, 8, stream=18, bytes=64),
        kineto("cpu_op", "aten::mm", 80, 5),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 90},
    ]
    # Kineto's clock is 1000 s behind.
    spans = with_kernels(found, 1e12, [])
    assert [s.begin_ns for s in spans if s.name == "gemm"] == [1e12 + 110e3, 1e12 + 210e3]
    spans = with_kernels(found, 0.0, recorded)
    compute = [s for s in spans if s.lane == names.GPU_COMPUTE]
    assert [(s.name, s.args.get("layer"), s.args.get("pass")) for s in compute] == [
        ("gemm", 0, "forward"),
        ("gemm", 1, "forward"),
        ("other", None, None),
    ]
    assert compute[0].args["launched"] == 94.0  # when the call had returned
    (exchange,) = [s for s in spans if s.name == "ncclDevKernel_SendRecv"]
    assert (exchange.lane, exchange.args["collective"]) == (names.GPU_COMMUNICATION, "send_recv")
    spans.remove(exchange)
    for lane in (names.D2H, names.GPU_UPDATE, names.GPU_COMMUNICATION):
        assert [s for s in spans if s.lane == lane] == [s for s in recorded if s.lane == lane]
    assert [s.args["bytes"] for s in spans if s.lane == names.H2D] == [64]
    assert [s.name for s in spans if s.lane == "Python: CUDA calls"] == ["cudaLaunchKernel"]


def test_without_kernels_layers_stay() -> None:
    recorded = [span(names.GPU_COMPUTE, 100, 200, layer=0, step=3)]
    assert with_kernels([kineto("cpu_op", "aten::mm", 80, 5)], 0.0, recorded) == recorded


def test_lanes_have_the_formats_order_and_streams_lines_of_their_own(tmp_path: Path) -> None:
    spans = [
        span(f"{names.CPU_ADAM} 2", 0, 1),
        span(names.CPU_ADAM, 0, 1),
        span(names.HOST_WAITS, 0, 1),
        span(names.GPU_COMPUTE, 0, 1, stream=7),
        span(names.GPU_COMPUTE, 0, 1, stream=20),
        span("Python: MainThread", 0, 1),
        span(names.STEPS, 0, 1),
    ]
    path = tmp_path / "trace.json"
    Recording(HEADER, spans).write(path)
    trace = Trace.read(path)
    order = [e for e in trace.file.events if e.get("name") == "thread_sort_index"]
    order.sort(key=lambda e: e["args"]["sort_index"])
    assert [trace.lane_of[e["pid"], e["tid"]] for e in order] == [
        names.STEPS,
        "Python: MainThread",
        names.GPU_COMPUTE,
        names.GPU_COMPUTE,
        names.CPU_ADAM,
        f"{names.CPU_ADAM} 2",
        names.HOST_WAITS,
    ]
    assert {e["pid"] for e in trace.file.events} == {3}
    assert list(tmp_path.iterdir()) == [path]


def test_a_layer_that_is_updated_twice_waits_until_its_first_update() -> None:
    spans = [
        span(names.CPU_ADAM, 10, 20, layer=0, step=1, chunk=0),
        span(names.CPU_ADAM, 20, 30, layer=0, step=1, chunk=1),
        span(names.CPU_ADAM, 50, 60, layer=0, step=1, chunk=0),  # previewed again
        span(names.GPU_UPDATE, 40, 45, layer=1, step=1),
    ]
    finals = [Final(1, 0, 5e3), Final(1, 1, 8e3)]
    changes = pending_gradients(ways(spans, finals))
    assert [(s.at_ns / 1e3, s.value) for s in changes] == [(5, 1), (8, 2), (30, 1), (45, 0)]


def test_arrows_of_a_way_that_began_before_the_recording_go_forward_in_time() -> None:
    """Chunk 0 was updated before it began, and is copied back in it; chunk 1 is there whole."""
    spans = [
        span(names.H2D, 5, 9, layer=0, step=1, chunk=0),
        span(names.CPU_ADAM, 6, 12, layer=0, step=1, chunk=1),
        span(names.H2D, 12, 15, layer=0, step=1, chunk=1),
        span(names.GPU_COMPUTE, 20, 25, layer=0, step=2, **{"pass": "forward"}),
    ]
    arrow = list(flow_events(ways(spans, []), spans, lambda _span: (0, 1)))
    assert [(event["ph"], event["ts"]) for event in arrow] == [("s", 6), ("t", 12), ("f", 20)]


def test_a_recorder_drops_what_is_too_much() -> None:
    recorder = Recorder(TraceClock(CPU), ["one"], most_spans=10)
    for number in range(25):
        recorder.add(names.H2D, str(number), number, number + 1, {})
    assert [s.name for s in recorder.spans()] == [str(number) for number in range(15, 25)]
    assert recorder.dropped == 15


def test_a_backward_that_never_ended_ends_with_its_step() -> None:
    recorder = Recorder(TraceClock(CPU), ["one"], most_spans=10)
    recorder.step = 4
    recorder.begin_forward()
    recorder.enter_layer(0, 0)
    recorder.end_forward()
    recorder.begin_backward(1)
    now = time.monotonic_ns()
    recorder.end_step(now - 10, now, {})
    found = {s.name for s in recorder.spans()}
    assert found == {"forward", "forward layer 0", "backward", "backward layer 0", "step 4"}


def test_layers_that_are_updated_together_share_their_time_by_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder(TraceClock(CPU), [], most_spans=10)
    marks = iter([1000, 5000, 5500])
    monkeypatch.setattr(recorder.clock, "mark", lambda: next(marks))
    recorder.updates_begin()
    recorder.layers_updated({3: 100, 4: 200, 7: 100})
    recorder.layers_updated({8: 64})
    found = [(s.name, s.begin_ns, s.end_ns, s.args[names.ARG_PARAMETERS]) for s in recorder.spans()]
    assert found == [
        ("update layer 3", 1000, 2000, 100),
        ("update layer 4", 2000, 4000, 200),
        ("update layer 7", 4000, 5000, 100),
        ("update layer 8", 5000, 5500, 64),
    ]


def test_counters_are_read_until_they_are_stopped() -> None:
    sampler = CounterSampler({"one": lambda: 1.0, "none": lambda: None}, most=3)
    deadline = time.monotonic() + 30
    while not sampler.samples and time.monotonic() < deadline:
        time.sleep(0.05)
    sampler.stop()
    count = len(sampler.samples)
    assert {s.name for s in sampler.samples} == {"one"}
    assert 1 <= count <= 3
    time.sleep(0.1)
    assert len(sampler.samples) == count


def test_a_counter_that_cannot_be_read_any_more_leaves_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    values = iter([1.0])
    sampler = CounterSampler({"lost": lambda: next(values), "kept": lambda: 2.0}, most=100)
    deadline = time.monotonic() + 30
    while len(sampler.samples) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    sampler.stop()
    assert [s.name for s in sampler.samples[:4]] == ["lost", "kept", "kept", "kept"]
    assert len(caplog.messages) == 1
    assert "the counter lost" in caplog.text


def test_a_trace_that_cannot_be_written_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills_the_disk(_content: object, file: TextIO, **_options: object) -> None:
        file.write("{")
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "trace_rank0.json"
    path.write_text("old")
    monkeypatch.setattr(writer.json, "dump", fills_the_disk)
    with pytest.raises(OSError, match="No space left"):
        Recording(HEADER, []).write(path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_waits_are_those_of_the_users_line() -> None:
    recorder = Recorder(TraceClock(CPU), [], most_spans=100)
    restore = watch_user_code(recorder, CPU, waits=True)
    try:
        torch.ones(1).item()
        bool(torch.ones(1))
        loader = torch.utils.data.DataLoader([1, 2, 3], batch_size=1)  # type: ignore[arg-type]
        assert len(list(loader)) == 3
    finally:
        restore()
    torch.ones(1).item()
    spans = recorder.spans()
    waits = [s for s in spans if s.lane == names.HOST_WAITS]
    assert [s.name for s in waits[:2]] == [".item()", ".__bool__()"]
    assert all(s.args["line"].startswith("test_trace_parts.py:") for s in waits)
    assert sum(s.name == names.PHASE_DATA for s in spans) == 4  # the last one finds no more


def test_our_own_waits_are_nobodys() -> None:
    def frame(*modules: str) -> Any:
        found = None
        for module in reversed(modules):
            code = SimpleNamespace(co_filename=f"/somewhere/{module}.py")
            found = SimpleNamespace(
                f_globals={"__name__": module}, f_code=code, f_lineno=7, f_back=found
            )
        return found

    assert user_line(frame("hytrain.kernels.clipping", "train")) is None
    assert user_line(frame("torch.functional", "hytrain.engine.engine", "train")) is None
    assert user_line(frame("torch._tensor", "model", "hytrain.engine.engine")) == "model.py:7"
    assert user_line(frame("transformers.trainer", "train")) == "train.py:7"
