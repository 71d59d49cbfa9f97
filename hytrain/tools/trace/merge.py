"""The traces of several ranks as one file, on rank 0's clock."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hytrain.errors import TraceError
from hytrain.formats.trace_file import HEADER_KEY, TraceFile, TraceHeader, read_trace


def merge_files(paths: Sequence[Path], out: Path) -> str:
    """Writes one trace of several; times become rank 0's, and a process is a rank.

    Args:
        paths: each of one rank or, merged before, of several.
        out: is written; with a name that ends with .gz, compressed.

    Returns:
        What was done, for people.

    Raises:
        TraceError: a file cannot be read, is foreign (it does not say whose it is), or two have
            the same rank; or the merged one cannot be written.
    """
    traces = [read_trace(path) for path in paths]
    headers = _headers(traces)
    events = [event for trace in traces for event in _events(trace)]
    content = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        HEADER_KEY: [
            header.model_copy(update={"clock_offset_us": 0.0}).model_dump(mode="json")
            for header in headers
        ],
    }
    try:
        text = json.dumps(content, allow_nan=False, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise TraceError(f"the traces cannot be written as one ({error})") from None
    try:
        out.write_bytes(gzip.compress(text, 6) if out.suffix == ".gz" else text)
    except OSError as error:
        raise TraceError(f"cannot write {out} ({error.strerror})") from None
    ranks = ", ".join(str(header.rank) for header in headers)
    return f"{out}: ranks {ranks}, {len(events)} events, {len(text) / 1e6:.1f} MB"


def _headers(traces: Sequence[TraceFile]) -> list[TraceHeader]:
    seen: dict[int, Path] = {}
    for trace in traces:
        if not trace.headers:
            raise TraceError(
                f"the trace {trace.path} is not hytrain's: it does not say which rank's it is, so "
                "it cannot be merged"
            )
        for header in trace.headers:
            if header.rank in seen:
                raise TraceError(
                    f"{seen[header.rank]} and {trace.path} are both of rank {header.rank}: give "
                    "one file a rank, all of one run"
                )
            seen[header.rank] = trace.path
    return sorted((x for trace in traces for x in trace.headers), key=lambda header: header.rank)


def _events(trace: TraceFile) -> Iterator[dict[str, Any]]:
    """A file's events on rank 0's clock; of one rank's file every process becomes the rank.

    A file of VizTracer has processes and streams that other ranks' files have as well.
    """
    offset_of: dict[Any, float] = {x.rank: x.clock_offset_us for x in trace.headers}
    only = trace.headers[0].rank if len(trace.headers) == 1 else None
    lines: dict[Any, int] = {}
    for event in trace.events:
        place = event.get("pid"), event.get("tid")
        rank: Any = place[0] if only is None else only
        moved = {**event, "pid": rank}
        if isinstance(event.get("ts"), (int, float)):
            moved["ts"] = event["ts"] + offset_of.get(rank, 0.0)
        if only is not None and place[0] != only:
            if event["ph"] == "M" and str(event.get("name")).startswith("process_"):
                continue  # the rank has its own name
            moved["tid"] = lines.setdefault(place, 20_000_000 + len(lines))
        if "id" in event and event.get("cat") != "layer":
            # Unique in its own file only; a layer's are over all ranks.
            moved["id"] = f"{rank}.{event['id']}"
        yield moved
