"""Connections between watches, here all in one process."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hytrain.comm import peers
from hytrain.comm.peers import Address, Peers, Wire, neighbours_of

pytestmark = pytest.mark.timeout(120)


class Rank:
    """One end: a thread that makes its turns, and what it has heard."""

    def __init__(self, rank: int, world_size: int = 2, *, is_one_host: bool = True) -> None:
        self.greetings: list[dict[str, Any]] = []
        others = neighbours_of(rank, world_size)
        self.peers = Peers(rank, others, lambda: self.greetings)
        self.address = self.peers.listen(is_one_host=is_one_host)
        self.heard: list[tuple[int, dict[str, Any]]] = []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        while not self.stopped.wait(0.02):
            self.peers.turn(lambda rank, message: self.heard.append((rank, message)))

    def end(self) -> None:
        """As when its process is gone."""
        self.stopped.set()
        self.thread.join()
        self.peers.close()


def within(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture
def pair() -> Iterator[tuple[Rank, Rank]]:
    first, second = Rank(0), Rank(1)
    first.peers.know(1, second.address)
    second.peers.know(0, first.address)
    first.greetings = [{"word": "of before"}]
    assert second.peers.connect(0)
    assert within(lambda: first.peers.was_connected(1))
    yield first, second
    first.end()
    second.end()


def test_words_arrive_and_those_of_before_too(pair: tuple[Rank, Rank]) -> None:
    first, second = pair
    first.peers.send({"word": 1})
    second.peers.send({"word": 2})
    second.peers.send({"state": [7, "the gather"]}, may_drop=True)
    assert within(lambda: len(second.heard) == 2 and first.peers.state_of(1) is not None)
    assert second.heard == [(0, {"word": "of before"}), (0, {"word": 1})]
    assert first.heard == [(1, {"word": 2})]
    assert first.peers.state_of(1) == [7, "the gather"]


def test_the_last_words_arrive_after_the_end(pair: tuple[Rank, Rank]) -> None:
    first, second = pair
    for _ in range(100):  # unread at the other side
        first.peers.send({"word": "unread"})
    second.stopped.set()
    second.thread.join()
    second.peers.send({"word": "the last"})
    second.end()
    assert within(lambda: (1, {"word": "the last"}) in first.heard)


@pytest.mark.parametrize("is_one_host", [True, False])
def test_a_port_that_opens_while_all_is_closed_is_closed(
    monkeypatch: pytest.MonkeyPatch, is_one_host: bool
) -> None:
    closing = Peers(0, [1], list)
    opened: list[socket.socket] = []
    create = socket.create_server

    def close_first(*arguments: Any, **named: Any) -> socket.socket:
        closing.close()
        opened.append(create(*arguments, **named))
        return opened[-1]

    monkeypatch.setattr(socket, "create_server", close_first)
    with pytest.raises(OSError, match="closed"):
        closing.listen(is_one_host=is_one_host)
    assert [each.fileno() for each in opened] == [-1]


def test_a_process_that_is_gone_is_refused(pair: tuple[Rank, Rank]) -> None:
    first, second = pair
    assert not first.peers.is_refused(1)
    second.end()
    assert within(lambda: first.peers.is_refused(1))


def test_a_lost_connection_is_made_again(pair: tuple[Rank, Rank]) -> None:
    first, second = pair
    wire = first.peers._peers[1].wire
    assert wire is not None
    wire._connection.shutdown(socket.SHUT_RDWR)
    assert within(lambda: first.peers._peers[1].wire is not wire)
    first.peers.send({"word": "again"})
    assert within(lambda: (0, {"word": "again"}) in second.heard)
    assert not first.peers.is_refused(1)


def test_a_stopped_process_is_not_refused(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SILENT_SECONDS", 0.3)
    first, second = pair
    second.stopped.set()
    second.thread.join()
    assert within(lambda: first.peers._peers[1].is_probing)
    time.sleep(1.0)
    assert not first.peers.is_refused(1)
    assert first.peers.silent_for(1) > 0.3
    second.end()
    assert within(lambda: first.peers.is_refused(1))


def test_a_host_that_does_not_answer_is_known_for_how_long(
    pair: tuple[Rank, Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair

    def no_route(*_arguments: Any, **_keywords: Any) -> socket.socket:
        raise TimeoutError("timed out")

    with monkeypatch.context() as patch:
        patch.setattr(peers.socket, "create_connection", no_route)
        wire = first.peers._peers[1].wire
        assert wire is not None
        wire._connection.shutdown(socket.SHUT_RDWR)
        assert within(lambda: first.peers.unreachable_for(1) > 0.2)
        assert not first.peers.is_refused(1)
    assert within(lambda: first.peers.unreachable_for(1) == 0.0)
    assert second.peers.was_connected(0)


def test_strangers_are_not_listened_to(pair: tuple[Rank, Rank]) -> None:
    first, _ = pair
    for line in (
        b'{"hello": "guessed", "rank": 1, "mine": "x"}\n{"word": "false"}\n',
        b"GET / HTTP/1.1\r\n\r\n",
        b"[1, 2]\n",
        b"\xff" * 10,
    ):
        with socket.create_connection(("127.0.0.1", first.address.port)) as stranger:
            stranger.sendall(line)
            stranger.settimeout(30)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b"", "closed, with nothing said"
    assert not first.heard


def test_another_service_at_the_address_is_not_taken_for_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second = Rank(0, is_one_host=False), Rank(1)
    try:
        second.peers.know(0, Address(("127.0.0.1",), first.address.port, "an old secret"))
        assert not second.peers.connect(0)
        with socket.create_server(("127.0.0.1", 0)) as silent, monkeypatch.context() as patch:
            patch.setattr(peers, "_ANSWER_SECONDS", 0.3)
            second.peers.know(0, Address(("127.0.0.1",), silent.getsockname()[1], "s"))
            assert not second.peers.connect(0)
        second.peers.know(0, first.address)
        assert second.peers.connect(0), first.address
    finally:
        first.end()
        second.end()


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
        assert within(lambda: first.peers.is_refused(1)), "its listener is open in the child"
    finally:
        os.close(write)
        os.waitpid(child, 0)


def test_a_peer_that_does_not_read_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    wire = Wire(ours)
    begin = time.monotonic()
    for number in range(5000):
        wire.send({"state": [number, "x" * 100]}, may_drop=True)
    wire.send({"word": "kept"})
    assert time.monotonic() - begin < 30
    received = b""
    while b"kept" not in received:
        received += theirs.recv(65536)
        wire.flush()
    lines = [json.loads(line) for line in received.splitlines()]
    assert lines[-1] == {"word": "kept"}
    assert len(lines) < 5000
    wire.close()
    theirs.close()


@pytest.mark.parametrize("world_size", [2, 3, 32, 33, 64, 100])
def test_words_reach_all_when_any_two_are_gone(world_size: int) -> None:
    graph = {rank: set(neighbours_of(rank, world_size)) for rank in range(world_size)}
    assert all(rank in graph[other] for rank, others in graph.items() for other in others)
    assert max(map(len, graph.values())) <= 31
    for gone in ({0}, {0, 1}, {3 % world_size, 7 % world_size}):
        alive = set(graph) - gone
        reached, border = set[int](), {min(alive)} if alive else set[int]()
        while border:
            reached |= border
            border = {o for rank in border for o in graph[rank]} - gone - reached
        assert reached == alive
