"""Records chosen steps of an engine, or all of them under a VizTracer.

The steps before and after a recording are only timed, to tell what recording costs.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from hytrain.config import DEFAULT_TRACED_STEPS, TraceConfig
from hytrain.engine.trace_session import TraceSession
from hytrain.engine.zero_optimizer import HyTrainZeroOptimizer
from hytrain.formats import trace_file as names
from hytrain.formats.text_table import longer_by
from hytrain.hardware.rank_clocks import clock_offset_ns
from hytrain.optimizer.layer_guards import modules_of_layers
from hytrain.trace.kernels import is_of_device, with_kernels
from hytrain.trace.recorder import Recorder
from hytrain.trace.user_code import timed_loading
from hytrain.trace.writer import Recording

logger = logging.getLogger(__name__)
_run_logger = logging.getLogger("hytrain.run")

_PLAIN_BEFORE = 8
"""The most steps that are timed before the recorded ones."""
_PLAIN_AFTER = 4
"""Steps that are timed after the recorded ones before the trace is written, if training goes on."""

_Item = TypeVar("_Item")


class Tracing:
    """Decides when an engine is recorded, and where the recording goes."""

    def __init__(
        self, optimizer: HyTrainZeroOptimizer, model: nn.Module, config: TraceConfig, steps: int
    ) -> None:
        """A collective. ``steps``: how many have been made."""
        is_wanted = config.dir is not None or running_tracer() is not None
        self._clock_offset_ns = clock_offset_ns(optimizer.collectives, is_wanted=is_wanted)
        modules = modules_of_layers(model, optimizer.weights.layers)
        trained = len(optimizer.layer_states)
        # A module with parameters of several layers counts as the first one's.
        self._layer_of = {m: min(found) for m, found in modules.items() if min(found) < trained}
        self._optimizer = optimizer
        self._config = config
        self._session: TraceSession | None = None
        """The last recording, until its file is written."""
        self._before: deque[float] = deque(maxlen=_PLAIN_BEFORE)
        """Seconds of the last steps before a recording."""
        self._after: list[float] = []
        """Seconds of the first steps after a recording."""
        self._tracer: Any = None
        self._is_done = config.dir is None
        self._steps_seen: tuple[int, int] | None = None
        self._made_ns = time.monotonic_ns()
        self.begin(steps)

    @property
    def recorder(self) -> Recorder | None:
        """The recorder while a step is recorded; otherwise None."""
        session = self._session
        return session.recorder if session is not None and session.is_recording else None

    def phase(self, name: str) -> AbstractContextManager[None]:
        """A context for a phase of the step, which is recorded if the step is."""
        return nullcontext() if self.recorder is None else self.recorder.phase(name)

    def loading(self, items: Iterator[_Item]) -> Iterator[_Item]:
        """Returns the user's data, whose loading is timed if the step is recorded."""
        return items if self.recorder is None else timed_loading(items, self.recorder)

    # -- between steps ---------------------------------------------------------------------------

    def begin(self, steps_made: int) -> None:
        """Prepares for the next step, after ``steps_made`` of a new or a loaded engine."""
        self._optimizer.pipeline.cpu.worker.set_trace_step(steps_made + 1)
        if self.recorder is None and self._wants(steps_made + 1):
            self._finish()
            # A VizTracer with log_torch has the kernels itself.
            kernels = self._config.kernels and self._tracer is None
            self._after = []
            self._session = TraceSession(
                self._optimizer, self._layer_of, threads=self._config.threads, kernels=kernels
            )
        if self._session is not None and self._session.is_recording:
            self._session.begin_step(steps_made + 1)
        # The work done here is not part of a step.
        self._made_ns = time.monotonic_ns()

    def step_made(self, steps_made: int) -> None:
        """Ends a step, and prepares for the next one, which may be recorded."""
        now, session = time.monotonic_ns(), self._session
        first = steps_made if self._steps_seen is None else self._steps_seen[0]
        self._steps_seen = first, steps_made
        if session is None:
            self._before.append((now - self._made_ns) / 1e9)
        elif session.is_recording:
            session.end_step(self._made_ns, now)
            if not self._wants(steps_made + 1):
                session.end_steps()
        elif not session.is_finished:
            self._finish(measures_peaks=True)
        elif len(self._after) < _PLAIN_AFTER:
            self._after.append((now - self._made_ns) / 1e9)
            if len(self._after) == _PLAIN_AFTER:
                self._write()
        self.begin(steps_made)

    def _wants(self, step: int) -> bool:
        if self._tracer is None or not self._tracer.enable:
            found = running_tracer()
            if found is not None and found is not self._tracer and self.recorder is None:
                self._follow(found)
        if self._tracer is not None:
            steps = self._config.steps
            return self._tracer.enable and (steps is None or steps[0] <= step < steps[1])
        first, end = self._config.steps or DEFAULT_TRACED_STEPS
        return not self._is_done and first <= step < end

    def _follow(self, tracer: Any) -> None:
        self._tracer = tracer
        join_file(tracer, self._finish)
        if self._config.dir is not None:
            logger.info("a VizTracer is running: the trace goes to its file, not to trace.dir")
            self._is_done = True

    # -- output ----------------------------------------------------------------------------------

    def _finish(self, *, measures_peaks: bool = False) -> Recording | None:
        """Returns what the session has recorded, with what recording has cost so far."""
        session = self._session
        if session is None:
            return None
        found = session.finish(self._clock_offset_ns, measures_peaks=measures_peaks)
        plain = [*self._before, *self._after]
        if found is None or not plain:
            return found
        step = statistics.median(plain)
        overhead = statistics.median(session.seconds) / step - 1.0
        cost = {"unprofiled_step_s": step, "recording_overhead": overhead}
        return replace(found, header=found.header.model_copy(update=cost))

    def _write(self) -> None:
        if self._is_done or self._session is None or self._config.dir is None:
            return
        # Another rank may have failed: only wait for what is needed.
        alone = self._optimizer.collectives.world_size == 1
        recording = self._finish(measures_peaks=alone)
        self._is_done, self._session = True, None
        if recording is None:
            return
        path = Path(self._config.dir) / f"trace_rank{recording.header.rank}.json"
        try:
            recording.write(path)
        except OSError as error:
            # Training does not end because its trace cannot be written.
            logger.error("the trace could not be written: %s", error)
            return
        _report(recording, path)

    def close(self) -> None:
        """Writes what has been recorded so far, when the engine ends. May be called twice."""
        if self._session is not None:
            if self._is_done:  # for a VizTracer, which saves later
                self._finish()
            self._write()
        elif not self._is_done:
            self._is_done = True
            seen = self._steps_seen
            made = "no step was made" if seen is None else f"steps {seen[0]} to {seen[1]} were made"
            first, end = self._config.steps or DEFAULT_TRACED_STEPS
            logger.warning(
                'no trace was written: "hytrain.trace.steps" asks for steps %d to %d, but %s: give '
                "some of those",
                first,
                end - 1,
                made,
            )


def _report(recording: Recording, path: Path) -> None:
    header = recording.header
    cost = ""
    if header.recording_overhead is not None:
        cost = f" ({longer_by(header.recording_overhead)} than the steps beside them)"
    _run_logger.info(  # shown by default
        "hytrain: steps %d to %d are recorded%s; see `hytrain trace report %s` or ui.perfetto.dev",
        *header.steps,
        cost,
        path,
    )
    if header.dropped_spans:
        logger.warning("the trace has lost %d spans: record fewer steps", header.dropped_spans)


def running_tracer() -> Any:
    """Returns the VizTracer that is recording in this process; None without one."""
    module = sys.modules.get("viztracer")  # whoever uses it has imported it
    tracer = None if module is None else module.get_tracer()
    return tracer if tracer is not None and tracer.enable else None


def join_file(tracer: Any, recording: Callable[[], Recording | None]) -> None:
    """Makes a tracer's file a trace of hytrain's format: calls ``recording`` when it is saved."""
    # Imported here, so that only its users pay for it.
    from viztracer.vizplugin import VizPluginBase

    class Plugin(VizPluginBase):
        """Notified by VizTracer when it saves."""

        def support_version(self) -> str:
            return "1.0.0"

        def message(self, m_type: str, payload: dict[str, Any]) -> dict[str, Any]:
            if m_type == "event" and payload["when"] == "pre-save":
                return {"action": "handle_data", "handler": handle}
            return super().message(m_type, payload)

    def handle(data: dict[str, Any]) -> None:
        found = recording()
        if found is not None and names.HEADER_KEY not in data:
            _add(data, tracer, found)

    # It takes plugins only when it is made, which was before this engine. add_raw() cannot be used:
    # it puts every span on the thread that calls it.
    tracer._plugin_manager._plugins.append(Plugin())


def _add(data: dict[str, Any], tracer: Any, recording: Recording) -> None:
    rank = recording.header.rank
    events: list[dict[str, Any]] = data["traceEvents"]
    if tracer.log_torch and tracer.torch_profile is not None:
        found = _take_profile(tracer)
        events += [event for event in found if not is_of_device(event)]
        spans = with_kernels(found, 0.0, recording.spans, host_calls=False)
        recording = Recording(recording.header, spans, recording.finals, recording.samples)
    for event in events:
        if event.get("pid") == os.getpid():
            event["pid"] = rank
        if event.get("ph") == "M" and event.get("name") == "thread_name":
            event["args"]["name"] = f"{names.PYTHON}: {event['args']['name']}"
    # Last: if a process or thread has several names, the last one counts.
    events += recording.events()
    header = recording.header
    if data.get("viztracer_metadata", {}).get("overflow"):
        header = header.model_copy(update={"overwritten": True})
    data[names.HEADER_KEY] = header.model_dump(mode="json")


def _take_profile(tracer: Any) -> list[dict[str, Any]]:
    """Takes the events of a tracer's torch profile, with times of its clock, which is ours.

    VizTracer would otherwise put them into the file itself, and leave out the keys that it does not
    know, which include our header.
    """
    from viztracer.report_builder import get_json

    profile, tracer.torch_profile = tracer.torch_profile, None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.json"
        profile.export_chrome_trace(str(path))
        arguments = {"type": "torch", "base_offset": tracer.get_base_time()}
        found: list[dict[str, Any]] = get_json((str(path), arguments))["traceEvents"]
    # VizTracer itself names the threads that both know.
    named = ("thread_name", "thread_sort_index", "process_name", "process_labels")
    return [e for e in found if not (e["ph"] == "M" and e["name"] in named)]
