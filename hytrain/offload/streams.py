"""The device's streams and events, and their stand-ins on a machine without a GPU.

On a GPU every lane is a stream. On a CPU the training thread computes in line, so a "stream"
context is empty and an event is always complete when it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from typing import Any, Literal

import torch

_known_streams: dict[tuple[int, int], torch.cuda.Stream] = {}
_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0)  # pyright: ignore[reportPrivateUsage]
"""Returns the handle of a device's current stream; torch itself makes a Python object per call."""


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the same as ``torch.cuda.current_stream``, in a tenth of its host time.

    Every hook asks for it. A handle is one stream for as long as the process lives: what is cached
    is the object for a handle, not which stream is current.
    """
    index: Any = device.index  # may be None
    if index is None:
        index = torch.cuda.current_device()
    key = (index, _raw_stream(index))
    stream = _known_streams.get(key)
    if stream is None:
        stream = _known_streams[key] = torch.cuda.current_stream(index)
    return stream


def _behind(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record(stream)
    return event


class Streams:
    """Streams beside the compute stream, which is always torch's current one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            # Two copy streams: a copy to the host that waits for a gradient must not hold up the
            # weights that go to the device (and PCIe carries both directions at once).
            self.to_host = torch.cuda.Stream(device)
            self.to_device = torch.cuda.Stream(device)
            # Updates and collectives are short and hold up the next forward: they go first.
            self.update = torch.cuda.Stream(device, priority=-1)
            self.communication = torch.cuda.Stream(device, priority=-1)
            # State of streamed layers, to their updates and back: both directions at once.
            self.state_in = torch.cuda.Stream(device)
            self.state_out = torch.cuda.Stream(device)
            self._compute = current_stream(device)

    def new_event(self) -> torch.cuda.Event | None:
        """An event with a handle (torch creates it at the first record); None on a CPU."""
        if not self.is_cuda:
            return None
        event = torch.cuda.Event()
        # Without a first record torch has no CUDA event yet, and the worker would get handle 0:
        # "no event", for which it does not wait.
        event.record(current_stream(self.device))
        return event

    def record_compute(self, event: torch.cuda.Event | None) -> None:
        """Records the event on the current stream: compute, except while gradients are reduced."""
        if event is not None:
            event.record(current_stream(self.device))

    def compute_waits(self, event: torch.cuda.Event | None) -> None:
        """Makes all later work of the compute stream wait for the event."""
        if event is not None:
            current_stream(self.device).wait_event(event)

    @contextmanager
    def on_communication(self, after: torch.cuda.Event | None = None) -> Generator[None]:
        """Runs the block on the communication stream, after an event or all compute so far."""
        if not self.is_cuda:
            yield
            return
        current = current_stream(self.device)
        if current != self.communication:  # may be nested
            self._compute = current
        if after is not None:
            self.communication.wait_event(after)
        else:
            # Without this wait a collective could read a gradient that compute still writes.
            self.communication.wait_stream(current)
        with torch.cuda.stream(self.communication):
            yield

    def empty_on_communication(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocates what the communication stream will write; within :meth:`on_communication`.

        The memory is the compute stream's: the allocator keeps what a stream has freed for that
        stream alone, and shards of gradients would take the GPU's memory twice, once as what
        backward no longer needs, and once more here. The communication stream waits for whatever
        used the memory before.
        """
        if not self.is_cuda:
            return torch.empty(numel, dtype=dtype, device=self.device)
        with torch.cuda.stream(self._compute):
            tensor = torch.empty(numel, dtype=dtype, device=self.device)
        # The memory is free in compute's order only: without this wait communication could write
        # to it while a kernel that compute has queued still reads what was there.
        self.communication.wait_stream(self._compute)
        # Without this the allocator gives the memory to compute again as soon as the tensor is
        # dropped, while communication may still write to it.
        tensor.record_stream(self.communication)
        return tensor

    def compute_waits_for_communication(self) -> None:
        """Makes all later work of the compute stream wait for all communication so far."""
        if self.is_cuda:
            # Without this wait compute reads shards and weights that are still being received.
            current_stream(self.device).wait_stream(self.communication)

    @contextmanager
    def on_update(self) -> Generator[None]:
        """Runs the block on the GPU update's stream, after all compute so far."""
        if not self.is_cuda:
            yield
            return
        # Without this wait the kernels could read gradients and the clip coefficient before they
        # are there, and overwrite weights that the end of backward still reads.
        self.update.wait_stream(current_stream(self.device))
        with torch.cuda.stream(self.update):
            yield

    def record_update(self) -> torch.cuda.Event | None:
        """A new event behind all updates on the GPU so far; None on a CPU, where they are done."""
        return _behind(self.update) if self.is_cuda else None

    def record_current(self) -> torch.cuda.Event | None:
        """A new event behind all of the current stream so far; None on a CPU."""
        return _behind(current_stream(self.device)) if self.is_cuda else None

    def record_communication(self) -> torch.cuda.Event | None:
        """A new event behind all communication so far; None on a CPU, where it is done."""
        return _behind(self.communication) if self.is_cuda else None

    def now_computing(self) -> torch.cuda.Stream | None:
        """The compute stream, also within :meth:`on_communication`; None on a CPU."""
        if not self.is_cuda:
            return None
        current = current_stream(self.device)
        return self._compute if current == self.communication else current

    def update_waits(self, event: torch.cuda.Event | None) -> None:
        """Makes all later work of the GPU update's stream wait for the event."""
        if self.is_cuda and event is not None:
            self.update.wait_event(event)

    def used_on_communication(self, tensor: torch.Tensor) -> None:
        """Keeps the tensor's memory from being reused before the communication stream is done."""
        if self.is_cuda:
            # Its memory is the compute stream's: dropped, it would be written to by compute while a
            # collective still reads it.
            tensor.record_stream(self.communication)

    def used_on_update(self, tensor: torch.Tensor) -> None:
        """Keeps the tensor's memory from being reused before the GPU update is done."""
        if self.is_cuda:
            # As above: compute would write to it while the update still reads it.
            tensor.record_stream(self.update)

    def all_wait_for_compute(self) -> None:
        """Makes all later work of every other stream wait for all compute so far."""
        if self.is_cuda:
            current = current_stream(self.device)
            for stream in self._others:
                stream.wait_stream(current)

    @property
    def _others(self) -> tuple[torch.cuda.Stream, ...]:
        copies = self.to_host, self.to_device, self.state_in, self.state_out
        return (*copies, self.update, self.communication)

    @contextmanager
    def copying(
        self, way: Literal["in", "out"], after: Iterable[torch.cuda.Event | None]
    ) -> Generator[None]:
        """Runs the block on the stream that copies streamed state this way, after the events."""
        if not self.is_cuda:
            yield
            return
        stream = self.state_in if way == "in" else self.state_out
        for event in after:
            if event is not None:
                stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield

    @contextmanager
    def beside(self) -> Generator[None]:
        """Runs the block on a new stream; for a thread other than training's, which goes on."""
        if not self.is_cuda:
            yield
            return
        torch.cuda.set_device(self.device)  # each thread has its own
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            yield

    def states(self) -> list[tuple[str, str]]:
        """Each stream's name, and whether it is "idle" or "busy"; empty on a CPU."""
        if not self.is_cuda:
            return []
        streams = {
            "compute": self._compute,
            "to-host": self.to_host,
            "to-device": self.to_device,
            "update": self.update,
            "communication": self.communication,
            "state-in": self.state_in,
            "state-out": self.state_out,
        }
        return [(name, "idle" if s.query() else "busy") for name, s in streams.items()]

    def synchronize(self) -> None:
        """Waits for everything on the device."""
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def event_handle(event: torch.cuda.Event | None) -> int:
    """The raw handle for the update worker; 0 where there is none."""
    return 0 if event is None else int(event.cuda_event)
