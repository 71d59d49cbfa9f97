"""Recorded steps on a GPU: one clock for host and device, kernels, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import OFFLOAD_AT_SCALE, built, join_process_group, make_config
from support.models import loss_of, make_batch, make_model
from support.traces import Trace, traced_config

from hytrain.formats import trace_file as names

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

KIND = "llama-100m"
LAYERS = 14
CLOSE_US = 100.0
"""By which a device's times, made the host's, may be wrong; a launch takes about 10."""
STEPS = (10, 14)


def _train(config: dict[str, Any], steps: int) -> dict[str, torch.Tensor]:
    join_process_group()
    with built(make_model(KIND), config) as engine:
        device = engine.device
        for step in range(steps):
            loss = loss_of(engine(**make_batch(KIND, step, device)))
            engine.backward(loss)
            engine.step()
            loss.item()
        state = engine.fp32_state_dict()
    return {f"{name}.{kind}": t for name, parts in state.items() for kind, t in parts.items()}


def _config(folder: Path, **trace: Any) -> dict[str, Any]:
    return traced_config(folder, STEPS, gpu_fraction=0.5, offload=OFFLOAD_AT_SCALE, trace=trace)


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Trace]:
    """With kernels and without."""
    found: dict[bool, Trace] = {}
    for kernels in (True, False):
        folder = tmp_path_factory.mktemp(f"kernels_{kernels}")
        _train(_config(folder, kernels=kernels), 20)
        found[kernels] = Trace.read(folder / "trace_rank0.json")
    return found


def _end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


@pytest.mark.parametrize("kernels", [True, False])
def test_copies_of_the_device_and_passes_of_the_host_are_in_order(
    traces: dict[bool, Trace], kernels: bool
) -> None:
    trace = traces[kernels]
    assert trace.header.steps == (10, 13)
    for step in range(10, 14):
        updates = trace.spans(names.CPU_ADAM, step=step)
        assert {e["args"]["layer"] for e in updates} == set(range(LAYERS // 2, LAYERS))
        for update in updates:
            where = {key: update["args"][key] for key in ("step", "layer", "chunk")}
            (copied,) = trace.spans(names.D2H, **where)
            sent = trace.spans(names.H2D, **where)[-1]
            assert _end(copied) <= update["ts"] + CLOSE_US
            assert update["ts"] <= sent["ts"] + CLOSE_US
            assert copied["dur"] > 0
            # At most what PCIe 5 can carry: otherwise a time is wrong.
            assert copied["args"]["bytes"] / copied["dur"] < 130e3


def test_layers_are_timed_by_events_where_there_are_no_kernels(
    traces: dict[bool, Trace],
) -> None:
    trace = traces[False]
    for step in range(10, 14):
        forward = trace.spans(names.GPU_COMPUTE, step=step, **{"pass": "forward"})
        assert sorted({e["args"]["layer"] for e in forward}) == list(range(LAYERS))
        begin, end = trace.steps()[step]
        assert all(begin - CLOSE_US <= e["ts"] <= end + CLOSE_US for e in forward)


def test_waits_have_their_line(traces: dict[bool, Trace]) -> None:
    for trace in traces.values():
        waits = trace.spans(names.HOST_WAITS)
        assert {e["name"] for e in waits} == {".item()"}
        assert all(e["args"]["line"].startswith("test_recording_gpu.py:") for e in waits)


def test_kernels_have_layer_and_launch(traces: dict[bool, Trace]) -> None:
    trace = traces[True]
    kernels = trace.spans(names.GPU_COMPUTE)
    assert len(kernels) > 4 * LAYERS * 10
    of_layers = [e for e in kernels if "layer" in e["args"]]
    assert len(of_layers) > 0.8 * len(kernels)
    assert {e["args"]["layer"] for e in of_layers} == set(range(LAYERS))
    launched = [e for e in kernels if "launched" in e["args"]]
    assert len(launched) > 0.9 * len(kernels)
    assert all(e["args"]["launched"] <= e["ts"] + CLOSE_US for e in launched)


def test_kineto_and_the_recorder_agree_on_time(traces: dict[bool, Trace]) -> None:
    """Kernels of a layer lie where CUDA events say that the layer was computed."""
    kernels, layers = traces[True], traces[False]
    for trace in (kernels, layers):
        gradient = trace.spans(names.D2H, step=11, layer=LAYERS - 1)[0]
        backward = trace.spans(names.GPU_COMPUTE, step=11, layer=LAYERS - 1, **{"pass": "backward"})
        # The copy waits for the gradient, which the last of these kernels makes.
        assert gradient["ts"] >= backward[0]["ts"]
        assert gradient["ts"] <= _end(backward[-1]) + 20_000.0
    copies = [e for e in kernels.spans(names.D2H) if e["name"].startswith("Memcpy")]
    own = [e for e in kernels.spans(names.D2H) if not e["name"].startswith("Memcpy")]
    # What the recorder has itself is not there twice.
    large = [e for e in copies if e["args"].get("bytes", 0) > 1e6]
    assert own
    assert not large


def test_the_trainings_results_are_the_same(tmp_path: Path) -> None:
    plain = _train(make_config(gpu_fraction=0.5, offload=OFFLOAD_AT_SCALE), 16)
    traced = _train(_config(tmp_path), 16)
    assert all(torch.equal(plain[name], traced[name]) for name in plain)


MOST_PER_KERNEL_S = 15e-6
"""Of host time; a launch takes about 5 us without a profiler, on a slow host 10."""


@pytest.mark.parametrize("kernels", [True, False])
def test_what_recording_takes(traces: dict[bool, Trace], kernels: bool) -> None:
    """2 % of a step is the aim at 2.9 B; this model is small, and bound by launches."""
    trace = traces[kernels]
    header = trace.header
    assert header.recording_overhead is not None
    assert header.unprofiled_step_s is not None
    spent = header.recording_overhead * header.unprofiled_step_s
    launched = len(trace.spans(names.GPU_COMPUTE, step=12))
    print(f"kernels {kernels}: {1e3 * spent:.1f} ms a step, {launched} spans of the device")
    if kernels:
        assert spent < MOST_PER_KERNEL_S * launched
    else:
        assert header.recording_overhead < 0.25
    assert header.peaks.d2h_bytes_per_s is not None
    assert header.peaks.h2d_bytes_per_s is not None
