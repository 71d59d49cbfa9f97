"""Ranks of a host wait for each other in a stream, instead of inside a collective's kernel.

NCCL's kernel waits for the other ranks while it holds multiprocessors, and what computes beside it
is slower meanwhile (up to half as fast, see experiments/unequal_gpus). A gate in front of every
collective takes that wait out of the kernel: each rank's stream notes, in memory that all of them
see, that it has come to collective number n, and goes on when all others have. The hardware that
feeds the stream does this wait, without a multiprocessor; the kernels behind it start together.

Measured on H200s, steps of unequal GPUs are 2.5 to 6 % shorter with it (experiments/unequal_gpus).
Ranks of other hosts have no such memory: for them the kernel waits as before.

A wait in a stream also holds what other streams have queued behind it, if the device has fewer
hardware queues than the process has streams. That cannot deadlock: all ranks issue their
collectives in one order, and what a collective waits for, on any stream, was queued before it. So
nothing that the first unmet collective needs can be behind its gate, or behind a later one.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_LINE = 128
"""Bytes from one rank's flag to the next: no two share what a device reads at once."""
_NUMBERS = 1 << 32
_FOR_GOOD = 1 << 30
"""Added to a number, it is ahead of any that is waited for: comparisons are cyclic."""
_BEHIND = (1 << 31) + 1
"""From here on a number is behind the first that is waited for."""
_CLOSING_SECONDS = 10.0
_AHEAD_SECONDS = 1e-3
"""How often the flags of an open gate are set ahead again."""
_MEMORY_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


class GateStream:
    """The gate's own stream: numbers go through it in order, whichever stream they come from.

    It uses the CUDA driver's stream memory operations.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._driver = ctypes.CDLL("libcuda.so.1")

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._driver, name)(*arguments)
        if result != 0:
            raise RuntimeError(f"{name} failed with CUDA error {result}")

    def register(self, address: int, num_bytes: int) -> int:
        """Makes host memory known to the device; returns its address for the device.

        Raises:
            RuntimeError: that fails.
        """
        runtime = cast(Any, torch.cuda.cudart())
        portable, mapped = 1, 2
        result = int(runtime.cudaHostRegister(address, num_bytes, portable | mapped))
        if result != 0:
            raise RuntimeError(f"cudaHostRegister failed with CUDA error {result}")
        found = ctypes.c_uint64()
        try:
            where = ctypes.byref(found), ctypes.c_void_p(address)
            self._call("cuMemHostGetDevicePointer_v2", *where, 0)
        except BaseException:
            self.unregister(address)  # memory unmapped while registered stays taken
            raise
        return found.value

    def unregister(self, address: int) -> None:
        """Undoes :meth:`register`; takes the host's address. Nothing may be queued."""
        cast(Any, torch.cuda.cudart()).cudaHostUnregister(address)

    def is_idle(self) -> bool:
        """Whether all that was queued is done."""
        return self._stream.query()

    def follow(self) -> None:
        """Makes what is queued here from now on wait for all that the current stream has queued."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def lead(self) -> None:
        """Makes what the current stream queues from now on wait for all that is queued here."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def set(self, address: int, value: int) -> None:
        """Queues the write of a 32-bit number, done after all that was queued before."""
        self._queue("cuStreamWriteValue32_v2", address, value)

    def wait(self, address: int, value: int) -> None:
        """Queues a wait until the number at ``address`` is not behind ``value`` (cyclically)."""
        self._queue("cuStreamWaitValue32_v2", address, value)  # flags 0: greater or equal, cyclic

    def _queue(self, name: str, address: int, value: int) -> None:
        self._call(
            name,
            ctypes.c_void_p(self._stream.cuda_stream),
            ctypes.c_uint64(address),
            ctypes.c_uint32(value),
            ctypes.c_uint(0),
        )


class SharedFlags:
    """One number per rank, in a file that lives in memory and that all ranks of a host map."""

    def __init__(self, path: str, num_ranks: int) -> None:
        """
        Args:
            path: the file's path; the first rank that comes makes it.
            num_ranks: number of flags.

        Raises:
            OSError: the file cannot be made or mapped.
        """
        self.num_bytes = -(-num_ranks * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, self.num_bytes)
            self._mapping = mmap.mmap(descriptor, self.num_bytes)
        finally:
            os.close(descriptor)
        self._bytes = (ctypes.c_char * self.num_bytes).from_buffer(self._mapping)
        self.address = ctypes.addressof(self._bytes)

    def _flag(self, rank: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self.address + rank * _LINE)

    def get(self, rank: int) -> int:
        """A rank's number."""
        return self._flag(rank).value

    def set(self, rank: int, value: int) -> None:
        """Sets a rank's number from the host."""
        self._flag(rank).value = value

    def close(self) -> None:
        """Unmaps the file; no address in it may be used any more."""
        del self._bytes
        self._mapping.close()


class StreamGate:
    """A gate in front of collectives; see the module's description."""

    def __init__(
        self, flags: SharedFlags, stream: GateStream, base: int, rank: int, others: list[int]
    ) -> None:
        """
        Args:
            flags: shared by the ranks below.
            stream: the gate's own.
            base: address of the flags on the device.
            others: ranks that it waits for, and that wait for this one; may be set later, before
                the first collective.
        """
        self._flags = flags
        self._stream = stream
        self._base = base
        self._rank = rank
        self.others = others
        self._number = 0
        self._is_open = False
        # An abort's thread may open the gate while another one closes it: without the lock it could
        # write to memory that is no longer mapped. No call of the device's is made under it: such a
        # one may wait for a stream that only the flags let go on.
        self._flags_lock = threading.Lock()
        self._is_closed = False
        self._keeper: threading.Thread | None = None
        self._keeper_ends = threading.Event()

    def write(self, token: int) -> None:
        """Has the stream write a number, which the other ranks will look for.

        Raises:
            RuntimeError: that fails. A driver may have the calls and refuse them, which must show
                here, not in a step.
        """
        own = self._base + self._rank * _LINE
        self._stream.set(own, token)
        self._stream.wait(own, token)
        if not _settled(self._stream) or self._flags.get(self._rank) != token:
            raise RuntimeError("the host and the device do not see what the device has written")

    def written_by(self, rank: int) -> int:
        """The number that a rank has written."""
        return self._flags.get(rank)

    def arrive(self) -> None:
        """Holds the current stream until the other ranks have come to as many collectives.

        All ranks must call it before the same collectives, from any stream: the numbers go through
        the gate's own stream, in the order of the calls.
        """
        if self._is_open:
            return
        self._number = (self._number + 1) % _NUMBERS
        # Before the number is written: otherwise the others' kernels could start, and hold
        # multiprocessors, while this rank is still computing what the collective sends.
        self._stream.follow()
        self._stream.set(self._base + self._rank * _LINE, self._number)
        for other in self.others:
            self._stream.wait(self._base + other * _LINE, self._number)
        # Without it the collective, on the current stream, would not be held by the waits above.
        self._stream.lead()

    def open_for_good(self) -> None:
        """Ends all waits for other ranks, as one has failed; may be called in any thread."""
        # Before the flags: what is issued from here on does not wait at all.
        self._is_open = True
        with self._flags_lock:
            if self._is_closed:
                return
            self._set_ahead()
            if self._keeper is None:
                keeper = threading.Thread(target=self._keep_ahead, name="hytrain-gate", daemon=True)
                # The caller goes on to abort the collectives, even if no thread can be started.
                with suppress(RuntimeError):
                    keeper.start()
                    self._keeper = keeper

    def _set_ahead(self) -> None:
        for rank in (self._rank, *self.others):
            self._flags.set(rank, (self._number + _FOR_GOOD) % _NUMBERS)

    def _keep_ahead(self) -> None:
        # Setting them ahead once is not enough. A device that comes later to a number that was
        # queued before (this rank's, another's that has not opened its gate, or that of an arrive()
        # which had found the gate closed) writes that lower number over the flag, and whoever is to
        # wait for a higher one would wait forever. Only the devices know whether more such numbers
        # are queued, and they are not asked: the call could block, with the interpreter held.
        while not self._keeper_ends.wait(_AHEAD_SECONDS):
            self._set_ahead()

    def close(self) -> None:
        """Gives the memory back. No rank is waited for any more: the others may be gone.

        May be called twice.
        """
        if self._is_closed:
            return
        self.open_for_good()
        # Behind a collective that never ends the stream may still read the flags: if they were
        # unmapped, the device would fault. Then the memory stays, and the flags are kept ahead.
        if not _settled(self._stream):
            return
        with self._flags_lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._keeper_ends.set()
        if self._keeper is not None:
            self._keeper.join()  # or it would write to memory that is no longer mapped
        # This rank's last number may have been written since: others may still wait for more.
        self._set_ahead()
        self._stream.unregister(self._flags.address)
        self._flags.close()


def _settled(stream: GateStream) -> bool:
    """Waits, 10 s at most, for all that the stream was given; returns whether it is done."""
    until = time.monotonic() + _CLOSING_SECONDS
    while not stream.is_idle():
        if time.monotonic() > until:
            return False
        time.sleep(1e-3)
    return True


def open_gate(
    rank: int,
    world_size: int,
    group: dist.ProcessGroup | None,
    make_stream: Callable[[], GateStream],
    *,
    is_wanted: bool = True,
) -> StreamGate | None:
    """Makes a gate with the ranks of this host; a collective.

    Args:
        group: the group of all ranks; each host has a gate of its own.
        make_stream: makes the gate's stream.
        is_wanted: whether this rank takes part; the others make the gate without it if not.

    Returns:
        The gate; None if this rank does not take part, or shares memory with no other.
    """
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, secrets.token_hex(16), group=group)
    # One name for all; on another host, or in a container with a /dev/shm of its own, it is
    # another file. What ranks have written there shows which of them share one.
    path = os.path.join(_MEMORY_FOLDER, f"hytrain-gate-{names[0]}")
    token = _BEHIND + secrets.randbelow(_NUMBERS - _BEHIND)
    gate = _make(path, world_size, make_stream, rank, token) if is_wanted else None
    tokens: list[int | None] = [None] * world_size
    dist.all_gather_object(tokens, None if gate is None else token, group=group)
    with suppress(OSError):
        os.unlink(path)  # after the gather above, so every rank that can has mapped it
    if gate is not None:
        gate.others = [
            other
            for other, written in enumerate(tokens)
            if other != rank and written is not None and written == gate.written_by(other)
        ]
    # A barrier: without it a rank could write its first number over a token that another has yet to
    # read. (dist.barrier might choose another device.)
    seen: list[bool] = [False] * world_size
    dist.all_gather_object(seen, True, group=group)
    if gate is None or gate.others:
        return gate
    gate.close()
    return None


def _make(
    path: str, num_ranks: int, make_stream: Callable[[], GateStream], rank: int, token: int
) -> StreamGate | None:
    """Makes a gate that waits for no rank yet and has written ``token``; None if that fails."""
    flags: SharedFlags | None = None
    gate: StreamGate | None = None
    try:
        flags = SharedFlags(path, num_ranks)
        stream = make_stream()
        base = stream.register(flags.address, flags.num_bytes)
        gate = StreamGate(flags, stream, base, rank, [])
        gate.write(token)
        return gate
    except (OSError, RuntimeError, AttributeError) as error:  # no /dev/shm, no such driver call
        logger.info("ranks wait for each other in NCCL's kernels: %s", error)
        if gate is not None:
            gate.close()
        elif flags is not None:
            flags.close()
        return None
