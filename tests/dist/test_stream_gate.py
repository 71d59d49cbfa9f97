"""The gate in front of collectives, by ranks whose streams are threads and run at random speeds.

On GPUs: test_two_gpus.py.
"""

from __future__ import annotations

import ctypes
import glob
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from support.engines import from_all_ranks

from hytrain.comm import stream_gate
from hytrain.comm.stream_gate import GateStream, SharedFlags, StreamGate, open_gate

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


@on_ranks(3)
def test_no_collective_starts_before_all_have_come_to_it(tmp_path: Path) -> None:
    bench = Bench()
    assert bench.gate is not None
    assert early_starts(bench, str(tmp_path / "gated"), gated=True) == 0
    free = early_starts(bench, str(tmp_path / "free"), gated=False)
    bench.close()
    assert sum(from_all_ranks(free)) > 0, "the ranks are never apart: nothing is shown"


@on_ranks(2)
def test_numbers_may_wrap(tmp_path: Path) -> None:
    bench = Bench()
    gate = bench.gate
    assert gate is not None
    gate._number = (1 << 32) - COLLECTIVES // 2
    gate._flags.set(bench.rank, gate._number)
    dist.barrier()
    assert early_starts(bench, str(tmp_path / "ready"), gated=True) == 0
    assert gate._number < COLLECTIVES
    bench.close()


@on_ranks(3)
def test_ranks_without_common_memory_do_not_wait(tmp_path: Path) -> None:
    bench = Bench(str(tmp_path) if dist.get_rank() == 1 else None)
    others = [] if bench.gate is None else bench.gate.others
    early_starts(bench, str(tmp_path / "ready"), gated=True)
    bench.close()
    assert from_all_ranks(others) == [[2], [], [0]]


@on_ranks(2)
def test_a_rank_that_failed_is_not_waited_for() -> None:
    bench = Bench()
    gate = bench.gate
    assert isinstance(gate, StreamGate)
    if bench.rank == 0:
        bench.gate_stream.current = bench.streams[0]
        gate.arrive()
        assert not bench.streams[0].synchronize(0.3), "nobody was waited for"
        gate.open_for_good()
        assert bench.streams[0].synchronize()
        gate.arrive()  # of no effect from now on
        assert bench.streams[0].synchronize()
    dist.barrier()
    bench.close()


@on_ranks(2)
def test_where_memory_cannot_be_shared_nobody_waits() -> None:
    """Where one of two cannot map it, none has a gate."""
    folder = "/does/not/exist" if dist.get_rank() == 1 else None
    assert Bench(folder).gate is None


def _refuse(address: int, value: int) -> None:
    raise RuntimeError(f"{address} = {value}: not supported")


@pytest.mark.parametrize("how", ["refuses", "loses", "wants none"])
@on_ranks(3)
def test_a_rank_that_has_no_gate_is_left_out(how: str) -> None:
    """Its device does not write, or it does not want to wait; in a step it would have raised, or
    waited for ever."""
    stream, is_odd, seconds = HostGateStream(), dist.get_rank() == 1, SECONDS
    if is_odd and how != "wants none":
        stream.set = _refuse if how == "refuses" else lambda address, value: None
        seconds = 0.2
    is_wanted = not is_odd or how != "wants none"
    with mock.patch.object(stream_gate, "_CLOSING_SECONDS", seconds):
        gate = open_gate(dist.get_rank(), 3, None, lambda: stream, is_wanted=is_wanted)
    others: list[int] = []
    if gate is not None:
        gate.close()
        others = gate.others
    assert from_all_ranks(others) == [[2], [], [0]]


@on_ranks(2)
def test_the_end_does_not_wait_for_a_collective_that_never_ends() -> None:
    bench = Bench()
    assert bench.gate is not None
    bench.gate_stream.current = bench.streams[0]
    bench.streams[0].put(threading.Event().wait)
    bench.gate.arrive()
    begin = time.monotonic()
    with mock.patch.object(stream_gate, "_CLOSING_SECONDS", 0.2):
        bench.gate.close()
    assert time.monotonic() - begin < SECONDS
    assert hasattr(bench.gate._flags, "_bytes"), "the stream may still read it"


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


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(str(tmp_path / "flags"))
    yield pair
    pair.close()


def test_a_number_that_was_queued_before_the_gate_opened_holds_nobody(pair: Pair) -> None:
    """Rank 0's device writes an old number over the flag that rank 1's host has set ahead."""
    computed = pair.hold(0)
    pair.gates[0].arrive()
    reached = pair.hold(1)
    pair.gates[1].arrive()
    pair.gates[1].arrive()  # rank 0 does not come to this one
    pair.gates[1].open_for_good()
    assert pair.is_ahead(0)
    computed.set()
    assert pair.streams[0].synchronize()  # its number is written
    reached.set()
    assert pair.streams[1].synchronize(), "rank 1 waits for a number that never comes"


def test_a_gate_that_opens_while_a_rank_arrives_holds_nobody(pair: Pair) -> None:
    """Rank 0 has seen that the gate is closed, and queues its number when it is open."""
    stream = pair.gate_streams[0]
    follow = stream.follow

    def open_before() -> None:
        pair.gates[0].open_for_good()
        for thread in threading.enumerate():
            if thread.name == "hytrain-gate":
                thread.join(0.2)  # the stream has nothing to do yet: that must not be its end
        follow()

    with mock.patch.object(stream, "follow", open_before):
        pair.gates[0].arrive()
    assert pair.streams[0].synchronize()  # its number is written
    pair.gates[1].arrive()
    pair.gates[1].arrive()  # rank 0 does not come to this one
    assert pair.streams[1].synchronize(), "rank 1 waits for a number that never comes"


def test_the_end_of_a_rank_leaves_its_flag_ahead(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own device's last number is written while the gate is being closed."""
    monkeypatch.setattr(stream_gate, "_AHEAD_SECONDS", 30.0)  # nothing else sets it ahead again
    computed = pair.hold(0)
    pair.gates[0].arrive()
    stream = pair.gate_streams[0]
    is_idle = stream.is_idle

    def write_then_look() -> bool:
        computed.set()
        assert pair.streams[0].synchronize()
        return is_idle()

    with mock.patch.object(stream, "is_idle", write_then_look):
        pair.gates[0].close()
    assert pair.is_ahead(0)


def test_an_abort_that_comes_late_touches_no_memory_that_was_given_back(pair: Pair) -> None:
    pair.gates[0].open_for_good()
    pair.gates[0].close()
    with mock.patch.object(SharedFlags, "set") as written:
        pair.gates[0].open_for_good()
    written.assert_not_called()
    assert "hytrain-gate" not in [thread.name for thread in threading.enumerate()]


def test_no_file_is_left() -> None:
    assert not glob.glob("/dev/shm/hytrain-gate-*")


def test_memory_without_an_address_for_the_device_is_unregistered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What made it unmaps it next; the driver would keep the pages, and refuse the next ones."""
    registered: set[int] = set()

    def register(address: int, _num_bytes: int, _flags: int) -> int:
        registered.add(address)
        return 0

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=registered.remove)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    stream = GateStream.__new__(GateStream)  # no device is needed
    stream._driver = SimpleNamespace(cuMemHostGetDevicePointer_v2=lambda *_: 801)  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match=r"cuMemHostGetDevicePointer_v2 failed .* 801"):
        stream.register(4096, 4096)
    assert registered == set()
