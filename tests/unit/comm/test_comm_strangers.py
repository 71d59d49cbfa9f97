"""Whoever reaches a rank's port: greetings are bounded, and none costs another.

At the level of sockets: a rank is a port, and words that do or do not get through.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from test_comm_peers import Rank, within

from hytrain.comm import peers
from hytrain.comm.peers import address_for_ranks

pytestmark = pytest.mark.timeout(120)
MOST_DESCRIPTORS = 200
"""That strangers may take of a rank at a time."""


@pytest.fixture
def rank() -> Iterator[Rank]:
    """Rank 0, which waits for rank 1."""
    found = Rank(0)
    yield found
    found.end()


def stranger(rank: Rank, words: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", rank.address.port), timeout=30)
    connection.sendall(words)
    return connection


def is_closed(connection: socket.socket) -> bool:
    """The rank ends the connection and says nothing."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def others_are_heard(rank: Rank) -> None:
    """A rank that comes now is welcome, and its words arrive."""
    other = Rank(1)
    other.peers.know(0, rank.address)
    try:
        assert other.peers.connect(0)
        other.peers.send({"word": "of a rank"})
        assert within(lambda: (1, {"word": "of a rank"}) in rank.heard)
    finally:
        other.end()


def _greeting(**fields: object) -> bytes:
    return json.dumps({"hello": "x", "rank": 1, "mine": "y", **fields}).encode() + b"\n"


GREETINGS: dict[str, bytes] = {
    "another letter": _greeting(hello="é"),
    "half a letter": b'{"hello": "\\ud800", "rank": 1, "mine": "y"}\n',
    "no text": _greeting(hello=5),
    "a list for a rank": _greeting(rank=[1]),
    "an object for a rank": _greeting(rank={}),
    "true for a rank": _greeting(rank=True),
    "no rank": _greeting(rank=None),
    "a huge rank": b'{"rank": ' + b"9" * 900 + b"}\n",
    "brackets": b"[" * 900 + b"\n",
    "many brackets": b"[" * 100_000,
    "many objects": b'{"a":' * 100_000 + b"\n",
    "no line": b"x" * 5000,
    "no UTF-8": b"\xff\xfe\n",
    "empty lines": b"\n" * 100,
    "a list": b"[]\n",
}


def test_no_greeting_of_a_stranger_costs_another(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "_GREETING_SECONDS", 1.0)
    with ExitStack() as stack:
        callers = {
            name: stack.enter_context(stranger(rank, words)) for name, words in GREETINGS.items()
        }
        others_are_heard(rank)
        for name, caller in callers.items():
            assert is_closed(caller), name
    assert rank.thread.is_alive()


def test_secret_greetings_of_the_wrong_kind(rank: Rank) -> None:
    secret = rank.address.secret
    for wrong in ({"rank": [1]}, {"rank": True}, {"rank": 7}, {"rank": 1, "mine": ["y"]}):
        with stranger(rank, _greeting(hello=secret, **wrong)) as caller:
            assert is_closed(caller), wrong
    others_are_heard(rank)


def test_words_that_cannot_be_read_cost_no_other(rank: Rank) -> None:
    with stranger(rank, _greeting(hello=rank.address.secret)) as caller:
        assert json.loads(caller.recv(1000)) == {"welcome": "y"}
        assert within(lambda: rank.peers.was_connected(1))
        caller.sendall(b"[" * 100_000 + b"\n")
        assert within(lambda: not rank.peers._peers[1].wire.is_open)
    others_are_heard(rank)


def test_many_connections_take_few_descriptors(rank: Rank) -> None:
    number = 700
    with ExitStack() as stack:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(number):
            stack.enter_context(stranger(rank))
        others_are_heard(rank)  # all have been accepted before
        assert len(os.listdir("/proc/self/fd")) - before - number < MOST_DESCRIPTORS


def test_a_greeting_has_its_time(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_GREETING_SECONDS", 0.5)
    with stranger(rank) as silent, stranger(rank) as slow:
        begin = time.monotonic()
        slow.settimeout(0.1)
        ended = False
        while not ended and time.monotonic() - begin < 20.0:
            try:
                slow.sendall(b"{")
                ended = slow.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
        assert ended
        assert is_closed(silent)


@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, False),
        ({"GLOO_SOCKET_IFNAME": "nowhere0"}, False),
        ({"MASTER_ADDR": "127.0.0.1"}, False),
        ({"MASTER_ADDR": "no.such.host.invalid"}, False),
        ({}, False),
        ({"MASTER_ADDR": "own"}, True),
        ({"GLOO_SOCKET_IFNAME": "own", "MASTER_ADDR": "127.0.0.1"}, True),
    ],
    ids=str,
)
def test_where_ranks_of_several_hosts_listen(
    variables: dict[str, str], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one address, where it can be told; at all of them otherwise."""
    own = peers._interface_addresses()
    if is_told and not own:
        pytest.skip("this machine has no interface but the loopback")
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
        if name in variables:
            of_interface, address = own[0] if own else ("", "")
            value = {"own": address if name == "MASTER_ADDR" else of_interface}
            monkeypatch.setenv(name, value.get(variables[name], variables[name]))
    assert (address_for_ranks() is not None) == is_told
    several = Rank(0, is_one_host=False)
    try:
        listens_at = several.peers._listener.getsockname()[0]
        assert (listens_at in ("::", "0.0.0.0")) == (not is_told)
        other = Rank(1, is_one_host=False)
        other.peers.know(0, several.address)
        assert other.peers.connect(0)
        other.end()
    finally:
        several.end()


def test_ranks_of_one_host_listen_at_its_loopback_only(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert rank.peers._listener.getsockname()[0] == "127.0.0.1"
    assert rank.address.hosts == ("127.0.0.1",)
