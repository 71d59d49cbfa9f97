"""Copies between device and host beside the compute stream, for tensors that torch owns.

On a GPU a lane is a stream. On a CPU it is a thread, so that a use of memory before its copy is
found there, too: with ``HYTRAIN_DELAYS`` the thread sleeps before each copy.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from hytrain.errors import HyTrainError
from hytrain.testing.faults import injected_delays


class _StreamTicket:
    """A copy on its way."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        """What the compute stream runs from now on comes after the copy."""
        # Without this wait compute could read a tensor that is not back yet, or write to the memory
        # of one that has not left.
        torch.cuda.current_stream().wait_event(self.event)


class DeviceCopyStream:
    """A stream of its own: copies in the order they are given."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None) -> Ticket:
        """Copies after everything that the compute stream runs so far, and after a ticket.

        The caller keeps both tensors until it has waited for the ticket.
        """
        # Without this wait the copy could read a source that is still being computed, or write to
        # a target whose memory an earlier kernel still reads.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        if isinstance(after, _StreamTicket):
            # A copy of another stream: compute need not have waited for it.
            self._stream.wait_event(after.event)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self._stream)
        return _StreamTicket(event)

    def close(self) -> None:
        """Waits for all copies; there are no more."""
        self._stream.synchronize()  # the caller unmaps host memory next


class _ThreadTicket:
    def __init__(self, copied: Future[None]) -> None:
        self._copied = copied

    def wait(self) -> None:
        """See :meth:`_StreamTicket.wait`."""
        try:
            self._copied.result()
        except Exception as error:
            raise HyTrainError(f"a copy of an activation failed: {error}") from error


class ThreadCopyStream:
    """As :class:`DeviceCopyStream`, a thread of its own on a machine without a GPU."""

    def __init__(self) -> None:
        seed, self._most_microseconds = injected_delays()
        self._random = random.Random(seed)
        self._thread = ThreadPoolExecutor(1, "activation copies")

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None) -> Ticket:
        """See :meth:`DeviceCopyStream.copy`."""
        return _ThreadTicket(self._thread.submit(self._copy, target, source, after))

    def _copy(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None) -> None:
        if after is not None:
            after.wait()  # the other lane's thread may still be writing the source
        if self._most_microseconds:
            time.sleep(self._random.uniform(0, self._most_microseconds) / 1e6)
        with torch.no_grad():
            target.copy_(source)

    def close(self) -> None:
        """See :meth:`DeviceCopyStream.close`."""
        self._thread.shutdown()


Ticket = _StreamTicket | _ThreadTicket


def make_copy_stream(device: torch.device) -> DeviceCopyStream | ThreadCopyStream:
    """A lane of the device."""
    return DeviceCopyStream(device) if device.type == "cuda" else ThreadCopyStream()
