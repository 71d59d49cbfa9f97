"""Points in time on a device's streams and on the host, on one clock: CLOCK_MONOTONIC."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

Mark = torch.cuda.Event | int
"""A point in a stream, which the device may not have reached yet, or a time on the host in ns."""

_TRIALS = 8
_REANCHOR_NS = 5_000_000_000
"""The time between events is a float of milliseconds: beyond 16 s it cannot hold microseconds."""


@dataclass(frozen=True, slots=True)
class _Anchor:
    event: torch.cuda.Event
    host_ns: float


class TraceClock:
    """Makes marks, and tells their times.

    A device's time is counted from an event whose time on the host is known: recorded and waited
    for when a recording begins. At its end there is another; the drift of the two clocks between
    them is removed in proportion (:meth:`corrected`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_device = device.type == "cuda"
        """Whether marks are on the device's own clock, and need to be :meth:`corrected`."""
        self._anchor: _Anchor | None = None
        self._old: _Anchor | None = None
        self._next: torch.cuda.Event | None = None
        self._began_ns = 0.0
        self._rate = 1.0

    def start(self) -> None:
        """Begins a recording; waits for the device."""
        self._rate = 1.0
        if self.is_device:
            self._anchor = self._synchronized()
            self._began_ns = self._anchor.host_ns

    def stop(self) -> None:
        """Ends the recording; waits for the device."""
        if self._anchor is None:
            return
        end = self._synchronized()
        by_device = self.ns(end.event) - self._began_ns
        if by_device > 0.0:
            self._rate = (end.host_ns - self._began_ns) / by_device

    def _synchronized(self) -> _Anchor:
        """An event and its time on the host, from the shortest, most exact of several waits."""
        torch.cuda.synchronize(self._device)
        best: tuple[int, _Anchor] | None = None
        for _ in range(_TRIALS):
            event = torch.cuda.Event(enable_timing=True)
            begin = time.monotonic_ns()
            event.record(torch.cuda.current_stream(self._device))
            event.synchronize()
            end = time.monotonic_ns()
            if best is None or end - begin < best[0]:
                best = end - begin, _Anchor(event, (begin + end) / 2)
        assert best is not None
        return best[1]

    def mark(self) -> Mark:
        """A mark behind everything queued on the current stream so far; without a device, now."""
        if not self.is_device:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_past(self, mark: Mark) -> bool:
        """Whether the device has reached the mark."""
        return isinstance(mark, int) or mark.query()

    def ns(self, mark: Mark) -> float:
        """The time of a mark that is past; a device's counts from the anchor, not yet corrected."""
        if isinstance(mark, int):
            return mark
        assert self._anchor is not None
        return self._anchor.host_ns + self._anchor.event.elapsed_time(mark) * 1e6

    def corrected(self, ns: float) -> float:
        """Corrects a time of :meth:`ns` or of the update worker's copies, after :meth:`stop`."""
        return self._began_ns + (ns - self._began_ns) * self._rate if self.is_device else ns

    # -- the anchor ------------------------------------------------------------------------------

    @property
    def anchor(self) -> tuple[int, int]:
        """The event from which times count (its handle; 0 without a device), and its time in ns."""
        if self._anchor is None:
            return 0, 0
        return int(self._anchor.event.cuda_event), round(self._anchor.host_ns)

    def advance(self) -> bool:
        """Takes a newer anchor from time to time, between two steps of a long recording; no wait.

        Returns:
            Whether there is a new one. The old one lives until the next call that makes one.
        """
        if self._anchor is None or time.monotonic_ns() - self._anchor.host_ns < _REANCHOR_NS:
            return False
        if self._next is None:
            self._next = torch.cuda.Event(enable_timing=True)
            self._next.record(torch.cuda.current_stream(self._device))
            return False
        if not self._next.query():
            return False
        newer = _Anchor(self._next, self.ns(self._next))
        # Kept: the update worker has the old one's handle until it is told of the new one.
        self._old, self._anchor, self._next = self._anchor, newer, None
        return True
