"""trace_rank0.json: what happened when in recorded steps, in Chrome's Trace Event format.

    {"traceEvents": [...], "displayTimeUnit": "ms", "hytrain": {"format": 1, "rank": 0, ...}}

vizviewer and ui.perfetto.dev open it. ``pid`` is the rank; a lane is a ``tid`` with a thread_name.
Times are microseconds of CLOCK_MONOTONIC of the rank's host. A file without "hytrain" is foreign
(torch.profiler's, say): it can be read as well, and has no header.

This module has the names that the recorder writes and the report reads, and checks files. What an
event of a foreign trace means is up to the report (tools/trace/).
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field

from hytrain.errors import TraceError
from hytrain.formats.file_kind import other_kind
from hytrain.formats.record import checked, parse_json

FORMAT: Final = 1
HEADER_KEY: Final = "hytrain"
MOST_MICROSECONDS: Final = 4e15
"""Largest time, at most since 1970; durations, offsets and times below 0 are much smaller."""
_LONGEST: Final = 1e14
_MOST_PACKED: Final = 100
"""Highest compression of a gzipped trace: those of trainings have 10 to 30, gzip allows 1,000."""
_PART_BYTES: Final = 2**24

# -- lanes, by thread_name; PYTHON and CPU_ADAM may be followed by a thread's name or number ----

STEPS: Final = "steps"
PYTHON: Final = "Python"
GPU_COMPUTE: Final = "GPU compute"
GPU_COMMUNICATION: Final = "GPU communication"
D2H: Final = "D2H"
H2D: Final = "H2D"
GPU_UPDATE: Final = "GPU update"
CPU_ADAM: Final = "CPU Adam"
WAITS_OF_FORWARD: Final = "waits of forward"
HOST_WAITS: Final = "host waits"

# -- categories ("cat") of spans ---------------------------------------------------------------

CATEGORY: Final[Mapping[str, str]] = {
    STEPS: "step",
    PYTHON: "python",
    GPU_COMPUTE: "gpu",
    GPU_COMMUNICATION: "comm",
    D2H: "d2h",
    H2D: "h2d",
    GPU_UPDATE: "gpu_update",
    CPU_ADAM: "cpu_update",
    WAITS_OF_FORWARD: "wait",
    HOST_WAITS: "sync",
}
"""Lane -> category of its spans."""

LANES: Final = tuple(CATEGORY)
"""Lanes from top to bottom, the order of thread_sort_index."""

FLOW_CATEGORY: Final = "layer"
"""Category of flows: gradient's end -> D2H -> update -> H2D -> the next forward of that layer."""

# -- names of the phases on a Python lane ------------------------------------------------------

PHASE_FORWARD: Final = "forward"
PHASE_BACKWARD: Final = "backward"
PHASE_OPTIMIZER: Final = "optimizer step"
PHASE_DATA: Final = "data loading"

# -- arguments ("args") of spans ---------------------------------------------------------------

ARG_STEP: Final = "step"
"""Whole number, from 1; for a copy or an update, the step whose gradient it handles."""
ARG_LAYER: Final = "layer"
"""Whole number, from 0."""
ARG_CHUNK: Final = "chunk"
"""Whole number, from 0, within the layer."""
ARG_BYTES: Final = "bytes"
"""For copies and collectives, those moved; for updates, those that DRAM reads and writes."""
ARG_PARAMETERS: Final = "parameters"
"""For updates: how many parameters they update."""
ARG_PASS: Final = "pass"
"""For GPU compute: "forward", "backward" or "recompute"."""
ARG_TASK: Final = "task"
"""For CPU Adam: "preview", "commit", "commit_then_preview" or "publish"."""
ARG_COLLECTIVE: Final = "collective"
"""For communication: "all_gather", "reduce_scatter", "all_reduce", ..."""
ARG_WHAT: Final = "what"
"""For waits: what is waited for, in words."""
WAITS_FOR_ROOM: Final = "room on the GPU for more gradients"
"""What backward waits for until the CPU has updated layers whose gradients are on the GPU."""
ARG_LINE: Final = "line"
"""For host waits: the Python line, "train.py:31"."""
ARG_THREADS: Final = "threads"
"""For CPU Adam: how many threads worked on it, if one lane stands for all."""
ARG_LAUNCHED: Final = "launched"
"""For GPU spans: when the host had launched it, in microseconds as "ts"; it begins no sooner."""
ARG_GPU_ENERGY: Final = "gpu_energy_j"
ARG_CPU_ENERGY: Final = "cpu_energy_j"
"""For steps: joules of the rank's GPU, and of all processors of the host."""
ARG_SLOT: Final = "slot"
"""For gradient D2H: number of its pinned slot, which is free once the previous one was used."""

PASSES: Final = ("forward", "backward", "recompute")

# -- counters (ph "C"; args {"value": number}) -------------------------------------------------

COUNTER_GPU_FRACTION: Final = "gpu_fraction"
COUNTER_PENDING: Final = "pending gradients"
COUNTER_HOST_MEMORY: Final = "host memory"
COUNTER_PINNED_MEMORY: Final = "pinned memory"
COUNTER_GPU_MEMORY: Final = "GPU memory"
COUNTER_GPU_POWER: Final = "GPU power"
COUNTER_CPU_POWER: Final = "CPU power"
"""Power in W, memory in bytes, "pending gradients" in layers."""

# -- the header --------------------------------------------------------------------------------


class _Part(BaseModel):
    # Fields that a later recorder of this format adds are ignored: the rest is still right.
    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)


class Peaks(_Part):
    """Measured peaks of the machine; None if not measured."""

    dram_bytes_per_s: float | None = Field(default=None, gt=0.0)
    d2h_bytes_per_s: float | None = Field(default=None, gt=0.0)
    h2d_bytes_per_s: float | None = Field(default=None, gt=0.0)
    cores: int | None = Field(default=None, ge=1)
    """Cores that the rank may use."""
    adam_parameters_per_s: float | None = Field(default=None, gt=0.0)


class TraceHeader(_Part):
    """The value of "hytrain": what a rank recorded, and how."""

    format: Literal[1] = FORMAT
    rank: int = Field(ge=0, lt=2**31)
    world_size: int = Field(ge=1, lt=2**31)
    clock: Literal["monotonic"] = "monotonic"
    steps: tuple[int, int]
    """First and last recorded step, both included."""
    layers: int = Field(ge=0, lt=2**31)
    """Layers of the model."""
    device: str
    """Its name; "cpu" without a GPU."""
    gpu_fraction: float | None = Field(default=None, ge=0.0, le=1.0)
    gpu_layers: tuple[int, ...] = ()
    """Layers that are updated on the GPU."""
    gradient_clipping: float | None = Field(default=None, ge=0.0)
    """The norm's limit; None or 0 for none."""
    micro_batches: int = Field(default=1, ge=1)
    """Micro-batches per step."""
    tokens_per_step: float | None = Field(default=None, gt=0.0)
    """Tokens of this rank."""
    peaks: Peaks = Peaks()
    predicted_step_s: float | None = Field(default=None, gt=0.0)
    unprofiled_step_s: float | None = Field(default=None, gt=0.0)
    """Median of steps beside the recorded ones."""
    recording_overhead: float | None = None
    """Share of a step that recording takes, measured against unprofiled steps."""
    dropped_spans: int = Field(default=0, ge=0)
    overwritten: bool = False
    """Whether the ring was full, so that its oldest spans are lost."""
    clock_offset_us: float = Field(default=0.0, ge=-_LONGEST, le=_LONGEST)
    """To be added to times of this rank to reach rank 0's clock."""


# -- files -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A file's events, checked by :func:`read_trace`."""

    path: Path
    events: list[dict[str, Any]]
    """Events of ph "X" (with finite "ts", and "dur" at or above 0) and of every other kind."""
    header: TraceHeader | None
    """None for a foreign trace."""
    top: Mapping[str, Any]
    """Everything else in the file beside "traceEvents" and "hytrain"."""


def read_trace(path: Path) -> TraceFile:
    """Reads a trace, ours or a foreign one, plain or gzipped (told by its content).

    Raises:
        TraceError: it cannot be read, is no JSON or no trace, is of another format, or an event is
            broken.
    """
    if other := other_kind(path, "trace"):
        raise TraceError(f"{other}: give a trace")
    # Not strict: names of operators in foreign traces hold raw control characters.
    values = parse_json(_read_bytes(path), f"the trace {path}", TraceError, strict=False)
    if isinstance(values, list):
        values = {"traceEvents": values}  # the format's other form, without metadata
    if not isinstance(values, dict) or not isinstance(values.get("traceEvents"), list):
        kind = type(values).__name__
        has = f"an object with {_some_keys(values)}" if isinstance(values, dict) else f"a {kind}"
        raise TraceError(
            f'{path} is no trace: it holds {has}, not an object with a list "traceEvents": give '
            "a file that hytrain, torch.profiler or viztracer wrote"
        )
    events = values.pop("traceEvents")
    found = values.pop(HEADER_KEY, None)
    header = None if found is None else _header(path, found)
    for number, event in enumerate(events):
        if problem := _event_problem(event):
            raise TraceError(f"the trace {path}, event {number}: {problem}")
    return TraceFile(path=path, events=events, header=header, top=values)


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            is_packed = file.read(2) == b"\x1f\x8b"
        return _unpacked(path) if is_packed else path.read_bytes()
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(
            f"the trace {path} cannot be unpacked ({error}): it is damaged, or was cut off"
        ) from None
    except OSError as error:
        raise TraceError(
            f"cannot read the trace {path} ({error.strerror}): give a file, such as "
            "traces/trace_rank0.json"
        ) from None


def _unpacked(path: Path) -> bytes:
    parts: list[bytes] = []
    left = _MOST_PACKED * path.stat().st_size + _PART_BYTES
    with gzip.open(path) as file:
        while part := file.read(_PART_BYTES):
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise TraceError(
                    f"the trace {path} unpacks to more than {_MOST_PACKED} times its size, as no "
                    "training's does: unpack it yourself (gzip -d) if you trust whoever wrote it"
                )
    return b"".join(parts)


def _some_keys(values: Mapping[str, Any]) -> str:
    keys = [f'"{key}"' for key in list(values)[:4]]
    return ", ".join(keys) + (", ..." if len(values) > 4 else "") if keys else "no keys"


def _header(path: Path, found: Any) -> TraceHeader:
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT:
        raise TraceError(
            f"the trace {path} has format {_short(version)}, this hytrain reads {FORMAT}: "
            "record again, or use the hytrain that recorded it"
        )
    return checked(TraceHeader, found, f"the trace {path}, {HEADER_KEY}", TraceError)


def _event_problem(event: Any) -> str | None:
    """What makes an event unusable; None if nothing does."""
    if not isinstance(event, dict):
        return f"an object is needed, not {_short(event)}"
    phase = event.get("ph")
    if not isinstance(phase, str):
        return f'"ph" must be a string, not {_short(phase)}'
    if not isinstance(event.get("args", {}), dict):
        return f'"args" must be an object, not {_short(event["args"])}'
    for key in ("pid", "tid"):
        if isinstance(event.get(key), (dict, list)):
            return f'"{key}" must be a number or a text, not {_short(event[key])}'
    if phase == "M":
        return None
    if not _is_time(event.get("ts")):
        return f'"ts" must be a finite number of microseconds, not {_short(event.get("ts"))}'
    if phase == "X":
        if not isinstance(event.get("name"), str):
            return f'a span must have a "name", not {_short(event.get("name"))}'
        duration = event.get("dur")
        if not _is_time(duration) or not 0.0 <= duration <= _LONGEST:
            return f'"dur" of {_short(event["name"])} must be at least 0, not {_short(duration)}'
    return None


def _is_time(value: Any) -> TypeGuard[float]:
    """Whether a value is microseconds whose nanoseconds, with offsets, fit in 64 bits."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and -_LONGEST <= value <= MOST_MICROSECONDS


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
