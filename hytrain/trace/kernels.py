"""Kernels and copies of the recorded steps by torch.profiler (Kineto), on CLOCK_MONOTONIC."""

from __future__ import annotations

import bisect
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from hytrain import _C
from hytrain.formats import trace_file as names
from hytrain.trace.recorder import Span

logger = logging.getLogger(__name__)

CUDA_CALLS = f"{names.PYTHON}: CUDA calls"
ARG_STREAM = "stream"
"""Spans of different streams have separate lines in their lane."""
_LAUNCHING = ("cuda_runtime", "cuda_driver")
_EXCHANGES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
"""Part of an NCCL kernel's name -> its collective, for those that exchange activations."""
_KEPT = (ARG_STREAM, "correlation", names.ARG_BYTES)


class KernelProfile:
    """torch.profiler of the device's activity only: operators would cost several times as much."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        self._monotonic_from_epoch = 0
        self._runs = False

    def start(self) -> None:
        """Begins, or logs a warning if another profiler is running already."""
        if cast(Any, torch.autograd)._profiler_enabled():
            logger.warning(
                "the trace has no kernels: another torch.profiler is running, and there can be one"
            )
            return
        self._monotonic_from_epoch = monotonic_from_epoch()
        self._profile.start()
        self._runs = True

    def stop(self) -> None:
        """Ends; the caller has waited for the device."""
        if self._runs:
            self._profile.stop()

    def spans(self, recorded: Sequence[Span]) -> list[Span]:
        """The recorder's and the update worker's spans, with kernels in place of those of
        compute."""
        if not self._runs:
            return list(recorded)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kineto.json"
            self._profile.export_chrome_trace(str(path))
            # Not strict: names hold raw control characters.
            found = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        base_ns = found.get("baseTimeNanoseconds", 0) + self._monotonic_from_epoch
        return with_kernels(found["traceEvents"], base_ns, recorded)


def monotonic_from_epoch() -> int:
    """ns to add to a time since the epoch for CLOCK_MONOTONIC; the best of several readings."""
    trials: list[tuple[int, int]] = []
    for _ in range(8):
        before = time.monotonic_ns()
        epoch = time.time_ns()
        after = time.monotonic_ns()
        trials.append((after - before, (before + after) // 2 - epoch))
    return min(trials)[1]


def with_kernels(
    found: Iterable[dict[str, Any]],
    base_ns: float,
    recorded: Sequence[Span],
    *,
    host_calls: bool = True,
) -> list[Span]:
    """Puts kernels in place of spans of compute, and adds copies that the recorder has not seen.

    Args:
        found: Kineto's events.
        base_ns: nanoseconds that are added to their times.
        recorded: spans of the recorder and the update worker.
        host_calls: whether calls of the CUDA runtime are added, too.

    Returns:
        All spans. Kernels of the compute stream have the layer, pass and step of the span that they
        replace. Without kernels, the recorded spans unchanged.
    """
    found = list(found)
    launches = {
        event["args"]["correlation"]: float(event["ts"]) + event.get("dur", 0.0) + base_ns / 1e3
        for event in found
        if event.get("cat") in _LAUNCHING and "correlation" in event.get("args", {})
    }
    taken = [
        span
        for event in found
        if (host_calls or is_of_device(event))
        and (span := _span(event, base_ns, launches)) is not None
    ]
    busy: Counter[Any] = Counter()
    for span in taken:
        if span.lane == names.GPU_COMPUTE:
            busy[span.args.get(ARG_STREAM)] += round(span.end_ns - span.begin_ns)
    if not busy:
        return list(recorded)
    main = busy.most_common(1)[0][0]
    layers = _Covering(span for span in recorded if span.lane == names.GPU_COMPUTE)
    covered = {
        lane: _Covering(span for span in recorded if span.lane == lane)
        for lane in (names.D2H, names.H2D, names.GPU_COMMUNICATION, names.GPU_UPDATE)
    }
    spans = [span for span in recorded if span.lane != names.GPU_COMPUTE]
    for span in taken:
        on_main = span.lane == names.GPU_COMPUTE and span.args.get(ARG_STREAM) == main
        if on_main:
            layer = layers.at(span)
            spans.append(span if layer is None else span._replace(args={**layer.args, **span.args}))
            continue
        # Kineto's spans of what the recorder has itself are left out: it knows more of them. A
        # kernel of another stream than compute's may be an update's. The recorder has no exchanges
        # of activations.
        lane = names.GPU_UPDATE if span.lane == names.GPU_COMPUTE else span.lane
        is_exchange = names.ARG_COLLECTIVE in span.args
        if is_exchange or lane not in covered or covered[lane].at(span) is None:
            spans.append(span)
    return spans


def is_of_device(event: dict[str, Any]) -> bool:
    """Whether Kineto's event is one of the device's, or an arrow to one."""
    return event.get("cat") in (
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "gpu_user_annotation",
        "ac2g",
    )


def _span(event: dict[str, Any], base_ns: float, launches: Mapping[Any, float]) -> Span | None:
    lane = _lane(event)
    if event.get("ph") != "X" or lane is None:
        return None
    begin_ns = float(event["ts"]) * 1e3 + base_ns
    end_ns = begin_ns + float(event.get("dur", 0.0)) * 1e3
    args = {key: value for key, value in event.get("args", {}).items() if key in _KEPT}
    if is_of_device(event) and args.get("correlation") in launches:
        # The kernel may begin before the call has returned.
        args[names.ARG_LAUNCHED] = min(launches[args["correlation"]], begin_ns / 1e3)
    if lane == names.GPU_COMMUNICATION:
        plain = str(event["name"]).lower().replace("_", "")
        for part, kind in _EXCHANGES.items():
            if part in plain:
                args[names.ARG_COLLECTIVE] = kind
    if lane == CUDA_CALLS:
        args[ARG_STREAM] = event.get("tid")  # calls of several threads may overlap
    return Span(lane, str(event["name"]), begin_ns, end_ns, args)


def _lane(event: dict[str, Any]) -> str | None:
    name, category = str(event.get("name", "")), event.get("cat")
    if category == "kernel":
        is_nccl = name.startswith("nccl")
        return names.GPU_COMMUNICATION if is_nccl else names.GPU_COMPUTE
    if category == "gpu_memset":
        return names.GPU_COMPUTE
    if category == "gpu_memcpy":
        return names.D2H if "DtoH" in name else names.H2D if "HtoD" in name else names.GPU_COMPUTE
    return CUDA_CALLS if category in _LAUNCHING else None


class _Covering:
    """Finds the one of some spans, which do not overlap, that covers a time."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.begin_ns)
        self._begins = [span.begin_ns for span in self._spans]

    def at(self, other: Span) -> Span | None:
        """The span in which the middle of another one lies; None if in none."""
        middle = (other.begin_ns + other.end_ns) / 2
        at = bisect.bisect_right(self._begins, middle) - 1
        return self._spans[at] if at >= 0 and middle <= self._spans[at].end_ns else None


_COPIES = {
    "gradient_to_host": (names.D2H, "gradient"),
    "gradient_to_device": (names.H2D, "gradient"),
    "weights_to_device": (names.H2D, "weights"),
    "weights_to_host": (names.D2H, "weights"),
    "state_to_host": (names.D2H, "state"),
    "state_to_device": (names.H2D, "state"),
}


def worker_spans(
    found: Iterable[_C.TraceSpan],
    layer_of: Callable[[int], int],
    correct: Callable[[float], float],
    num_threads: int,
) -> Iterator[Span]:
    """Yields passes over chunks (on the host's clock) and copies (on the device's).

    Args:
        found: spans as the update worker's ring has them.
        layer_of: maps the worker's number of a layer to the model's.
        correct: converts a device's time to the host's.
        num_threads: threads that make a pass together; 1 if each has spans of its own.
    """
    for span in found:
        layer = layer_of(span.layer)
        args: dict[str, Any] = {
            names.ARG_LAYER: layer,
            names.ARG_CHUNK: span.chunk,
            names.ARG_STEP: span.step,
            names.ARG_BYTES: span.bytes,
        }
        copied = _COPIES.get(span.kind.name)
        if copied is not None:
            lane, what = copied
            if span.slot >= 0:
                args[names.ARG_SLOT] = span.slot
            begin, end = correct(span.begin_ns), correct(span.end_ns)
            yield Span(lane, f"{what} layer {layer}", begin, end, args)
            continue
        args |= {
            names.ARG_PARAMETERS: span.elements,
            names.ARG_TASK: span.kind.name,
            names.ARG_THREADS: num_threads,
        }
        lane = names.CPU_ADAM if span.thread == 0 else f"{names.CPU_ADAM} {span.thread + 1}"
        title = f"update layer {layer} chunk {span.chunk}"
        yield Span(lane, title, span.begin_ns, span.end_ns, args)
