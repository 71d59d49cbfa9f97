"""Copies between device and host beside the compute stream, for tensors that torch owns.

On a GPU a lane is a stream. On a CPU it is a thread, so that a use of memory before its copy is
found there, too: with ``HYTRAIN_DELAYS`` the thread sleeps before each copy.
"""

from __future__ import annotations

import random
import threading
import time
from queue import SimpleQueue
from typing import Protocol

import torch

from hytrain.errors import HyTrainError
from hytrain.testing.faults import injected_delays


class Ticket(Protocol):
    """A copy on its way."""

    def wait(self) -> None:
        """What the compute stream runs from now on comes after the copy."""
        ...


class CopyStream(Protocol):
    """Copies in the order they are given."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None) -> Ticket:
        """Copies after everything that the compute stream runs so far, and after a ticket.

        The caller keeps both tensors until it has waited for the ticket.
        """
        ...

    def close(self) -> None:
        """Waits for all copies; there are no more."""
        ...


class _StreamTicket:
    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        # Without this wait compute could read a tensor that is not back yet, or write to the memory
        # of one that has not left.
        torch.cuda.current_stream().wait_event(self.event)


class DeviceCopyStream:
    """A stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None) -> Ticket:
        """See :class:`CopyStream`."""
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
        """See :class:`CopyStream`."""
        self._stream.synchronize()  # the caller unmaps host memory next


class _ThreadTicket:
    def __init__(self) -> None:
        self.done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        self.done.wait()
        if self.error is not None:
            raise HyTrainError(f"a copy of an activation failed: {self.error}") from self.error


_Job = tuple[torch.Tensor, torch.Tensor, "Ticket | None", _ThreadTicket]


class ThreadCopyStream:
    """A thread of its own, on a machine without a GPU."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        seed, self._most_microseconds = injected_delays()
        self._random = random.Random(seed)
        self._thread = threading.Thread(target=self._run, name="activation copies", daemon=True)
        self._thread.start()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Ticket | None) -> Ticket:
        """See :class:`CopyStream`."""
        ticket = _ThreadTicket()
        self._jobs.put((target, source, after, ticket))
        return ticket

    def _run(self) -> None:
        with torch.no_grad():
            while (job := self._jobs.get()) is not None:
                self._copy(*job)
                del job  # or the tensors would live until the next copy

    def _copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: Ticket | None,
        ticket: _ThreadTicket,
    ) -> None:
        try:
            if after is not None:
                after.wait()  # the other lane's thread may still be writing the source
            if self._most_microseconds:
                time.sleep(self._random.uniform(0, self._most_microseconds) / 1e6)
            target.copy_(source)
        except BaseException as error:
            ticket.error = error  # raised by whichever thread waits: this one has no caller
        finally:
            ticket.done.set()  # also after an error, or the waiting thread would hang

    def close(self) -> None:
        """See :class:`CopyStream`."""
        # Behind all copies that are queued: the caller unmaps their memory next.
        self._jobs.put(None)
        self._thread.join()


def make_copy_stream(device: torch.device) -> CopyStream:
    """A lane of the device."""
    return DeviceCopyStream(device) if device.type == "cuda" else ThreadCopyStream()
