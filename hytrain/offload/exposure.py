"""How long compute stood still for updates: the part of the update that nothing hides."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

import torch

from hytrain.offload.streams import Streams, current_stream


class ExposureMeter:
    """Adds up the waits of the compute stream (on a GPU) or of the training thread (on a CPU).

    On a GPU a pair of events encloses each wait; they are read a step later, when they have long
    completed, so that measuring never waits itself.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._seconds = 0.0
        self._open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)

    @contextmanager
    def waiting(self) -> Generator[None]:
        """Encloses a wait that is counted."""
        if not self._streams.is_cuda:
            begin = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - begin
            return
        # The first event stands before the host blocks as well: a GPU that has run dry because
        # the host waits for the worker is standing still too.
        begin_event, end_event = self._event(), self._event()
        stream = current_stream(self._streams.device)
        begin_event.record(stream)
        yield
        end_event.record(stream)
        self._open.append((begin_event, end_event))

    def take(self) -> float:
        """Seconds counted since the last call, of the waits that have completed by now."""
        still_open: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        for begin_event, end_event in self._open:
            if end_event.query():
                self._seconds += begin_event.elapsed_time(end_event) / 1e3
                self._free += [begin_event, end_event]
            else:
                still_open.append((begin_event, end_event))
        self._open = still_open
        seconds, self._seconds = self._seconds, 0.0
        return seconds
