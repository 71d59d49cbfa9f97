"""Traces of torch.profiler: what they can tell is told, the rest is said to be unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hytrain.errors import TraceError
from hytrain.tools import cli
from hytrain.tools.trace import causes, fixes, kinds
from hytrain.tools.trace.analysis import Analysis, analyse
from hytrain.tools.trace.graph import Graph
from hytrain.tools.trace.load import load
from hytrain.tools.trace.report_text import report

MAIN, AUTOGRAD, STREAM, NCCL, COPIES = 100, 101, 7, 20, 24


class Kineto:
    """Events as Kineto writes them, in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def span(self, cat: str, name: str, begin: float, end: float, tid: int, **args: Any) -> None:
        pid = 0 if cat in ("kernel", "gpu_memcpy") else 4711
        common = {"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid}
        self.events.append(common | {"ts": begin, "dur": end - begin, "args": args})

    def launch(
        self,
        name: str,
        called: float,
        begin: float,
        end: float,
        *,
        stream: int = STREAM,
        cat: str = "kernel",
        tid: int = MAIN,
        **args: Any,
    ) -> None:
        self._correlation += 1
        call = "cudaLaunchKernel" if cat == "kernel" else "cudaMemcpyAsync"
        number = self._correlation
        self.span("cuda_runtime", call, called, called + 5, tid, correlation=number)
        self.span(cat, name, begin, end, stream, correlation=number, stream=stream, **args)

    def write(self, path: Path, **top: Any) -> Path:
        path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": self.events, **top}))
        return path


def steps(kineto: Kineto, *, forward_launch: float = 10.0) -> Kineto:
    """Two steps of two layers: 200 us of forward, 400 of backward, a gather in between."""
    for number, at in ((3, 1000.0), (4, 3000.0)):
        kineto.span("user_annotation", f"ProfilerStep#{number}", at, at + 2000, MAIN)
        called, gpu = at + forward_launch, at + forward_launch + 20
        for layer in range(2):
            name = f"nn.Module: LlamaDecoderLayer_{layer}"
            kineto.span("python_function", name, called, called + 20, MAIN)
            sequence: dict[str, Any] = {"Sequence number": 10 * number + layer, "Fwd thread id": 0}
            kineto.span("cpu_op", "aten::linear", called + 1, called + 19, MAIN, **sequence)
            kineto.launch("gemm", called + 5, gpu, gpu + 100)
            called, gpu = called + 30, gpu + 100
        for layer in (1, 0):
            name = "autograd::engine::evaluate_function: AddmmBackward0"
            sequence = {"Sequence number": 10 * number + layer, "Fwd thread id": 1}
            kineto.span("cpu_op", name, called, called + 20, AUTOGRAD, **sequence)
            kineto.launch("gemm", called + 5, gpu, gpu + 200, tid=AUTOGRAD)
            called, gpu = called + 30, gpu + 200
        kineto.end = gpu  # type: ignore[attr-defined]
    return kineto


def run(tmp_path: Path, kineto: Kineto, **top: Any) -> Analysis:
    return analyse(load([kineto.write(tmp_path / "trace.json", **top)]))


def test_passes_and_layers_come_from_where_kernels_were_launched(tmp_path: Path) -> None:
    one = run(tmp_path, steps(Kineto())).steps[0][0]
    assert one.step.number == 3
    assert (one.parts["forward"], one.parts["backward"]) == (200_000, 400_000)
    for layer in (0, 1):
        assert one.layers[layer]["forward"].total == 100_000
        assert one.layers[layer]["backward"].total == 200_000
    assert set(one.layers) == {0, 1}
    assert sum(one.parts.values()) == one.step.length == 2_000_000


def test_a_step_whose_launches_come_late_is_launch_bound(tmp_path: Path) -> None:
    analysis = run(tmp_path, steps(Kineto(), forward_launch=1200.0))
    (cause, *_) = analysis.causes
    assert cause.cause == causes.LAUNCH
    assert analysis.steps[0][1].parts[causes.LAUNCH] > 1_200_000


def test_a_kernel_that_waited_for_a_collective_on_another_stream(tmp_path: Path) -> None:
    """It was launched in time, and began when the collective ended: said to be by timing."""
    kineto = steps(Kineto())
    args: dict[str, Any] = {"In msg nelems": 500, "Out msg nelems": 1000, "dtype": "BFloat16"}
    kineto.launch("ncclDevKernel_AllGather_RING_LL", 1500, 1700, 2000, stream=NCCL, **args)
    kineto.launch("gemm", 1510, 2002, 2100)
    one = run(tmp_path, kineto).steps[0][0]
    (blame,) = [blame for blame in one.idle if blame.cause == kinds.COMMUNICATION]
    assert (blame.length, blame.evidence, blame.detail) == (300_000, "timing", "all_gather")
    (hand_over,) = [blame for blame in one.idle if blame.cause == causes.HAND_OVER]
    assert hand_over.length == 2_000
    overlap = one.activities["communication"]
    assert (overlap.total, overlap.hidden, overlap.blocking) == (300_000, 0, 300_000)


def test_ulysses_exchanges_activations(tmp_path: Path) -> None:
    """An all_to_all of a block, and a copy of its gradient that does not come of it."""
    kineto = steps(Kineto())
    args: dict[str, Any] = {"Collective name": "all_to_allv"}
    kineto.span("python_function", "nn.Module: LlamaDecoderLayer_1", 1500, 1530, MAIN)
    kineto.launch("ncclDevKernel_SendRecv", 1505, 1700, 1900, stream=NCCL, **args)
    kineto.launch("gemm", 1515, 1902, 2000)
    memcpy: dict[str, Any] = {"cat": "gpu_memcpy", "stream": COPIES, "bytes": 900_000}
    kineto.launch("Memcpy DtoH (Device -> Pinned)", 1520, 2010, 2050, **memcpy)
    analysis = run(tmp_path, kineto)
    (blame,) = [b for b in analysis.steps[0][0].idle if b.cause == kinds.COMMUNICATION]
    assert (blame.length, blame.detail) == (200_000, "all_to_all")
    assert analysis.steps[0][0].activities["communication"].blocking == 200_000
    nodes = Graph(analysis.ranks).nodes
    (exchange,) = [node for node in nodes if node.resource == kinds.COMMUNICATION]
    (copy,) = [node for node in nodes if node.resource == kinds.D2H]
    before = [edge.before for edge in copy.edges]
    assert exchange.layer == copy.layer == 1
    assert exchange not in before
    assert not exchange.edges


def test_a_copy_that_ends_between_two_kernels_is_not_on_the_critical_path(tmp_path: Path) -> None:
    kineto = Kineto()
    for number, at in ((3, 1000.0), (4, 3000.0)):
        kineto.span("user_annotation", f"ProfilerStep#{number}", at, at + 2000, MAIN)
        for layer in range(9):
            called, gpu = at + 10 * layer, at + 100 + 200 * layer
            name = f"nn.Module: LlamaDecoderLayer_{layer}"
            kineto.span("python_function", name, called, called + 9, MAIN)
            sequence: dict[str, Any] = {"Sequence number": 10 * number + layer, "Fwd thread id": 0}
            kineto.span("cpu_op", "aten::linear", called + 1, called + 8, MAIN, **sequence)
            kineto.launch("gemm", called + 2, gpu, gpu + 197)
        memcpy: dict[str, Any] = {"cat": "gpu_memcpy", "stream": COPIES, "bytes": 900_000}
        for gap in (at + 697, at + 1497):
            kineto.launch("Memcpy DtoH (Device -> Pinned)", at + 90, gap - 90, gap + 1, **memcpy)
    critical = run(tmp_path, kineto).critical[0]
    assert critical["compute"] == pytest.approx(9 * 197e-6, rel=1e-6)
    assert critical[causes.KERNEL_GAPS] == pytest.approx(8 * 3e-6, rel=1e-6)
    assert kinds.D2H not in critical


def test_a_synchronization_is_named_with_its_function(tmp_path: Path) -> None:
    kineto = steps(Kineto())
    kineto.span("python_function", "/home/me/train.py(31): train", 1000, 2900, MAIN)
    kineto.span("python_function", "/x/site-packages/torch/_tensor.py(9): item", 1700, 2600, MAIN)
    kineto.span("cuda_runtime", "cudaStreamSynchronize", 1710, 2590, MAIN, correlation=9999)
    kineto.launch("elementwise", 2600, 2610, 2650)
    blames = run(tmp_path, kineto).steps[0][0].idle
    (longest, _) = [blame for blame in blames if blame.cause == causes.SYNCHRONIZATION]
    assert longest.length == 880_000
    assert longest.detail == "train (train.py:31)"


def test_plain_deepspeed_updates_on_the_host(tmp_path: Path) -> None:
    kineto = steps(Kineto())
    name = "Optimizer.step#DeepSpeedCPUAdam.step"
    for at in (1000, 3000):
        memcpy: dict[str, Any] = {"cat": "gpu_memcpy", "stream": COPIES}
        copied: dict[str, Any] = memcpy | {"bytes": 900_000}
        kineto.launch("Memcpy DtoH (Device -> Pinned)", at + 700, at + 710, at + 800, **copied)
        kineto.span("user_annotation", name, at + 800, at + 1600, MAIN)
        kineto.launch(
            "Memcpy HtoD (Pinned -> Device)", at + 1600, at + 1610, at + 1700, **memcpy, bytes=9
        )
    analysis = run(tmp_path, kineto)
    one = analysis.steps[0][0]
    assert one.activities["update on the CPU"].total == 800_000
    assert one.activities["gradients to host"].exposed == 90_000
    assert one.parts[causes.CPU_ADAM] == 800_000
    (cores,) = [fix for fix in analysis.fixes if fix.name == fixes.CORES]
    assert cores.gain >= 0.4  # the copy to the GPU, and what follows, come sooner
    # Nothing says that gradients are clipped, or which layers there are.
    assert not {fixes.NO_CLIPPING, fixes.GPU_LAYERS} & {fix.name for fix in analysis.fixes}
    rates = {rate.name: rate for rate in analysis.rates[0]}
    assert rates["copies to host"].achieved == pytest.approx(900_000 / 90e-6)


def test_reports_what_is_unknown(tmp_path: Path) -> None:
    kineto = Kineto()
    kineto.span("kernel", "gemm", 10, 20, STREAM)
    text = report(run(tmp_path, kineto))
    for words in ("no marks of steps", "layers are not named", "told apart"):
        assert words in " ".join(text.split())
    assert "not hytrain's" in report(run(tmp_path, kineto), verbose=True)


def test_ranks_come_from_the_file_or_its_name(tmp_path: Path) -> None:
    first = steps(Kineto()).write(tmp_path / "a.json", distributedInfo={"rank": 3})
    second = steps(Kineto()).write(tmp_path / "worker_rank5.json")
    assert [rank.rank for rank in load([second, first])] == [3, 5]
    with pytest.raises(TraceError, match="both of rank 3"):
        load([first, first])


def test_a_profile_of_torch_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real one: operators of the CPU stand for the GPU."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    optimizer = torch.optim.Adam(model.parameters())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            model(torch.ones(32, 64)).sum().backward()
            optimizer.step()
            profiler.step()
    path = tmp_path / "torch.json"
    profiler.export_chrome_trace(str(path))
    assert cli.main(["trace", "report", str(path), "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "backward" in text
    assert "operators of the CPU stand for it" in " ".join(text.split())
    for of_gpu in ("The GPU", "Try first", "fix, each alone", "of peak"):
        assert of_gpu not in text
    (rank,) = load([path])
    assert {"forward", "backward"} <= set(rank["compute"].detail)
    assert len(rank["phase"]) == 3
    assert "layers are not named" in " ".join(text.split())


def test_a_trace_of_functions_only_is_refused(tmp_path: Path) -> None:
    kineto = Kineto()
    kineto.span("FEE", "main (/x/train.py:3)", 10, 20, MAIN)
    with pytest.raises(TraceError, match="neither GPU events nor operators"):
        load([kineto.write(tmp_path / "trace.json")])
