"""A device whose clock the test turns by hand, in two kinds: with events, and a CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hytrain.placement import step_timer


class FakeDevice:
    """Time that passes when it is told to; events are complete up to a point in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_events: bool) -> None:
        self.now = 0.0
        self.has_come_to = float("inf")
        """Events recorded up to then are complete."""
        self.num_events = 0
        self.device = torch.device("cuda", 0) if has_events else torch.device("cpu")
        monkeypatch.setattr(step_timer, "time", SimpleNamespace(perf_counter=lambda: self.now))
        if not has_events:
            return
        fake = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing
                fake.num_events += 1
                self.at: float | None = None

            def record(self, stream: object) -> None:
                assert stream == "compute"
                self.at = fake.now

            def query(self) -> bool:
                assert self.at is not None
                return self.at <= fake.has_come_to

            def elapsed_time(self, end: Any) -> float:
                assert self.query()
                assert end.query()
                return (end.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: "compute")

    def passes(self, seconds: float) -> None:
        self.now += seconds
