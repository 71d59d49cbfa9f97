"""Recorded trainings of toy models, and the contents of their trace files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hytrain.formats import trace_file as names
from hytrain.formats.trace_file import TraceFile, TraceHeader, read_trace
from support.engines import built, make_config
from support.models import loss_of, make_batch, make_model

Event = dict[str, Any]


def train(
    config: dict[str, Any],
    steps: int,
    *,
    kind: str = "mlp",
    accumulation: int = 1,
    rank: int = 0,
    after_step: Callable[[int, torch.Tensor], None] = lambda _step, _loss: None,
) -> dict[str, torch.Tensor]:
    """Trains; returns the master weights and moments, one tensor a parameter and kind (rank 0)."""
    with built(make_model(kind), config) as engine:
        number = 1000 * rank
        for step in range(1, steps + 1):
            loss = torch.zeros(())
            for _ in range(accumulation):
                number += 1
                loss = loss_of(engine(**make_batch(kind, number)))
                engine.backward(loss)
                engine.step()
            after_step(step, loss)
        state = engine.fp32_state_dict()
    return {f"{name}.{kind}": t for name, parts in state.items() for kind, t in parts.items()}


def traced_config(folder: Path, steps: tuple[int, int], **keywords: Any) -> dict[str, Any]:
    """A configuration that records a trace; ``keywords`` as for ``make_config``."""
    section = {"trace": {"dir": str(folder), "steps": list(steps), **keywords.pop("trace", {})}}
    return make_config(hytrain=section | keywords.pop("hytrain", {}), **keywords)


@dataclass(frozen=True)
class Trace:
    """A trace file, and its events by lane."""

    file: TraceFile

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Reads a file, with the format's checks."""
        return cls(read_trace(path))

    @property
    def header(self) -> TraceHeader:
        """The header, of the rank that recorded the file."""
        assert self.file.header is not None
        return self.file.header

    @property
    def lane_of(self) -> dict[tuple[Any, Any], str]:
        """(pid, tid) -> the lane's name."""
        return {
            (e["pid"], e["tid"]): e["args"]["name"]
            for e in self.file.events
            if e["ph"] == "M" and e["name"] == "thread_name"
        }

    def spans(self, lane: str, pid: int = 0, **args: Any) -> list[Event]:
        """A lane's spans with these arguments, in order of time."""
        lanes = self.lane_of
        found = [
            e
            for e in self.file.events
            if e["ph"] == "X"
            and e["pid"] == pid
            and lanes.get((e["pid"], e["tid"])) == lane
            and all(e["args"].get(key) == value for key, value in args.items())
        ]
        return sorted(found, key=lambda e: e["ts"])

    def steps(self, pid: int = 0) -> dict[int, tuple[float, float]]:
        """Step -> its begin and end."""
        return {
            e["args"]["step"]: (e["ts"], e["ts"] + e["dur"]) for e in self.spans(names.STEPS, pid)
        }

    def of_phase(self, phase: str) -> Iterator[Event]:
        """Events of a phase ("C", "s", ...)."""
        return (e for e in self.file.events if e["ph"] == phase)

    def span_at(self, flow: Event) -> Event:
        """The span that a flow event binds to."""
        on_lane = [
            e
            for e in self.file.events
            if e["ph"] == "X" and (e["pid"], e["tid"]) == (flow["pid"], flow["tid"])
        ]
        inside = [e for e in on_lane if e["ts"] <= flow["ts"] <= e["ts"] + e["dur"]]
        assert inside, f"the arrow {flow} points at nothing"
        return inside[-1]
