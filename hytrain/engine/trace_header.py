"""What a trace's header says of the engine and of the machine that it ran on."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from hytrain import _C
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import HyTrainError
from hytrain.formats.trace_file import Peaks, TraceHeader
from hytrain.kernels.moments import native_moments
from hytrain.offload.pipeline import UpdatePipeline

_SWEPT_BYTES = 4 << 30
"""Of the state that is read and written to measure memory: more than any cache."""
_COPIED_BYTES = 64 << 20
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """What was recorded, and beside which steps.

    Attributes:
        steps: first and last step, both included.
        micro_batches: of a step.
        tokens: of a step; 0 where they were not seen.
        dropped: spans that are lost.
        overwritten: whether they were overwritten in a full ring.
        clock_offset_ns: to rank 0's clock.
    """

    steps: tuple[int, int]
    micro_batches: int
    tokens: int
    dropped: int
    overwritten: bool
    clock_offset_ns: float


def make_header(optimizer: HyTrainZeroOptimizer, run: RecordedRun, peaks: Peaks) -> TraceHeader:
    """The header of a rank's trace."""
    pipeline, device = optimizer.pipeline, optimizer.pipeline.streams.device
    return TraceHeader(
        rank=optimizer.collectives.rank,
        world_size=optimizer.collectives.world_size,
        steps=run.steps,
        layers=len(pipeline.layers),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        gpu_fraction=pipeline.num_gpu_layers / len(pipeline.layers),
        gpu_layers=tuple(x.index for x in pipeline.layers if x.placement == "gpu"),
        gradient_clipping=pipeline.norm.settings.max_norm,
        micro_batches=run.micro_batches,
        tokens_per_step=run.tokens or None,
        peaks=peaks,
        predicted_step_s=optimizer.placement.decisions[-1].predicted_seconds,
        dropped_spans=run.dropped,
        overwritten=run.overwritten,
        clock_offset_us=run.clock_offset_ns / 1e3,
    )


def with_overhead(
    header: TraceHeader, recorded: Sequence[float], plain: Sequence[float]
) -> TraceHeader:
    """The header with what recording cost.

    Args:
        header: without it.
        recorded: seconds of the recorded steps.
        plain: of steps beside them.
    """
    if not recorded or not plain:
        return header
    step = statistics.median(plain)
    overhead = statistics.median(recorded) / step - 1.0
    return header.model_copy(update={"unprofiled_step_s": step, "recording_overhead": overhead})


def measure_peaks(pipeline: UpdatePipeline, known: Peaks, num_threads: int) -> Peaks:
    """What memory and copies reach on their own, between two steps; some tenths of a second.

    Args:
        pipeline: whose host state is swept, and left as it is.
        known: the other peaks.
        num_threads: of the CPU update. Where the rank has more cores, all of them sweep memory:
            what the update's own threads reach is no peak, and hides what more would win.
    """
    num_threads = max(num_threads, known.cores or 1)
    found: dict[str, float | None] = {}
    # A worker that has failed, or no memory to copy: the trace is written all the same.
    with suppress(HyTrainError):
        pipeline.cpu.wait_all()
        found["dram_bytes_per_s"] = _memory_rate(pipeline, num_threads)
    if pipeline.streams.is_cuda:
        with suppress(RuntimeError, MemoryError):
            to_host, to_device = _copy_rates(pipeline.streams.device)
            found |= {"d2h_bytes_per_s": to_host, "h2d_bytes_per_s": to_device}
    return known.model_copy(update=found)


def _memory_rate(pipeline: UpdatePipeline, num_threads: int) -> float | None:
    """Bytes a second of reading and writing the layers' state, all there is up to a limit."""
    swept = 0
    begin = time.perf_counter()
    for layer in pipeline.cpu.layers:
        if swept >= _SWEPT_BYTES or layer.moving or layer.master.numel() == 0:
            continue
        _C.read_write(
            layer.master.data_ptr(),
            native_moments(layer.exp_avg, layer.exp_avg_sq, None),
            layer.shard_size,
            num_threads,
        )
        swept += 2 * layer.state_bytes  # read and written
    return swept / (time.perf_counter() - begin) if swept else None


def _copy_rates(device: torch.device) -> tuple[float, float]:
    """Bytes a second to the host and to the device; the best of some copies."""
    host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=device)
    rates: list[float] = []
    for destination, source in ((host, there), (there, host)):
        seconds: list[float] = []
        for _ in range(_REPEATS):
            begin = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            begin.record(torch.cuda.current_stream(device))
            destination.copy_(source, non_blocking=True)
            end.record(torch.cuda.current_stream(device))
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        rates.append(_COPIED_BYTES / min(seconds))
    return rates[0], rates[1]
