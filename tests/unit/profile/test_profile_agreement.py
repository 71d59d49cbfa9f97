"""What is planned from a profile of three layers is what the whole model takes."""

from __future__ import annotations

import datetime
import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from paced_model import profile_layer
from support.configs import LLAMA, write_config

from hytrain.formats.profile_file import CopyRates, DeviceProfile
from hytrain.placement.step_timer import Clock
from hytrain.tools.planner.cluster import GpuProfile
from hytrain.tools.planner.profile_problem import PlanOptions, gpu_profile
from hytrain.tools.profiler.block_hooks import Recomputation
from hytrain.tools.profiler.gradient_sink import GradientSink
from hytrain.tools.profiler.layer_bench import CpuMeter, CudaMeter, MemoryMeter
from hytrain.tools.profiler.layer_profile import LayerProfile
from hytrain.tools.profiler.measured_model import MeasuredModel, read_subject
from hytrain.tools.profiler.profile_options import ProfileOptions
from hytrain.tools.profiler.ranks import Ranks
from hytrain.tools.profiler.run import profile_ranks

NUM_LAYERS = 8
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def subject_of(
    folder: Path, fields: dict[str, Any], seq_len: int, dtype: torch.dtype
) -> MeasuredModel:
    described = LLAMA | {"num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 2048} | fields
    return read_subject(
        str(write_config(folder / "model", described)), seq_len=seq_len, dtype=dtype
    )


def as_planned(subject: MeasuredModel, found: LayerProfile) -> GpuProfile:
    """What the planner makes of a measured layer."""
    device = DeviceProfile(
        host="here",
        label="GPU",
        device="GPU",
        multiprocessors=1,
        limit_bytes=2**40,
        memory_bytes=2**40,
        idle_bytes=0,
        layer=found.layer,
        outside=found.outside,
        update_rate=1.0,
        copies=CopyRates(to_host=1.0, from_host=1.0, to_host_both=1.0, from_host_both=1.0),
        measured=datetime.datetime.now(datetime.timezone.utc),
    )
    model = subject.sizes().model_copy(update={"boundary_bytes": found.boundary_bytes})
    options = PlanOptions(batch=1, gpu_reserve=lambda _: 0, host_reserve=lambda _: 0)
    return gpu_profile(device, model, options)


class Whole:
    """The whole model, its gradients taken over as training takes them."""

    def __init__(self, subject: MeasuredModel, device: torch.device, *, recomputes: bool) -> None:
        self._subject = subject
        self._device = device
        self._copy = subject.copy(NUM_LAYERS, device)
        self._sink = GradientSink(self._copy.layers, device)
        if recomputes:
            self._context = Recomputation(self._copy.blocks).installed()
            self._context.__enter__()

    def _batch(self, size: int) -> Any:
        with self._subject.defaults(self._device):
            return self._copy.make_batch(size)

    def _pass(self, batch: Any) -> None:
        loss = self._copy.loss(batch)
        self._sink.begin_pass()
        loss.backward()
        self._sink.end_pass()

    def peak(self, size: int) -> int:
        """Most bytes in a pass, weights apart."""
        model = self._copy.model
        meter: MemoryMeter = CpuMeter([*model.parameters(), *model.buffers()])
        if self._device.type == "cuda":
            meter = CudaMeter(self._device)
            self._pass(self._batch(size))  # workspaces
        batch = self._batch(size)
        before = meter.allocated()
        meter.take_peak()
        with meter:
            self._pass(batch)
        return meter.take_peak() - before

    def seconds(self, size: int) -> float:
        """Of a pass, in a row of passes."""
        batch, clock, marks = self._batch(size), Clock(self._device), []
        for _ in range(12):
            marks.append(clock.mark())
            self._pass(batch)
        torch.cuda.synchronize(self._device)
        pairs = itertools.pairwise(marks[2:])  # the first ones' host was not ahead
        return statistics.median(clock.seconds(begin, end) for begin, end in pairs)


def assert_memory_agrees(
    subject: MeasuredModel, device: torch.device, sizes: tuple[int, ...]
) -> None:
    found = profile_layer(subject, device, ProfileOptions(micro_batches=sizes, seconds=2.0))
    planned = as_planned(subject, found)
    for recomputes in (False, True):
        whole = Whole(subject, device, recomputes=recomputes)
        for size in sizes:
            kept = NUM_LAYERS * size * found.boundary_bytes
            if recomputes:
                expected = planned.peak_bytes.at(size) + kept
            else:
                assert planned.stored_bytes is not None
                expected = planned.stored_bytes.at(size)
            assert 0.97 < expected / whole.peak(size) < 1.08, (recomputes, size)


@pytest.mark.parametrize(
    ("fields", "seq_len"),
    [
        ({}, 128),
        ({"vocab_size": 2048, "tie_word_embeddings": True}, 128),
    ],
    ids=["blocks dominate", "tied"],
)
def test_memory_of_the_whole_model(tmp_path: Path, fields: dict[str, Any], seq_len: int) -> None:
    subject = subject_of(tmp_path, fields, seq_len, torch.float32)
    assert_memory_agrees(subject, torch.device("cpu"), (1, 4))


# ---- on a GPU ----

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 32000,
}


@pytest.mark.gpu
@needs_gpu
def test_memory_of_the_whole_model_on_a_gpu(tmp_path: Path) -> None:
    subject = subject_of(tmp_path, LARGE, 1024, torch.bfloat16)
    assert_memory_agrees(subject, torch.device("cuda", torch.cuda.current_device()), (1, 4, 8))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("recomputes", [False, True])
def test_time_of_the_whole_model_on_a_gpu(tmp_path: Path, recomputes: bool) -> None:
    """On a stream of its own, as one of a green context would be.

    With few samples the host's launches would be measured, which differ from second to second.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    subject = subject_of(tmp_path, LARGE, 1024, torch.bfloat16)
    with torch.cuda.stream(torch.cuda.Stream(device)):
        found = profile_layer(subject, device, ProfileOptions(micro_batches=(16, 24)))
        whole = Whole(subject, device, recomputes=recomputes)
        for block, around in zip(found.layer, found.outside, strict=True):
            backward = block.recompute_backward_ms if recomputes else block.backward_ms
            expected = NUM_LAYERS * (block.forward_ms + backward)
            expected += around.forward_ms + around.backward_ms
            assert 1e3 * whole.seconds(block.samples) == pytest.approx(expected, rel=0.07)


@pytest.mark.gpu
@needs_gpu
def test_a_profile_of_a_gpu(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    subject = subject_of(tmp_path, LARGE, 1024, torch.bfloat16)
    before = torch.cuda.memory_allocated(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(0.5, device)
    try:
        options = ProfileOptions(micro_batches=(1, 2), multiprocessors=7, settings="half")
        profile = profile_ranks(subject, device, options, ranks=Ranks(alone=True))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    (found,) = profile.devices
    assert (found.multiprocessors, found.settings) == (7, "half")
    assert found.limit_bytes == total // 2
    assert found.memory_bytes <= found.limit_bytes
    assert min(found.copies.model_dump().values()) > 1e9
    assert found.copies.to_host_both <= 1.1 * found.copies.to_host
    assert found.update_rate > 1e9
    for row in (*found.layer, *found.outside):
        assert row.launch_ms is not None
        assert 0.0 < row.launch_ms < 1e3
    assert found.launch_slowdown is not None
    assert found.launch_spread is not None
    assert found.update_launches is not None
    assert max(found.update_launches.model_dump().values()) < 10.0
    assert found.update_launches.gpu_layer_ms + found.update_launches.launch_ms > 0.0
    assert torch.cuda.memory_allocated(device) - before <= found.idle_bytes + 2**20
