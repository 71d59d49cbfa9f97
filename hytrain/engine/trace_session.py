"""One recording of an engine: adds hooks when it begins, and removes them when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import psutil
import torch
from torch import nn

from hytrain import _C
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import HyTrainError
from hytrain.formats import trace_file as names
from hytrain.formats.trace_file import Peaks, TraceHeader
from hytrain.hardware.energy import EnergyMeter
from hytrain.hardware.gpu_memory import allocated_bytes
from hytrain.kernels.moments import native_moments
from hytrain.model.backward_hooks import before_backward
from hytrain.offload.pinning import copy_rate
from hytrain.offload.update_pipeline import UpdatePipeline
from hytrain.optimizer.layer_guards import tensors_in
from hytrain.trace.clock import TraceClock
from hytrain.trace.counters import CounterSampler, Sample
from hytrain.trace.kernels import KernelProfile, worker_spans
from hytrain.trace.recorder import Recorder, Span
from hytrain.trace.user_code import watch_user_code
from hytrain.trace.writer import Recording

RING_SPANS = 1 << 16
"""Spans that the update worker can record between two steps: 4 MiB."""
MOST_SPANS = 1_000_000
"""Spans that are kept of a recording: as many as VizTracer keeps of its own."""
_SWEPT_BYTES = 4 << 30
"""Bytes of state that are read and written to measure memory: more than any cache has."""
_COPIED_BYTES = 64 << 20


class TraceSession:
    """One recording, from its first step until all of it is plain numbers.

    It has the spans of its steps, including what the update worker does for the last one before
    :meth:`finish`.
    """

    def __init__(
        self,
        optimizer: HyTrainZeroOptimizer,
        layer_of: Mapping[nn.Module, int],
        *,
        threads: bool,
        kernels: bool,
    ) -> None:
        """Starts recording, between two steps. ``layer_of``: modules whose forward is a layer's;
        ``threads``: each thread of the update gets its own lane; ``kernels``: record GPU kernels.
        """
        self._optimizer = optimizer
        self._pipeline = pipeline = optimizer.pipeline
        self._worker = pipeline.cpu.worker
        device = pipeline.streams.device
        self._clock = TraceClock(device)
        self.recorder = Recorder(self._clock, [x.name for x in pipeline.layers], MOST_SPANS)
        self._worker_spans: deque[_C.TraceSpan] = deque(maxlen=MOST_SPANS)
        self._lost = 0
        self._samples: list[Sample] = []
        self._recording: Recording | None = None
        self.seconds: list[float] = []
        """Durations of the recorded steps."""
        self.is_recording = True
        self.is_finished = False
        self._first_step = self._last_step = 0
        self._profile = KernelProfile() if kernels and device.type == "cuda" else None
        self._clock.start()
        self._worker.set_trace_anchor(*self._clock.anchor)
        self._has_threads = threads
        self._worker.start_trace(RING_SPANS, threads)
        if self._profile is not None:
            self._profile.start()
        self._meter = EnergyMeter(device)
        self._energy = self._meter.read()
        self._sampler = CounterSampler(_readers(optimizer, self._meter), MOST_SPANS)
        self._undo = ExitStack()
        """Removes what is added to the engine here."""
        self._undo.callback(watch_user_code(self.recorder, device, waits=device.type != "cpu"))
        for number, (module, layer) in enumerate(layer_of.items()):
            for handle in _follow_layer(module, layer, number, self.recorder):
                self._undo.callback(handle.remove)
        passes = optimizer.passes
        for part in (optimizer.collectives, pipeline, passes, passes.reducer):
            part.trace = self.recorder
            self._undo.callback(setattr, part, "trace", None)

    def begin_step(self, step: int) -> None:
        """Begins recording a step."""
        self._first_step = self._first_step or step
        self.recorder.step = step
        now, layers = time.monotonic_ns(), len(self._pipeline.layers)
        share = self._pipeline.num_gpu_layers / layers
        self._samples.append(Sample(names.COUNTER_GPU_FRACTION, now, share))

    def end_step(self, begin_ns: int, end_ns: int) -> None:
        """Ends the step; times are CLOCK_MONOTONIC's."""
        self._last_step = self.recorder.step
        seconds = (end_ns - begin_ns) / 1e9
        self.seconds.append(seconds)
        args: dict[str, Any] = {names.ARG_STEP: self.recorder.step}
        before, self._energy = self._energy, self._meter.read()
        used = self._energy.since(before)
        if used.gpu_joules is not None:
            args[names.ARG_GPU_ENERGY] = round(used.gpu_joules, 3)
        if used.cpu_joules is not None:
            args[names.ARG_CPU_ENERGY] = round(used.cpu_joules, 3)
            watts = used.cpu_joules / seconds
            self._samples.append(Sample(names.COUNTER_CPU_POWER, end_ns, watts))
        self.recorder.end_step(begin_ns, end_ns, args)
        if self._clock.advance():
            self._worker.set_trace_anchor(*self._clock.anchor)
        self._drain()

    def _drain(self) -> None:
        spans, lost = self._worker.take_trace()
        self._lost += lost + max(0, len(spans) + len(self._worker_spans) - MOST_SPANS)
        self._worker_spans.extend(spans)

    def end_steps(self) -> None:
        """Stops recording steps; the update worker may still be working on the last one."""
        self.is_recording = False
        self._undo.close()
        self._sampler.stop()
        if self._profile is not None:
            # The profile is to have all that the last step has queued, and nothing of the next.
            self._pipeline.streams.synchronize()
            self._profile.stop()

    def finish(self, clock_offset_ns: float, *, measures_peaks: bool) -> Recording | None:
        """Ends the recording and returns it; None if no step was made.

        The first call waits for the update worker and the device, and may measure the peak rates of
        memory and copies. ``clock_offset_ns``: what to add to this rank's clock for rank 0's.
        """
        if self.is_finished:
            return self._recording
        self.is_finished = True
        if self.is_recording:
            self.end_steps()
        if not self._optimizer.passes.open_step.has_gradients:
            # step() returns before the worker has made its updates: without this wait a trace that
            # is written at once would lack them. If a further step has begun, its forward has
            # waited for them, and what it has sent since may wait for a rank that has failed.
            with suppress(RuntimeError):  # a failed worker is reported in training
                self._worker.wait_traced()
        self._worker.stop_trace()
        self._drain()
        self._clock.stop()
        # The worker's handle of the anchor must not outlive it.
        self._worker.set_trace_anchor(0, 0)
        if not self.seconds:
            return None
        placement = self._optimizer.placement
        peaks = Peaks(
            cores=placement.host.cores,
            adam_parameters_per_s=1.0 / placement.threads.seconds_per_parameter,
        )
        if measures_peaks:
            peaks = measure_peaks(self._pipeline, peaks, placement.threads.num_threads)
        spans = self._all_spans()
        samples = [*self._samples, *self._sampler.samples]
        header = self._header(peaks, clock_offset_ns)
        self._recording = Recording(header, spans, self.recorder.finals(), samples)
        return self._recording

    def _header(self, peaks: Peaks, clock_offset_ns: float) -> TraceHeader:
        optimizer, pipeline, recorder = self._optimizer, self._pipeline, self.recorder
        device, dropped = pipeline.streams.device, self._lost + recorder.dropped
        return TraceHeader(
            rank=optimizer.collectives.rank,
            world_size=optimizer.collectives.world_size,
            steps=(self._first_step, self._last_step),
            layers=len(pipeline.layers),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
            gpu_fraction=pipeline.num_gpu_layers / len(pipeline.layers),
            gpu_layers=tuple(x.index for x in pipeline.layers if x.placement == "gpu"),
            gradient_clipping=pipeline.norm.settings.max_norm,
            micro_batches=recorder.micro_batches,
            tokens_per_step=recorder.tokens or None,
            peaks=peaks,
            predicted_step_s=optimizer.placement.decisions[-1].predicted_seconds,
            dropped_spans=dropped,
            overwritten=dropped > 0,
            clock_offset_us=clock_offset_ns / 1e3,
        )

    def _all_spans(self) -> list[Span]:
        layers = self._pipeline.layers
        index_of = {layer.worker_index: layer.index for layer in layers}
        worker = worker_spans(
            self._worker_spans,
            index_of.__getitem__,
            self._clock.corrected,
            1 if self._has_threads else self._optimizer.placement.threads.num_threads,
        )
        spans = [*self.recorder.spans(), *worker]
        if self._profile is not None:
            spans = self._profile.spans(spans)
        steps = [span for span in spans if span.lane == names.STEPS]
        begin_ns, end_ns = steps[0].begin_ns, steps[-1].end_ns

        def is_recorded(span: Span) -> bool:
            # The ring also has copies and passes from while the recording was being prepared, and
            # jobs of the step after it. Spans without a step are those of kernels and calls.
            step = span.args.get(names.ARG_STEP)
            is_late = span.begin_ns >= end_ns if step is None else step > self._last_step
            return span.end_ns >= begin_ns and not is_late

        return [span for span in spans if is_recorded(span)]


def _follow_layer(module: nn.Module, layer: int, number: int, recorder: Recorder) -> list[Any]:
    """Makes a module report its forward and backward to a recorder; returns the hooks' handles."""

    def enter(_module: nn.Module, _inputs: tuple[object, ...]) -> None:
        recorder.enter_layer(layer, number)

    def leave(_module: nn.Module, _inputs: tuple[object, ...], outputs: object) -> None:
        if torch.is_grad_enabled():
            for tensor in tensors_in(outputs):
                if tensor.requires_grad:
                    before_backward(tensor, lambda _gradient: recorder.enter_backward(layer))
        recorder.leave_layer(layer)

    # The second one also runs if forward raises: torch's checkpointing ends a recomputed forward
    # with an exception, as soon as it has what backward needs.
    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]


def _readers(
    optimizer: HyTrainZeroOptimizer, meter: EnergyMeter
) -> dict[str, Callable[[], float | None]]:
    pipeline, device = optimizer.pipeline, optimizer.pipeline.streams.device
    process = psutil.Process()
    readers: dict[str, Callable[[], float | None]] = {
        names.COUNTER_HOST_MEMORY: lambda: float(process.memory_info().rss),
        names.COUNTER_PINNED_MEMORY: lambda: float(pipeline.cpu.pinned.num_bytes),
    }
    if device.type == "cuda":
        readers[names.COUNTER_GPU_MEMORY] = lambda: float(allocated_bytes(device)[0])
    if meter.has_gpu:
        readers[names.COUNTER_GPU_POWER] = meter.gpu_watts
    return readers


def measure_peaks(pipeline: UpdatePipeline, known: Peaks, num_threads: int) -> Peaks:
    """Measures the peak rates of memory and copies, between two steps, in some tenths of a second.

    If the rank has more cores than the CPU update's ``num_threads``, all of them sweep memory: what
    the update's own threads reach is not the peak, and would hide what more threads could gain.
    """
    num_threads = max(num_threads, known.cores or 1)
    found: dict[str, float | None] = {}
    # If the worker has failed, or there is no memory to copy, the trace is written all the same.
    with suppress(HyTrainError):
        pipeline.cpu.wait_all()
        found["dram_bytes_per_s"] = _memory_rate(pipeline, num_threads)
    if pipeline.streams.is_cuda:
        with suppress(RuntimeError, MemoryError):
            host = torch.empty(_COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
            there = torch.empty(_COPIED_BYTES, dtype=torch.uint8, device=pipeline.streams.device)
            found["d2h_bytes_per_s"] = copy_rate(host, there)
            found["h2d_bytes_per_s"] = copy_rate(there, host)
    return known.model_copy(update=found)


def _memory_rate(pipeline: UpdatePipeline, num_threads: int) -> float | None:
    """Measures reading and writing the layers' state, up to a limit, in bytes per second."""
    swept = 0
    begin = time.perf_counter()
    for layer in pipeline.cpu.layers:
        if swept >= _SWEPT_BYTES or layer.moving or layer.master.numel() == 0:
            continue
        if layer.form.is_split:
            return None  # the sweep's weights are fp32
        _C.read_write(
            layer.master.data_ptr(),
            native_moments(layer.exp_avg, layer.exp_avg_sq, None),
            layer.shard_size,
            num_threads,
        )
        swept += 2 * layer.state_bytes  # read and written
    return swept / (time.perf_counter() - begin) if swept else None
