"""Spans of torch.profiler (Kineto), from any training: plain DeepSpeed, FSDP2, others.

Kineto knows kernels, copies and the host's calls that launched them, but not the chain of an
offloaded update. The pass of a kernel follows from where it was launched: in an autograd node it
is backward, in "Optimizer.step#..." an update, else forward. Layers come from spans of the host
that name one (modules, FSDP's annotations); in backward from the forward's sequence number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hytrain.tools.trace import kinds
from hytrain.tools.trace.hytrain_spans import nanoseconds, number_of, whole_of
from hytrain.tools.trace.intervals import Intervals, of_pairs
from hytrain.tools.trace.spans import NONE, Span, Step

_ON_GPU: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS: Final = ("cuda_runtime", "cuda_driver")
CATEGORIES: Final = frozenset((*_ON_GPU, *_CALLS, "cpu_op", "user_annotation", "python_function"))
_WAITING: Final = re.compile(
    r"(cuda|hip)(Stream|Device|Event)Synchronize|(cuda|hip)Memcpy|cu(Stream|Ctx|Event)Synchronize"
)
_COLLECTIVES: Final = (
    ("allgather", "all_gather"),
    ("reducescatter", "reduce_scatter"),
    ("allreduce", "all_reduce"),
    ("broadcast", "broadcast"),
    ("alltoall", "all_to_all"),
    ("sendrecv", "send_recv"),
    ("reduce", "reduce"),
)
_STEP: Final = re.compile(r"ProfilerStep#(\d{1,9})")
_LAYER: Final = re.compile(
    r"(?:\b(?:layers?|blocks?|h)\.|nn\.Module: \w*(?:Layer|Block)_)(\d{1,9})\b"
)
_ELEMENT_BYTES: Final[Mapping[str, int]] = {
    **{"Float": 4, "Half": 2, "BFloat16": 2, "Double": 8, "Byte": 1, "Char": 1, "Int": 4, "Long": 8}
}


@dataclass(slots=True)
class KinetoEvents:
    """Gathers a rank's events; :meth:`rows` makes spans of them."""

    gpu: list[tuple[str, Span, int]] = field(default_factory=list[tuple[str, Span, int]])
    """(resource, span, correlation) of each event of the GPU."""
    launches: dict[int, tuple[int, int, int]] = field(
        default_factory=dict[int, tuple[int, int, int]]
    )
    """Correlation -> (begin, end, thread) of the host's call."""
    steps: list[Step] = field(default_factory=list[Step])
    host: dict[str, list[Span]] = field(default_factory=dict[str, list[Span]])
    operators: list[Span] = field(default_factory=list[Span])
    updates: list[Span] = field(default_factory=list[Span])
    layers: dict[int, list[Span]] = field(default_factory=dict[int, list[Span]])
    """Thread -> spans that name a layer."""
    forward_sequence: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    """(sequence number, begin, thread) of the forward's operators."""
    backward: list[tuple[int, Span]] = field(default_factory=list[tuple[int, Span]])
    """(sequence number, span) of autograd's nodes; NONE for a node without a number."""

    def add(self, event: Mapping[str, Any], thread: int, offset: int) -> None:
        """Takes an event of one of CATEGORIES."""
        begin = nanoseconds(event["ts"]) + offset
        span = Span(begin, begin + nanoseconds(event["dur"]), event["name"], lane=thread)
        args: Mapping[str, Any] = event.get("args", {})
        category = event["cat"]
        if category in _ON_GPU:
            self._add_gpu(category, span, args)
        elif category in _CALLS:
            correlation = whole_of(args.get("correlation"))
            if correlation != NONE:
                self.launches[correlation] = (begin, span.end, thread)
            if _WAITING.fullmatch(span.name):
                self._add_host(kinds.SYNC, span)
        elif category == "python_function":
            self._add_host(kinds.PYTHON, span)
            self._note_layer(span)
        else:
            self._add_operator(category, span, args)

    def _add_host(self, resource: str, span: Span) -> None:
        self.host.setdefault(resource, []).append(span)

    def _note_layer(self, span: Span) -> None:
        if match := _LAYER.search(span.name):
            self.layers.setdefault(span.lane, []).append(replace(span, layer=int(match[1])))

    def _add_gpu(self, category: str, span: Span, args: Mapping[str, Any]) -> None:
        name = span.name.lower()
        resource, detail = kinds.COMPUTE, ""
        size = number_of(args.get("bytes"))
        if category == "gpu_memcpy":
            if "dtoh" in name:
                resource = kinds.D2H
            elif "htod" in name:
                resource = kinds.H2D
        elif name.startswith(("nccl", "rccl")):
            resource, size = kinds.COMMUNICATION, _collective_bytes(args)
            # NCCL sends and receives for all_to_all: the kernel's name does not say it.
            plain = f"{args.get('Collective name', '')}{name}".replace("_", "")
            detail = next((ours for theirs, ours in _COLLECTIVES if theirs in plain), "collective")
        span = replace(span, size=size, detail=detail)
        self.gpu.append((resource, span, whole_of(args.get("correlation"))))

    def _add_operator(self, category: str, span: Span, args: Mapping[str, Any]) -> None:
        if match := _STEP.match(span.name):
            self.steps.append(Step(int(match[1]), span.begin, span.end))
        elif span.name.startswith("enumerate(DataLoader)"):
            self._add_host(kinds.DATA, span)
        elif span.name.startswith("Optimizer.step#"):
            self.updates.append(span)
        else:
            self._note_layer(span)
            sequence = whole_of(args.get("Sequence number"))
            if span.name.startswith("autograd::engine::evaluate_function"):
                self.backward.append((sequence, span))
            elif sequence != NONE and not args.get("Fwd thread id"):
                self.forward_sequence.append((sequence, span.begin, span.lane))
            if category == "cpu_op":
                self.operators.append(span)

    def rows(self, steps: list[tuple[int, int]]) -> dict[str, list[Span]]:
        """The spans of each resource.

        ``steps``: (begin, end) of each: kernels after a step's last backward are not forward.
        """
        rows = {resource: list(spans) for resource, spans in self.host.items()}
        rows[kinds.PHASE] = [replace(span, name="optimizer step") for span in self.updates]
        rows[kinds.CPU_UPDATE] = [
            replace(span, name=f"update ({span.name.removeprefix('Optimizer.step#')})")
            for span in self.updates
            if "cpu" in span.name.lower()
        ]
        unknown, update = (NONE, NONE, NONE), kinds.GPU_UPDATE
        work = [(what, one, *self.launches.get(number, unknown)) for what, one, number in self.gpu]
        if not self.gpu:
            # The operators of the CPU are the compute.
            update = kinds.CPU_UPDATE
            work = [(kinds.COMPUTE, one, one.begin, NONE, one.lane) for one in self.operators]
        times, _, threads = np.array([one[2:] for one in work], np.int64).reshape(-1, 3).T
        passes, layers = self._passes(times, steps), self._layers(times, threads).tolist()
        for (resource, span, _, end, _), passed, layer in zip(work, passes, layers, strict=True):
            # A kernel may begin before its launch has returned.
            row = replace(span, launched=min(end, span.begin), layer=layer)
            if resource == kinds.COMPUTE:
                row.detail = passed
                resource = update if passed == kinds.GPU_UPDATE else resource
            rows.setdefault(resource, []).append(row)
        return rows

    def _passes(self, times: NDArray[np.int64], steps: list[tuple[int, int]]) -> list[str]:
        """The pass of what the host launched at each of these times; a time of NONE is unknown."""
        if not self.backward and not self.updates:
            return [kinds.OTHER] * len(times)
        backward = of_pairs((span.begin, span.end) for _, span in self.backward)
        # DeepSpeed's CPU optimizer launches copies only: kernels are those of another optimizer.
        update = of_pairs((span.begin, span.end) for span in self.updates)
        is_backward, is_update = _inside(backward, times), _inside(update, times)
        is_forward = np.zeros(len(times), bool)
        for begin, end in steps:
            inside = backward.within(begin, end)
            last = int(inside.end[-1]) if len(inside) else end
            is_forward |= (times >= begin) & (times < last)
        labels = np.select(
            [times == NONE, is_backward, is_update, is_forward],
            [kinds.OTHER, kinds.BACKWARD, kinds.GPU_UPDATE, kinds.FORWARD],
            kinds.OTHER,
        )
        return labels.tolist()

    def _layers(self, times: NDArray[np.int64], threads: NDArray[np.int64]) -> NDArray[np.int64]:
        layers = np.full(len(times), NONE, np.int64)
        if not self.layers:
            return layers
        for thread in set(threads.tolist()):
            chosen = threads == thread
            layers[chosen] = _enclosing(self.layers.get(thread, []), times[chosen])
        named = self._layers_of_sequences()
        by_thread: dict[int, list[Span]] = {}
        for sequence, span in self.backward:
            if sequence in named:
                by_thread.setdefault(span.lane, []).append(replace(span, layer=named[sequence]))
        for thread, spans in by_thread.items():
            chosen = (threads == thread) & (layers == NONE)
            layers[chosen] = _enclosing(spans, times[chosen])
        return layers

    def _layers_of_sequences(self) -> dict[int, int]:
        """Sequence number of autograd -> the layer whose forward made it."""
        named: dict[int, int] = {}
        for thread, spans in self.layers.items():
            chosen = [
                (number, begin) for number, begin, of in self.forward_sequence if of == thread
            ]
            layers = _enclosing(spans, np.array([begin for _, begin in chosen], np.int64))
            for (number, _), layer in zip(chosen, layers.tolist(), strict=True):
                if layer != NONE:
                    named[number] = layer
        return named


def _enclosing(spans: list[Span], times: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each time, the layer of the last span that begins before it and ends after it."""
    result = np.full(len(times), NONE, np.int64)
    if not spans:
        return result
    ordered = sorted(spans, key=lambda span: span.begin)
    begins = np.array([span.begin for span in ordered], np.int64)
    ends = np.array([span.end for span in ordered], np.int64)
    layers = np.array([span.layer for span in ordered], np.int64)
    index = np.searchsorted(begins, times, side="right") - 1
    # A module calls others: the last one to begin may have ended, but not one around it.
    for back in range(8):
        place = np.maximum(index - back, 0)
        is_in = (index - back >= 0) & (ends[place] >= times) & (result == NONE)
        result[is_in] = layers[place[is_in]]
    return result


def _inside(intervals: Intervals, times: NDArray[np.int64]) -> NDArray[np.bool_]:
    if not len(intervals):
        return np.zeros(len(times), bool)
    index = np.searchsorted(intervals.begin, times, side="right") - 1
    return (index >= 0) & (times < intervals.end[np.maximum(index, 0)])


def _collective_bytes(args: Mapping[str, Any]) -> float:
    elements = max(number_of(args.get("In msg nelems")), number_of(args.get("Out msg nelems")))
    return elements * _ELEMENT_BYTES.get(str(args.get("dtype")), 0)
