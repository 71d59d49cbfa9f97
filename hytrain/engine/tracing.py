"""Records chosen steps of an engine, or all of them under a VizTracer.

A recording has the steps' spans and, one step longer, what the update worker still does for the
last of them. The steps before and after it are timed only, to tell what recording costs.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
from torch import nn

from hytrain import _C
from hytrain.config import DEFAULT_TRACED_STEPS, TraceConfig
from hytrain.engine.trace_header import (
    RecordedRun,
    make_header,
    measure_peaks,
    with_overhead,
)
from hytrain.engine.trace_hooks import follow_layers
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.errors import ConfigError
from hytrain.formats import trace_file as names
from hytrain.formats.trace_file import Peaks
from hytrain.hardware.energy import EnergyMeter
from hytrain.hardware.gpu_memory import allocated_bytes
from hytrain.offload.threads import ThreadChoice
from hytrain.trace.clock import TraceClock
from hytrain.trace.counters import CounterSampler, Sample
from hytrain.trace.kernels import KernelProfile
from hytrain.trace.recorder import Recorder, Span
from hytrain.trace.user_code import LoadingIterator, watch_user_code
from hytrain.trace.viztracer_file import join_file, running_tracer
from hytrain.trace.worker_spans import worker_spans
from hytrain.trace.writer import Recording

logger = logging.getLogger(__name__)

RING_SPANS = 1 << 16
"""Of the update worker, between two steps: 4 MiB."""
MOST_SPANS = 1_000_000
"""That are kept of a recording, as many as VizTracer keeps of its own."""
_PLAIN_STEPS = 8
"""Steps beside the recorded ones that are timed, at most, on either side."""
_PLAIN_AFTER = 4
"""Steps that are waited for before a trace is written, if training goes on."""
_JOULES = {"gpu": "gpu_energy_j", "cpu": "cpu_energy_j"}

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class TracedEngine:
    """What is recorded.

    Attributes:
        optimizer: the engine's.
        layer_of: modules whose forward is a layer's.
        cores: that the rank may use.
        threads: of the CPU update.
        clock_offset_ns: of this rank to rank 0.
    """

    optimizer: HyTrainZeroOptimizer
    layer_of: Mapping[nn.Module, int]
    cores: int
    threads: ThreadChoice
    clock_offset_ns: float


class _Session:
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
            watch_user_code(self.recorder, device),
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
        """Nothing more is recorded; waits for the device.

        Args:
            measures_peaks: whether to measure what memory and copies reach.
        """
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
        samples = [*self._fractions, *self._counters(), *_cpu_power(self._sampler.samples)]
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
            used = _between(self._sampler.samples, name, step.begin_ns, step.end_ns)
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


def _between(samples: list[Sample], name: str, begin_ns: float, end_ns: float) -> float | None:
    """What a sum has grown by between two times, straight lines between its samples; or None."""
    points = [(sample.at_ns, sample.value) for sample in samples if sample.name == name]
    if len(points) < 2 or points[0][0] > end_ns or points[-1][0] < begin_ns:
        return None

    def value(at: float) -> float:
        after = next((i for i, (t, _) in enumerate(points) if t >= at), len(points) - 1)
        (t0, v0), (t1, v1) = points[max(0, after - 1)], points[max(1, after)]
        return v0 + (v1 - v0) * (at - t0) / (t1 - t0)

    return value(end_ns) - value(begin_ns)


def _cpu_power(samples: list[Sample]) -> list[Sample]:
    points = [sample for sample in samples if sample.name == "cpu"]
    return [
        Sample(names.COUNTER_CPU_POWER, b.at_ns, (b.value - a.value) / (b.at_ns - a.at_ns) * 1e9)
        for a, b in itertools.pairwise(points)
    ]


class Tracing:
    """Decides when an engine is recorded, and where that goes to."""

    def __init__(self, engine: TracedEngine, config: TraceConfig) -> None:
        """
        Args:
            engine: built, and between two steps.
            config: which steps, and where to.
        """
        self._engine = engine
        self._config = config
        self._session: _Session | None = None
        self._ended: _Session | None = None  # its last step may still be updated
        self._recording: Recording | None = None
        self._seconds: list[float] = []  # of its steps
        self._before: deque[float] = deque(maxlen=_PLAIN_STEPS)
        self._plain: list[float] = []
        self._after = 0
        self._tracer: Any = None
        self._is_done = config.dir is None
        self._steps_seen: tuple[int, int] | None = None
        self._made_ns = time.monotonic_ns()

    @property
    def recorder(self) -> Recorder | None:
        """While a step is recorded."""
        return None if self._session is None else self._session.recorder

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A phase of the step, if it is recorded."""
        return nullcontext() if self._session is None else self._session.recorder.phase(name)

    def loading(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """The user's data, whose times are taken if the step is recorded."""
        if self._session is None:
            return items
        return LoadingIterator(items, self._session.recorder)

    # -- between steps ---------------------------------------------------------------------------

    def begin(self, steps_made: int) -> None:
        """The next step is about to begin, after that many: of a new engine, or a loaded one."""
        self._engine.optimizer.pipeline.cpu.worker.set_trace_step(steps_made + 1)
        if self._session is None and self._wants(steps_made + 1):
            self._start()
        if self._session is not None:
            self._session.begin_step(steps_made + 1)
        # What has been done here is no part of a step.
        self._made_ns = time.monotonic_ns()

    def step_made(self, steps_made: int) -> None:
        """A step is over, and the next one may be recorded."""
        now = time.monotonic_ns()
        seen = self._steps_seen
        self._steps_seen = (steps_made if seen is None else seen[0], steps_made)
        if self._session is not None:
            self._session.end_step(self._made_ns, now)
            if not self._wants(steps_made + 1):
                self._end_steps()
        elif self._ended is not None:
            self._finish(measures_peaks=True)
        else:
            self._count_plain((now - self._made_ns) / 1e9)
        self.begin(steps_made)

    def _wants(self, step: int) -> bool:
        if self._tracer is None or not self._tracer.enable:
            found = running_tracer()
            if found is not None and found is not self._tracer and self._session is None:
                self._follow(found)
        if self._tracer is not None:
            steps = self._config.steps
            return self._tracer.enable and (steps is None or steps[0] <= step < steps[1])
        first, end = self._config.steps or DEFAULT_TRACED_STEPS
        return not self._is_done and first <= step < end

    def _follow(self, tracer: Any) -> None:
        self._tracer = tracer
        join_file(tracer, self._for_tracer)
        if self._config.dir is not None:
            logger.info("a VizTracer is running: the trace goes to its file, not to trace.dir")
            self._is_done = True

    def _start(self) -> None:
        self._plain = list(self._before)
        self._after = 0
        self._recording = None
        # A VizTracer with log_torch has the kernels itself.
        kernels = self._config.kernels and self._tracer is None
        self._session = _Session(self._engine, self._config, kernels=kernels)

    def _end_steps(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end_steps()
            self._ended = session

    def _finish(self, *, measures_peaks: bool) -> None:
        session, self._ended = self._ended, None
        if session is not None and session.seconds:
            self._seconds = session.seconds
            self._recording = session.finish(measures_peaks=measures_peaks)

    def _count_plain(self, seconds: float) -> None:
        if self._recording is None:
            self._before.append(seconds)
            return
        self._plain.append(seconds)
        self._after += 1
        if self._after == _PLAIN_AFTER:
            self._write()

    # -- where it goes to ------------------------------------------------------------------------

    @property
    def path(self) -> Path | None:
        """This rank's file; None where none is written."""
        if self._config.dir is None:
            return None
        return Path(self._config.dir) / f"trace_rank{self._engine.optimizer.collectives.rank}.json"

    def _write(self) -> None:
        path = self.path
        if self._is_done or path is None or self._recording is None:
            return
        self._is_done = True
        recording = self._with_overhead(self._recording)
        try:
            recording.write(path)
        except OSError as error:
            # A training does not end for want of its trace.
            logger.error("the trace could not be written: %s", error)
            return
        _report(recording, path)

    def _with_overhead(self, recording: Recording) -> Recording:
        header = with_overhead(recording.header, self._seconds, self._plain)
        return replace(recording, header=header)

    def _for_tracer(self) -> Recording | None:
        """For a VizTracer that saves its file."""
        self._end_steps()
        self._finish(measures_peaks=False)
        return None if self._recording is None else self._with_overhead(self._recording)

    def close(self) -> None:
        """The engine ends: what has been recorded so far is written. May be called twice."""
        had_any = self._session is not None or self._ended is not None
        self._end_steps()
        # Of several ranks some may have failed: nothing is waited for that need not be.
        self._finish(measures_peaks=self._engine.optimizer.collectives.world_size == 1)
        self._write()
        if not self._is_done and not had_any and self._recording is None:
            self._is_done = True
            seen = self._steps_seen
            made = "no step was made" if seen is None else f"steps {seen[0]} to {seen[1]} were made"
            first, end = self._config.steps or DEFAULT_TRACED_STEPS
            logger.warning(
                'no trace was written: "hytrain.trace.steps" asks for steps %d to %d, and %s: give '
                "steps that come",
                first,
                end - 1,
                made,
            )


def _report(recording: Recording, path: Path) -> None:
    header = recording.header
    cost = (
        ""
        if header.recording_overhead is None
        else (f", which took {header.recording_overhead:+.1%} of a step")
    )
    logger.info(
        "steps %d to %d are recorded in %s%s; open it in ui.perfetto.dev or with vizviewer",
        *header.steps,
        path,
        cost,
    )
    if header.dropped_spans:
        logger.warning("the trace has lost %d spans: record fewer steps", header.dropped_spans)


def check_folder(config: TraceConfig) -> None:
    """Makes the folder of the traces, before anything else is done.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    if config.dir is None:
        return
    folder = Path(config.dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{time.monotonic_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f'"hytrain.trace.dir" is {config.dir!r}, where nothing can be written ({error.strerror}'
            "): give another folder"
        ) from None
