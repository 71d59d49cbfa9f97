"""What memory and copies reach on their own: what a trace's rates are held against."""

from __future__ import annotations

import time
from contextlib import suppress

import torch

from hytrain import _C
from hytrain.errors import HyTrainError
from hytrain.formats.trace_file import Peaks
from hytrain.kernels.moments import native_moments
from hytrain.offload.update_pipeline import UpdatePipeline

_SWEPT_BYTES = 4 << 30
"""Of the state that is read and written to measure memory: more than any cache."""
_COPIED_BYTES = 64 << 20
_REPEATS = 3


def measure_peaks(pipeline: UpdatePipeline, known: Peaks, num_threads: int) -> Peaks:
    """Measures between two steps; takes some tenths of a second.

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
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    rates: list[float] = []
    for destination, source in ((host, there), (there, host)):
        milliseconds: list[float] = []
        for _ in range(_REPEATS):
            begin.record(torch.cuda.current_stream(device))
            destination.copy_(source, non_blocking=True)
            end.record(torch.cuda.current_stream(device))
            end.synchronize()
            milliseconds.append(begin.elapsed_time(end))
        rates.append(_COPIED_BYTES / min(milliseconds) * 1e3)
    return rates[0], rates[1]
