"""Points in time on a device's streams and on the host, on one clock: CLOCK_MONOTONIC."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

Mark = torch.cuda.Event | int
"""A point in a stream that its device has or has not come to yet; or one on the host, in ns."""

_TRIALS = 8
_REANCHOR_NS = 5_000_000_000
"""From an event to another there is a float of milliseconds: beyond 16 s without microseconds."""


@dataclass(frozen=True, slots=True)
class _Anchor:
    event: torch.cuda.Event
    host_ns: float


class TraceClock:
    """Makes marks, and tells when they were.

    A device's time is counted from an event whose time on the host is known: recorded and waited
    for when a recording begins. At its end there is another; by how much the two clocks have come
    apart between them is taken off in proportion (:meth:`corrected`).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.is_device = device.type == "cuda"
        """Marks are on a clock of the device's own, and are to be :meth:`corrected`."""
        self._anchor: _Anchor | None = None
        self._old: _Anchor | None = None
        self._next: torch.cuda.Event | None = None
        self._began_ns = 0.0
        self._rate = 1.0

    def start(self) -> None:
        """A recording begins; waits for the device."""
        self._rate = 1.0
        if self.is_device:
            self._anchor = self._synchronized()
            self._began_ns = self._anchor.host_ns

    def stop(self) -> None:
        """The recording has ended; waits for the device."""
        if self._anchor is None:
            return
        end = self._synchronized()
        by_device = self.ns(end.event) - self._began_ns
        if by_device > 0.0:
            self._rate = (end.host_ns - self._began_ns) / by_device

    def _synchronized(self) -> _Anchor:
        """An event and when it was: the shortest of several waits tells it most exactly."""
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
        """Behind everything queued on the current stream so far; now, where there is no stream."""
        if not self.is_device:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_past(self, mark: Mark) -> bool:
        """Whether the device has come to the mark."""
        return isinstance(mark, int) or mark.query()

    def ns(self, mark: Mark) -> float:
        """When a mark was that is past; a device's as the anchor says, not corrected yet."""
        if isinstance(mark, int):
            return mark
        assert self._anchor is not None
        return self._anchor.host_ns + self._anchor.event.elapsed_time(mark) * 1e6

    def corrected(self, ns: float) -> float:
        """A time of :meth:`ns` or of the update worker's copies, after :meth:`stop`."""
        return self._began_ns + (ns - self._began_ns) * self._rate if self.is_device else ns

    # -- the anchor ------------------------------------------------------------------------------

    @property
    def anchor(self) -> tuple[int, int]:
        """The event that times are counted from (its handle; 0 on a host), and when, in ns."""
        if self._anchor is None:
            return 0, 0
        return int(self._anchor.event.cuda_event), round(self._anchor.host_ns)

    def advance(self) -> bool:
        """Between two steps of a long recording: from time to time a newer anchor, without a wait.

        Returns:
            Whether there is one. The old one lives until the next call that gives one.
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
