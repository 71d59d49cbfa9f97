"""Connections between the watches of two hosts, here in one process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from hytrain.comm import peers
from hytrain.comm.peers import Link, Listener, Peers, address_for_ranks, neighbours_of

pytestmark = pytest.mark.timeout(120)
HERE = "127.0.0.1"
MOST_DESCRIPTORS = 200
"""That strangers may take of a rank at a time."""


class Rank:
    """One end: a thread that makes its turns."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.listener = Listener(HERE)
        self.peers: Peers | None = None
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)

    def meet(self, other: Rank) -> None:
        addresses = [self.listener.address, other.listener.address]
        if self.rank:
            addresses.reverse()
        self.peers = Peers(self.rank, self.listener, addresses)
        self.thread.start()

    def run(self) -> None:
        assert self.peers is not None
        while not self.stopped.wait(0.02):
            self.peers.turn()

    @property
    def link(self) -> Link:
        assert self.peers is not None
        return self.peers._links[1 - self.rank]

    def stop(self) -> None:
        self.stopped.set()
        self.thread.join()

    def end(self) -> None:
        """As when its process is gone."""
        self.stop()
        assert self.peers is not None
        self.peers.close()


def within(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Rank, Rank]]:
    monkeypatch.setattr(peers, "REDIAL_SECONDS", 0.1)
    first, second = Rank(0), Rank(1)
    first.meet(second)
    second.meet(first)
    assert within(lambda: first.link.has_answered and second.link.has_answered)
    yield first, second
    first.end()
    second.end()


def lose(rank: Rank) -> None:
    """The network breaks a connection of the rank's."""
    connection = rank.link._connection
    assert connection is not None
    connection.shutdown(socket.SHUT_RDWR)


def test_a_process_that_is_gone_is_refused(pair: tuple[Rank, Rank]) -> None:
    first, second = pair
    assert first.peers is not None
    assert first.peers.refused() == []
    second.end()
    assert within(lambda: first.peers.refused() == [1])
    assert first.peers.unreachable() == {}


def test_a_lost_connection_is_made_again_and_a_stopped_process_is_not_refused(
    pair: tuple[Rank, Rank],
) -> None:
    first, second = pair
    second.stop()
    before = first.link._connection
    lose(first)
    assert within(lambda: first.link._connection not in (None, before)), "its kernel accepts"
    time.sleep(0.5)
    assert not first.link.is_refused
    second.end()
    assert within(lambda: first.link.is_refused)


def test_a_host_that_does_not_answer_is_known_for_how_long(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = pair
    assert first.peers is not None

    def no_route(*_arguments: Any, **_keywords: Any) -> socket.socket:
        raise TimeoutError("timed out")

    with monkeypatch.context() as patch:
        patch.setattr(peers.socket, "create_connection", no_route)
        lose(first)
        assert within(lambda: first.peers.unreachable().get(1, 0.0) > 0.2)
        assert not first.link.is_refused
    assert within(lambda: first.peers.unreachable() == {})


def test_a_connection_is_asked_for_whether_its_host_is_there(pair: tuple[Rank, Rank]) -> None:
    connection = pair[0].link._connection
    assert connection is not None
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 5


def test_the_ranks_at_an_address_that_gloo_writes() -> None:
    listener = Listener(HERE)
    address = listener.address
    there = [replace(address, host=host) for host in ("10.0.0.1", "10.0.0.2", "10.0.0.2")]
    ring = Peers(0, listener, [*there, None])
    assert ring.ranks_at("Connection closed by peer [10.0.0.2]:14528") == {1, 2}
    assert ring.unheard() == {1, 3}
    ring.close()


def test_a_forked_child_keeps_no_connection_open(pair: tuple[Rank, Rank]) -> None:
    first, second = pair
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)  # outlives the rank
        os._exit(0)
    try:
        os.close(read)
        second.end()
        assert within(lambda: first.link.is_refused), "its listener is open in the child"
    finally:
        os.close(write)
        os.waitpid(child, 0)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_any_rank_that_ends_is_seen_by_a_neighbour_however_many_do(world_size: int) -> None:
    ring = {rank: neighbours_of(rank, world_size) for rank in range(world_size)}
    assert all(rank in ring[other] for rank, others in ring.items() for other in others)
    assert all(1 <= len(others) <= 2 for others in ring.values())
    for number in range(1, 2**world_size - 1):
        gone = {rank for rank in ring if number >> rank & 1}
        assert any(ring[rank] & gone for rank in ring.keys() - gone)


# -- whoever reaches a rank's port ------------------------------------------------------------


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Rank 0, which waits for rank 1."""
    found = Rank(0)
    other = Listener(HERE)
    found.meet(_at(other))
    yield found
    found.end()
    other.close()


def _at(listener: Listener) -> Rank:
    found = Rank.__new__(Rank)
    found.listener = listener
    return found


def stranger(rank: Rank, shown: bytes = b"") -> socket.socket:
    connection = socket.create_connection((HERE, rank.listener.address.port), timeout=30)
    connection.sendall(shown)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """The rank ends the connection and says nothing."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def a_rank_is_welcome(rank: Rank) -> None:
    link = Link(rank.listener.address)
    assert within(lambda: (link.turn(), link.has_answered)[1])
    link.close()


@pytest.mark.parametrize(
    "shown", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 32, b"x" * 100_000, b"\0"], ids=len
)
def test_answers_nothing_without_the_secret(rank: Rank, shown: bytes) -> None:
    with stranger(rank) as caller:
        try:
            caller.sendall(shown)
        except OSError:
            return  # closed already
        assert is_closed(caller)
    a_rank_is_welcome(rank)


def test_a_caller_has_its_time(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "GREETING_SECONDS", 0.3)
    with stranger(rank) as silent:
        assert is_closed(silent)


def test_many_connections_take_few_descriptors(rank: Rank) -> None:
    number = 700
    with ExitStack() as stack:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(number):
            stack.enter_context(stranger(rank))
        a_rank_is_welcome(rank)  # all have been accepted before
        assert len(os.listdir("/proc/self/fd")) - before - number < MOST_DESCRIPTORS


@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, False),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, False),
        ({"NCCL_SOCKET_IFNAME": "=own"}, True),
        ({"MASTER_ADDR": "own"}, True),
        ({"GLOO_SOCKET_IFNAME": "own", "MASTER_ADDR": "127.0.0.1"}, True),
    ],
    ids=str,
)
def test_where_ranks_of_several_hosts_listen(
    variables: dict[str, str], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [
        (name, each.address)
        for name, addresses in __import__("psutil").net_if_addrs().items()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    if is_told and not own:
        pytest.skip("this machine has no interface but the loopback")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
        if name in variables:
            of_interface, address = own[0] if own else ("", "")
            value = address if name == "MASTER_ADDR" else of_interface
            monkeypatch.setenv(name, variables[name].replace("own", value))
    found = address_for_ranks()
    assert found == (own[0][1] if is_told else None)
    if found is not None:
        listener = Listener(found)
        assert listener._socket.getsockname()[0] == found, "at this one only"
        listener.close()
