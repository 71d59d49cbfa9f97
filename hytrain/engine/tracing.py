"""Records chosen steps of an engine, or all of them under a VizTracer.

A recording has the steps' spans and, one step longer, what the update worker still does for the
last of them. The steps before and after it are timed only, to tell what recording costs.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from hytrain.config import DEFAULT_TRACED_STEPS, TraceConfig
from hytrain.engine.trace_header import with_overhead
from hytrain.engine.trace_session import TracedEngine, TraceSession
from hytrain.trace.recorder import Recorder
from hytrain.trace.user_code import LoadingIterator
from hytrain.trace.viztracer_file import join_file, running_tracer
from hytrain.trace.writer import Recording

logger = logging.getLogger(__name__)

_PLAIN_STEPS = 8
"""Steps beside the recorded ones that are timed, at most, on either side."""
_PLAIN_AFTER = 4
"""Steps that are waited for before a trace is written, if training goes on."""

_Item = TypeVar("_Item")


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
        self._session: TraceSession | None = None
        self._ended: TraceSession | None = None  # its last step may still be updated
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
        self._session = TraceSession(self._engine, self._config, kernels=kernels)

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
    cost = ""
    if header.recording_overhead is not None:
        cost = f" ({header.recording_overhead:+.1%} against the steps beside them)"
    logger.info(
        "steps %d to %d are recorded in %s%s; open it in ui.perfetto.dev or with vizviewer",
        *header.steps,
        path,
        cost,
    )
    if header.dropped_spans:
        logger.warning("the trace has lost %d spans: record fewer steps", header.dropped_spans)
