"""Cases of test_stream_gate.py: streams are threads here, and memory is the host's."""

from __future__ import annotations

import ctypes
import queue
import random
import threading
import time
from collections.abc import Callable
from unittest import mock

import torch.distributed as dist

from hytrain.comm import stream_gate
from hytrain.comm.stream_gate import SharedFlags, StreamGate, open_gate

COLLECTIVES = 60
SECONDS = 60.0


class HostStream:
    """Does one thing after another, in a thread."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._given = self._done = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._tasks.get()()
            self._done += 1

    def put(self, task: Callable[[], object]) -> None:
        self._given += 1
        self._tasks.put(task)

    def is_idle(self) -> bool:
        return self._done == self._given

    def wait_stream(self, other: HostStream) -> None:
        done = threading.Event()
        other.put(done.set)
        self.put(done.wait)

    def synchronize(self, seconds: float = SECONDS) -> bool:
        done = threading.Event()
        self.put(done.set)
        return done.wait(seconds)


class HostGateStream:
    """The gate's stream; ``current`` is what the caller computes on."""

    def __init__(self) -> None:
        self.stream = HostStream()
        self.current = self.stream

    def register(self, address: int, num_bytes: int) -> int:
        assert num_bytes
        return address

    def unregister(self, address: int) -> None:
        assert address
        assert self.is_idle()

    def is_idle(self) -> bool:
        return self.stream.is_idle()

    def follow(self) -> None:
        self.stream.wait_stream(self.current)

    def lead(self) -> None:
        self.current.wait_stream(self.stream)

    def set(self, address: int, value: int) -> None:
        def write() -> None:
            ctypes.c_uint32.from_address(address).value = value

        self.stream.put(write)

    def wait(self, address: int, value: int) -> None:
        def poll() -> None:
            number = ctypes.c_uint32.from_address(address)
            while (number.value - value) % (1 << 32) >= 1 << 31:
                time.sleep(1e-4)

        self.stream.put(poll)


class Bench:
    """A rank with two streams whose collectives go through one more, as NCCL's do."""

    def __init__(self, folder: str | None = None) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.gate_stream = HostGateStream()
        with mock.patch.object(stream_gate, "_MEMORY_FOLDER", folder or stream_gate._MEMORY_FOLDER):
            self.gate = open_gate(self.rank, self.size, None, lambda: self.gate_stream)
        self.streams = [HostStream(), HostStream()]
        self.kernels = HostStream()

    def close(self) -> None:
        if self.gate is not None:
            self.gate.close()


def early_starts(bench: Bench, path: str, *, gated: bool) -> int:
    """Collectives that started on this rank while another one had not come to them."""
    ready = SharedFlags(path, bench.size)
    dist.barrier()
    delays = random.Random(bench.rank)
    early: list[int] = []

    def start(number: int) -> None:
        if any(ready.get(rank) < number for rank in range(bench.size)):
            early.append(number)

    last = HostStream()
    for number in range(1, COLLECTIVES + 1):
        stream = bench.gate_stream.current = bench.streams[delays.randrange(2)]
        delay = delays.choice([0.0, 0.0, 0.004])
        stream.put(lambda delay=delay: time.sleep(delay))
        # Streams come to their collectives out of order; what is ready is ready in order.
        last.wait_stream(stream)
        last.put(lambda number=number: ready.set(bench.rank, number))
        stream.wait_stream(last)
        if gated and bench.gate is not None:
            bench.gate.arrive()
        bench.kernels.wait_stream(stream)
        bench.kernels.put(lambda number=number: start(number))
    assert bench.kernels.synchronize(), "the ranks wait for each other for ever"
    dist.barrier()
    ready.close()
    return len(early)


def nobody_starts_early(path: str) -> tuple[int, int]:
    """(with the gate, without it)."""
    bench = Bench()
    assert bench.gate is not None
    found = early_starts(bench, f"{path}-a", gated=True), early_starts(bench, path, gated=False)
    bench.close()
    return found


def numbers_may_wrap(path: str) -> int:
    bench = Bench()
    gate = bench.gate
    assert gate is not None
    gate._number = (1 << 32) - COLLECTIVES // 2
    gate._flags.set(bench.rank, gate._number)
    dist.barrier()
    found = early_starts(bench, path, gated=True)
    assert gate._number < COLLECTIVES
    bench.close()
    return found


def two_of_three_share_memory(path: str, elsewhere: str) -> tuple[list[int], int]:
    """(ranks that this one waits for, collectives of theirs that it came to too early)."""
    rank = dist.get_rank()
    bench = Bench(elsewhere if rank == 1 else None)
    others = [] if bench.gate is None else bench.gate._others
    early = early_starts(bench, path, gated=True)
    bench.close()
    return others, early


def a_rank_never_comes() -> float:
    """Seconds until this rank's stream goes on when it has been told."""
    bench = Bench()
    gate = bench.gate
    assert isinstance(gate, StreamGate)
    seconds = 0.0
    if bench.rank == 0:
        bench.gate_stream.current = bench.streams[0]
        gate.arrive()
        assert not bench.streams[0].synchronize(0.3), "nobody was waited for"
        begin = time.monotonic()
        gate.open_for_good()
        assert bench.streams[0].synchronize()
        seconds = time.monotonic() - begin
        gate.arrive()  # of no effect from now on
        assert bench.streams[0].synchronize()
    dist.barrier()
    bench.close()
    return seconds


class Pair:
    """Two ranks' gates in one process, so that a test decides which of them does what, and when."""

    def __init__(self, path: str) -> None:
        self.flags = [SharedFlags(path, 2) for _ in range(2)]
        self.gate_streams = [HostGateStream() for _ in range(2)]
        self.streams = [HostStream() for _ in range(2)]
        self.held: list[threading.Event] = []
        self.gates: list[StreamGate] = []
        for rank in range(2):
            flags, stream = self.flags[rank], self.gate_streams[rank]
            flags.set(rank, 0)
            stream.current = self.streams[rank]
            self.gates.append(StreamGate(flags, stream, flags.address, rank, [1 - rank]))

    def hold(self, rank: int) -> threading.Event:
        """A rank's stream computes until the event is set."""
        self.held.append(threading.Event())
        self.streams[rank].put(self.held[-1].wait)
        return self.held[-1]

    def is_ahead(self, rank: int) -> bool:
        """Whether a rank's flag is ahead of all that is waited for, as the other one sees it."""
        return self.flags[1 - rank].get(rank) >= 1 << 29

    def close(self) -> None:
        # All of them before any is closed: the streams' threads must have stopped reading.
        for end in self.held:
            end.set()
        for gate in self.gates:
            gate.open_for_good()
        for stream in self.streams:
            assert stream.synchronize()
        for gate in self.gates:
            gate.close()


def no_such_memory() -> bool:
    """Where one of two cannot map it, none has a gate."""
    folder = "/does/not/exist" if dist.get_rank() == 1 else None
    return Bench(folder).gate is None


def one_device_cannot(how: str) -> list[int]:
    """Ranks that this one waits for, where rank 1's device `refuses` to write or `loses` it."""

    def refuse(address: int, value: int) -> None:
        raise RuntimeError(f"{address} = {value}: not supported")

    stream = HostGateStream()
    seconds = SECONDS
    if dist.get_rank() == 1:
        stream.set = refuse if how == "refuses" else lambda address, value: None
        seconds = 0.2
    with mock.patch.object(stream_gate, "_CLOSING_SECONDS", seconds):
        gate = open_gate(dist.get_rank(), dist.get_world_size(), None, lambda: stream)
    return _closed(gate)


def one_does_not_want_to() -> list[int]:
    """Ranks that this one waits for, where rank 1 wants no gate."""
    rank = dist.get_rank()
    gate = open_gate(rank, dist.get_world_size(), None, HostGateStream, is_wanted=rank != 1)
    return _closed(gate)


def _closed(gate: StreamGate | None) -> list[int]:
    if gate is None:
        return []
    gate.close()
    return gate._others


def closed_behind_what_never_ends() -> tuple[float, bool]:
    """(seconds to close a gate whose stream stands still, whether its memory is left alone)."""
    bench = Bench()
    assert bench.gate is not None
    bench.gate_stream.current = bench.streams[0]
    bench.streams[0].put(threading.Event().wait)
    bench.gate.arrive()
    begin = time.monotonic()
    with mock.patch.object(stream_gate, "_CLOSING_SECONDS", 0.2):
        bench.gate.close()
    return time.monotonic() - begin, hasattr(bench.gate._flags, "_bytes")
