"""One recording of an engine: what is put on it when it begins, and taken off when it ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil
from torch import nn

from hytrain import _C
from hytrain.config import TraceConfig
from hytrain.engine.trace_header import RecordedRun, make_header, measure_peaks
from hytrain.engine.trace_hooks import follow_layers
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.formats import trace_file as names
from hytrain.formats.trace_file import Peaks
from hytrain.hardware.energy import EnergyMeter
from hytrain.hardware.gpu_memory import allocated_bytes
from hytrain.offload.threads import ThreadChoice
from hytrain.trace.clock import TraceClock
from hytrain.trace.counters import CounterSampler, Sample, growth_between, rates_of
from hytrain.trace.kernels import KernelProfile
from hytrain.trace.recorder import Recorder, Span
from hytrain.trace.user_code import watch_user_code
from hytrain.trace.worker_spans import worker_spans
from hytrain.trace.writer import Recording

RING_SPANS = 1 << 16
"""Of the update worker, between two steps: 4 MiB."""
MOST_SPANS = 1_000_000
"""That are kept of a recording, as many as VizTracer keeps of its own."""
_JOULES = {"gpu": "gpu_energy_j", "cpu": "cpu_energy_j"}


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """What is recorded.

    Attributes:
        optimizer: the engine's.
        layer_of: modules whose forward is a layer's.
        cores: that the rank may use.
        clock_offset_ns: of this rank to rank 0.
    """

    optimizer: HyTrainZeroOptimizer
    layer_of: Mapping[nn.Module, int]
    cores: int
    clock_offset_ns: float

    @property
    def threads(self) -> ThreadChoice:
        """Of the CPU update as it is now: training may settle on another number than at first."""
        return self.optimizer.placement.threads


class TraceSession:
    """One recording, from its first step until all of it is in plain numbers."""

    def __init__(self, engine: TracedEngine, config: TraceConfig, *, kernels: bool) -> None:
        optimizer = engine.optimizer
        self._engine = engine
        self._pipeline = pipeline = optimizer.pipeline
        self._worker = pipeline.cpu.worker
        device = pipeline.streams.device
        self._clock = TraceClock(device)
        self.recorder = Recorder(self._clock, [x.name for x in pipeline.layers], MOST_SPANS)
        self._worker_spans: deque[_C.TraceSpan] = deque(maxlen=MOST_SPANS)
        self._lost = 0
        self._fractions: list[Sample] = []
        self.seconds: list[float] = []
        """Of each recorded step."""
        self.first_step = self.last_step = 0
        meter = EnergyMeter(device)
        self._profile = KernelProfile() if kernels and device.type == "cuda" else None
        self._clock.start()
        self._worker.set_trace_anchor(*self._clock.anchor)
        self._has_threads = config.threads
        self._worker.start_trace(RING_SPANS, config.threads)
        if self._profile is not None:
            self._profile.start()
        self._sampler = CounterSampler(_readers(optimizer, meter), MOST_SPANS)
        self._detach = self._attach()

    def _attach(self) -> Callable[[], None]:
        engine, optimizer = self._engine, self._engine.optimizer
        parts = (optimizer.collectives, self._pipeline, optimizer.passes)
        device = self._pipeline.streams.device
        undo = [
            follow_layers(engine.layer_of, self.recorder),
            watch_user_code(self.recorder, device, waits=device.type != "cpu"),
        ]
        for part in parts:
            part.trace = self.recorder

        def detach() -> None:
            for part in parts:
                part.trace = None
            for put_back in undo:
                put_back()

        return detach

    def begin_step(self, step: int) -> None:
        """A step begins that is recorded."""
        self.first_step = self.first_step or step
        self.recorder.step = step
        now, layers = time.monotonic_ns(), len(self._pipeline.layers)
        share = self._pipeline.num_gpu_layers / layers
        self._fractions.append(Sample(names.COUNTER_GPU_FRACTION, now, share))

    def end_step(self, begin_ns: int, end_ns: int) -> None:
        """It has been made."""
        self.last_step = self.recorder.step
        self.seconds.append((end_ns - begin_ns) / 1e9)
        self.recorder.end_step(begin_ns, end_ns, {names.ARG_STEP: self.recorder.step})
        if self._clock.advance():
            self._worker.set_trace_anchor(*self._clock.anchor)
        self._drain()

    def _drain(self) -> None:
        spans, lost = self._worker.take_trace()
        self._lost += lost + max(0, len(spans) + len(self._worker_spans) - MOST_SPANS)
        self._worker_spans.extend(spans)

    def end_steps(self) -> None:
        """No further step is recorded; the update worker may still be at the last one."""
        self._detach()
        self._sampler.stop()
        if self._profile is not None:
            # What the last step has queued is to be seen, and nothing of the next one.
            self._pipeline.streams.synchronize()
            self._profile.stop()

    def finish(self, *, measures_peaks: bool) -> Recording:
        """Nothing more is recorded; waits for the update worker and the device.

        Args:
            measures_peaks: whether to measure what memory and copies reach.
        """
        if self._engine.optimizer.passes.is_between_steps:
            # step() returns before the worker has made its updates: without this wait a trace that
            # is written at once would lack them. Where a further step has begun, its forward has
            # waited for them, and what it has sent since may wait for a rank that has failed.
            with suppress(RuntimeError):  # of a worker that has failed, the training is told
                self._worker.wait_traced()
        self._worker.stop_trace()
        self._drain()
        self._clock.stop()
        # The worker's handle of the anchor must not outlive it.
        self._worker.set_trace_anchor(0, 0)
        engine, threads = self._engine, self._engine.threads
        rate = 1.0 / threads.seconds_per_parameter
        peaks = Peaks(cores=engine.cores, adam_parameters_per_s=rate)
        if measures_peaks:
            peaks = measure_peaks(self._pipeline, peaks, threads.num_threads)
        spans = self._all_spans()
        dropped = self._lost + self.recorder.dropped
        run = RecordedRun(
            (self.first_step, self.last_step),
            self.recorder.micro_batches,
            self.recorder.tokens,
            dropped,
            dropped > 0,
            engine.clock_offset_ns,
        )
        samples = [
            *self._fractions,
            *self._counters(),
            *rates_of(self._sampler.samples, "cpu", names.COUNTER_CPU_POWER),
        ]
        header = make_header(engine.optimizer, run, peaks)
        return Recording(header, spans, self.recorder.finals(), samples)

    def _all_spans(self) -> list[Span]:
        layers = self._pipeline.layers
        index_of = {layer.worker_index: layer.index for layer in layers}
        worker = worker_spans(
            self._worker_spans,
            index_of.__getitem__,
            self._clock.corrected,
            1 if self._has_threads else self._engine.threads.num_threads,
        )
        spans = [*self.recorder.spans(), *worker]
        if self._profile is not None:
            spans = self._profile.spans(spans)
        steps = [span for span in spans if span.lane == names.STEPS]
        begin_ns, end_ns = steps[0].begin_ns, steps[-1].end_ns

        def is_recorded(span: Span) -> bool:
            # The ring has copies and passes from before, while the recording was prepared, and jobs
            # of the step that came after. What is of no step is a kernel's or a call's.
            step = span.args.get(names.ARG_STEP)
            is_late = span.begin_ns >= end_ns if step is None else step > self.last_step
            return span.end_ns >= begin_ns and not is_late

        spans = [span for span in spans if is_recorded(span)]
        return [self._with_energy(s) if s.lane == names.STEPS else s for s in spans]

    def _counters(self) -> list[Sample]:
        return [sample for sample in self._sampler.samples if sample.name not in _JOULES]

    def _with_energy(self, step: Span) -> Span:
        args = dict(step.args)
        for name, key in _JOULES.items():
            used = growth_between(self._sampler.samples, name, step.begin_ns, step.end_ns)
            if used is not None:
                args[key] = round(used, 3)
        return step._replace(args=args)


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
        readers["gpu"] = lambda: meter.read().gpu_joules
    if meter.has_cpu:
        readers["cpu"] = lambda: meter.read().cpu_joules
    return readers
