"""Spans in the file of a VizTracer that is running: `viztracer --log_torch -- train.py`."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hytrain.formats import trace_file as names
from hytrain.trace.kernels import is_of_device, with_kernels
from hytrain.trace.writer import Recording

logger = logging.getLogger(__name__)


def running_tracer() -> Any:
    """The VizTracer that is recording in this process; None without one."""
    module = sys.modules.get("viztracer")  # whoever uses it has imported it
    tracer = None if module is None else module.get_tracer()
    return tracer if tracer is not None and tracer.enable else None


def join_file(tracer: Any, recording: Callable[[], Recording | None]) -> None:
    """Has a tracer's file be a trace of the format: when it is saved the recording is asked for."""
    # Imported here: only who uses it pays for it.
    from viztracer.vizplugin import VizPluginBase

    class Plugin(VizPluginBase):
        """Told by VizTracer when it saves."""

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

    # It takes plugins when it is made only, which was before this engine. add_raw() is no way: it
    # puts every span on the thread that calls it.
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
    # Last: of several names of a process or thread the last one counts.
    events += recording.events()
    header = recording.header
    if data.get("viztracer_metadata", {}).get("overflow"):
        header = header.model_copy(update={"overwritten": True})
    data[names.HEADER_KEY] = header.model_dump(mode="json")


def _take_profile(tracer: Any) -> list[dict[str, Any]]:
    """Its torch profile's events, with times of its own clock, which is ours.

    VizTracer would put them into the file itself and leave out whatever it does not know of ours,
    the header: so it finds none any more.
    """
    from viztracer.report_builder import get_json

    profile, tracer.torch_profile = tracer.torch_profile, None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "torch.json"
        profile.export_chrome_trace(str(path))
        arguments = {"type": "torch", "base_offset": tracer.get_base_time()}
        found: list[dict[str, Any]] = get_json((str(path), arguments))["traceEvents"]
    # VizTracer names the threads that both know.
    named = ("thread_name", "thread_sort_index", "process_name", "process_labels")
    return [e for e in found if not (e["ph"] == "M" and e["name"] in named)]
