"""Traces whose every span is known: an event simulation of host, GPU, copies, CPU Adam and ranks.

A rank's host loads data, launches forward and backward layer by layer, blocks before a layer until
its new weights have been issued, makes the step and runs the user's code. Each resource does one
thing at a time, in order. All times are whole microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hytrain.formats import trace_file as names

START = 5_000_000_000
"""The time on the clock at which the first step begins, in microseconds."""
FORWARD, BACKWARD, UPDATE, D2H, H2D, CPU, GATHER, REDUCE = (
    *("forward", "backward", "gpu_update", "d2h", "h2d", "cpu"),
    *("all_gather", "reduce_scatter"),
)
LATE_D2H, LATE_H2D, STARVED, DATA, LAUNCH, SYNC, USER, NORM = (
    *("late_d2h", "late_h2d", "starved", "data", "launch", "sync", "user", "norm"),
)


@dataclass(frozen=True)
class Schedule:
    """How long a run's work takes, in microseconds; ``faults`` add to it."""

    layers: int = 4
    steps: int = 4
    ranks: int = 1
    gpu_layers: tuple[int, ...] = ()
    times: Mapping[str, int] = field(
        default_factory=lambda: {
            **{FORWARD: 1000, BACKWARD: 2000, UPDATE: 100, D2H: 200, H2D: 200, CPU: 300},
            **{GATHER: 100, REDUCE: 100, LAUNCH: 50, DATA: 100, USER: 50, NORM: 20},
        }
    )
    faults: Mapping[tuple[str, int, int, int], int] = field(
        default_factory=dict[tuple[str, int, int, int], int]
    )
    """(what, rank, step, layer) -> microseconds more; -1 stands for every rank, step or layer."""
    clipped: tuple[int, ...] = ()
    """Steps whose gradients are clipped: CPU layers are previewed again after backward."""
    sync_line: str = ""
    """A line of user code that synchronizes at the end of each step."""
    user_function: str = "log (train.py:12)"
    with_launches: bool = True
    slots: int = 0
    """Pinned memory in gradients, each of which stays until its layer's next update; 0: enough."""
    room: int = 0
    """Gradients that the GPU has memory for, each until its layer is updated; 0: enough."""
    peaks: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gpu_joules: float | None = None
    """The GPU's energy in each step."""

    def fault(
        self, what: str, more: int, rank: int = -1, step: int = -1, layer: int = -1
    ) -> Schedule:
        """Returns the run with something that takes ``more`` microseconds longer."""
        return replace(self, faults={**self.faults, (what, rank, step, layer): more})

    def taking(self, **times: int) -> Schedule:
        """Returns the run with other times."""
        return replace(self, times={**self.times, **times})

    def time(self, what: str, rank: int, step: int, layer: int) -> int:
        """Returns how long something takes."""
        keys = {(what, r, s, k) for r in (rank, -1) for s in (step, -1) for k in (layer, -1)}
        return self.times.get(what, 0) + sum(self.faults.get(key, 0) for key in keys)


class Rank:
    """A rank's clocks, and its spans as events."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.events: list[dict[str, Any]] = []
        self.host = self.gpu = self.d2h = self.h2d = self.cpu = self.comm = START
        self.weights: dict[int, int] = {}
        """Layer -> when its new weights are on the GPU."""
        self.issued: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.step_ends: dict[int, int] = {}
        self.free = [(START, slot) for slot in range(schedule.slots)]
        self.pending: dict[int, int] = {}
        """Layer -> slot of its last gradient."""
        self.fetched: list[int] = []
        """When gradients' memory on the GPU was free."""

    def span(self, lane: str, name: str, begin: int, end: int, **args: Any) -> None:
        args = {key: value for key, value in args.items() if value is not None}
        base = lane.split(":")[0]
        self.events.append(
            {
                **{"ph": "X", "name": name, "cat": names.CATEGORY[base], "pid": self.rank},
                **{"tid": names.LANES.index(base), "ts": float(begin), "dur": float(end - begin)},
                "args": args,
            }
        )

    def takes(self, what: str, step: int, layer: int = -1) -> int:
        return self.schedule.time(what, self.rank, step, layer)

    def compute(self, what: str, step: int, layer: int, ready: int = START) -> int:
        """Launches a layer's pass or update; returns its end."""
        self.host += self.takes(LAUNCH, step, layer)
        begin = max(self.gpu, self.host, ready)
        self.gpu = begin + self.takes(what, step, layer)
        lane = names.GPU_UPDATE if what == UPDATE else names.GPU_COMPUTE
        name = f"update layer {layer}" if what == UPDATE else f"{what} layer {layer}"
        known = float(self.host) if self.schedule.with_launches else None
        passes = None if what == UPDATE else what
        self.span(
            *(lane, name, begin, self.gpu),
            **{"layer": layer, "step": step, "launched": known, "pass": passes},
        )
        return self.gpu

    def collective_begins(self, ready: int) -> int:
        return max(self.comm, ready)

    def collective(self, what: str, step: int, layer: int | None, begin: int, end: int) -> None:
        self.comm = end
        name = what if layer is None else f"{what} layer {layer}"
        self.span(
            *(names.GPU_COMMUNICATION, name, begin, end),
            **{"collective": what, "layer": layer, "step": step, "bytes": 1000},
        )

    def gradient(self, step: int, layer: int, ready: int) -> None:
        """Copies a layer's gradient and updates the layer."""
        slot = None
        if self.free:
            free, slot = min(self.free)
            self.free.remove((free, slot))
            ready = max(ready, free)
        begin = max(self.d2h, ready) + self.takes(LATE_D2H, step, layer)
        self.d2h = self.gradients[layer] = begin + self.takes(D2H, step, layer)
        args = {"layer": layer, "step": step, "bytes": 2_000_000, "slot": slot}
        self.span(names.D2H, f"gradient layer {layer}", begin, self.d2h, **args)
        self.update(step, layer, self.d2h, "commit_then_preview")
        self.fetched.append(self.cpu)
        if slot is not None:
            if layer in self.pending:
                self.free.append((self.cpu, self.pending[layer]))
            self.pending[layer] = slot

    def update(self, step: int, layer: int, ready: int, task: str) -> None:
        begin = max(self.cpu, ready) + self.takes(STARVED, step, layer)
        self.cpu = begin + self.takes(CPU, step, layer)
        args = {"layer": layer, "step": step}
        self.span(
            *(names.CPU_ADAM, f"update layer {layer} chunk 0", begin, self.cpu),
            **(args | {"task": task, "bytes": 30_000_000, "parameters": 1_000_000, "threads": 8}),
        )
        begin = max(self.h2d, self.cpu) + self.takes(LATE_H2D, step, layer)
        self.h2d = begin + self.takes(H2D, step, layer)
        self.issued[layer], self.weights[layer] = begin, self.h2d
        args["bytes"] = 2_000_000
        self.span(names.H2D, f"weights layer {layer}", begin, self.h2d, **args)

    def wait(self, step: int, layer: int) -> None:
        """The host blocks until the layer's weights have been issued."""
        issued = self.issued.get(layer, START)
        if issued > self.host:
            args = {"layer": layer, "step": step, "what": "new weights"}
            self.span(names.WAITS_OF_FORWARD, f"wait layer {layer}", self.host, issued, **args)
            self.host = issued

    def wait_for_room(self, step: int, layer: int) -> None:
        """The host blocks until the GPU has memory for one more gradient."""
        room = self.schedule.room
        if room and len(self.fetched) >= room and (free := self.fetched[-room]) > self.host:
            args = {"layer": layer, "step": step, "what": names.WAITS_FOR_ROOM}
            self.span(names.WAITS_OF_FORWARD, f"wait layer {layer}", self.host, free, **args)
            self.host = free


def simulate(schedule: Schedule) -> list[Rank]:
    """Runs all steps."""
    ranks = [Rank(schedule, number) for number in range(schedule.ranks)]
    for step in range(1, schedule.steps + 1):
        begins = [rank.host for rank in ranks]
        for rank in ranks:
            _load(rank, step)
        _forward(schedule, ranks, step)
        _backward(schedule, ranks, step)
        for rank, begin in zip(ranks, begins, strict=True):
            _finish(rank, step)
            args = {names.ARG_STEP: step, names.ARG_GPU_ENERGY: schedule.gpu_joules}
            rank.span(names.STEPS, f"step {step}", begin, rank.host, **args)
    return ranks


def _load(rank: Rank, step: int) -> None:
    # A queue of launches is finite: the host is two steps ahead at most.
    rank.host = max(rank.host, rank.step_ends.get(step - 2, START))
    begin, rank.host = rank.host, rank.host + rank.takes(DATA, step)
    rank.span(names.PYTHON, names.PHASE_DATA, begin, rank.host)


def _meet(ranks: list[Rank], what: str, step: int, layer: int | None, ready: list[int]) -> None:
    begins = [rank.collective_begins(time) for rank, time in zip(ranks, ready, strict=True)]
    for rank, begin in zip(ranks, begins, strict=True):
        number = -1 if layer is None else layer
        end = max(begins) + max(other.takes(what, step, number) for other in ranks)
        rank.collective(what if layer is not None else "all_reduce", step, layer, begin, end)


def _forward(schedule: Schedule, ranks: list[Rank], step: int) -> None:
    begins = [rank.host for rank in ranks]
    for layer in range(schedule.layers):
        for rank in ranks:
            rank.wait(step, layer)
        ready = [rank.weights.get(layer, START) for rank in ranks]
        if schedule.ranks > 1 and step > 1:
            _meet(ranks, GATHER, step, layer, ready)
            ready = [rank.comm for rank in ranks]
        for rank, time in zip(ranks, ready, strict=True):
            rank.compute(FORWARD, step, layer, time)
    for rank, begin in zip(ranks, begins, strict=True):
        rank.span(names.PYTHON, names.PHASE_FORWARD, begin, rank.host)


def _backward(schedule: Schedule, ranks: list[Rank], step: int) -> None:
    begins = [rank.host for rank in ranks]
    for layer in reversed(range(schedule.layers)):
        for rank in ranks:
            rank.wait_for_room(step, layer)
        ready = [rank.compute(BACKWARD, step, layer) for rank in ranks]
        if schedule.ranks > 1:
            _meet(ranks, REDUCE, step, layer, ready)
            ready = [rank.comm for rank in ranks]
        for rank, time in zip(ranks, ready, strict=True):
            if layer not in schedule.gpu_layers:
                rank.gradient(step, layer, time)
    for rank, begin in zip(ranks, begins, strict=True):
        rank.span(names.PYTHON, names.PHASE_BACKWARD, begin, rank.host)
    if step in schedule.clipped:
        _meet(ranks, NORM, step, None, [rank.gpu for rank in ranks])
        for rank in ranks:
            for layer in range(schedule.layers):
                if layer not in schedule.gpu_layers:
                    rank.update(step, layer, rank.comm, "preview")


def _finish(rank: Rank, step: int) -> None:
    begin = rank.host
    for layer in rank.schedule.gpu_layers:
        rank.weights[layer] = rank.compute(UPDATE, step, layer)
    rank.step_ends[step] = rank.gpu
    rank.span(names.PYTHON, names.PHASE_OPTIMIZER, begin, rank.host)
    if rank.schedule.sync_line:
        begin, rank.host = rank.host, max(rank.host, rank.gpu) + rank.takes(SYNC, step)
        line = rank.schedule.sync_line
        rank.span(names.HOST_WAITS, "cudaStreamSynchronize", begin, rank.host, line=line)
    begin, rank.host = rank.host, rank.host + rank.takes(USER, step)
    rank.span(names.PYTHON, rank.schedule.user_function, begin, rank.host)


def write(folder: Path, schedule: Schedule, first: int = 1, **header: Any) -> list[Path]:
    """Writes the run's traces, one file per rank, recorded from the start of step ``first`` on."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for rank in simulate(schedule):
        values: dict[str, Any] = {
            **{"format": 1, "rank": rank.rank, "world_size": schedule.ranks},
            **{"steps": [first, schedule.steps], "layers": schedule.layers, "device": "simulated"},
            **{"gpu_layers": list(schedule.gpu_layers), "peaks": dict(schedule.peaks)},
            "gpu_fraction": len(schedule.gpu_layers) / schedule.layers,
            "gradient_clipping": 1.0 if schedule.clipped else None,
        }
        begin = next(one["ts"] for one in rank.events if one["name"] == f"step {first}")
        events = [one for one in rank.events if one["ts"] >= begin]
        events = [*_metadata(rank.rank), *events]
        path = folder / f"trace_rank{rank.rank}.json"
        text = {"traceEvents": events, "displayTimeUnit": "ms", "hytrain": values | header}
        path.write_text(json.dumps(text), encoding="utf-8")
        paths.append(path)
    return paths


def rewrite(path: Path, change: Callable[[dict[str, Any]], list[dict[str, Any]]]) -> Path:
    """Writes the trace, with each event replaced by ``change``'s, to a file beside it."""
    values = json.loads(path.read_text())
    values["traceEvents"] = [new for event in values["traceEvents"] for new in change(event)]
    found = path.with_name(f"rewritten_{path.name}")
    found.write_text(json.dumps(values))
    return found


def _metadata(rank: int) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
    ]
    for number, lane in enumerate(names.LANES):
        common: dict[str, Any] = {"ph": "M", "pid": rank, "tid": number}
        events.append(common | {"name": "thread_name", "args": {"name": lane}})
        events.append(common | {"name": "thread_sort_index", "args": {"sort_index": number}})
    return events
