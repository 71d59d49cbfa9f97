"""Connections between the ranks' watches: what is said there needs no store, and comes at once.

The store is gone with the process that holds it, rank 0 mostly. So each rank listens at a port of
its own, whose address and secret are on the store, and the ranks connect to each other as soon as
they have started: each to all where they are few, else each to those 1, 2, 4, 8, ... ranks away;
words are passed on. The end of a process closes its connections, and a connection to its port is
then refused: that tells a process that is gone from one that is stopped (its kernel still accepts)
and from a network that is slow (there is no answer).

Nothing depends on it: where a firewall is in the way the ranks have the store.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hytrain.comm.processes import Process

logger = logging.getLogger(__name__)

_ALL_TO_ALL = 32
"""Ranks of which each is connected to all others."""
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 5.0
_LONGEST_LINE = 1 << 20
_GREETING_SECONDS = 5.0
_LONGEST_GREETING = 1 << 10
_MOST_CALLERS = 64
"""Connections without a greeting yet: anybody makes them, and each takes a descriptor."""
_MOST_ACCEPTED = 1024
"""In a turn."""
SILENT_SECONDS = 15.0
"""Ranks send something every two seconds; after this long one is asked whether it is there."""


def neighbours_of(rank: int, world_size: int) -> list[int]:
    """The ranks that one is connected to; if one has another, that one has it, too."""
    if world_size <= _ALL_TO_ALL:
        return [other for other in range(world_size) if other != rank]
    steps = [1 << power for power in range(world_size.bit_length()) if 1 << power < world_size]
    both = {(rank + way * step) % world_size for step in steps for way in (1, -1)}
    return sorted(both - {rank})


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens.

    Attributes:
        hosts: names or numbers of its host, to be tried in turn.
        port: its port.
        secret: shown by a rank that connects; ranks learn it from the store.
    """

    hosts: tuple[str, ...]
    port: int
    secret: str

    @staticmethod
    def unpacked(packed: dict[str, Any]) -> Address:
        """From its fields, as JSON has them."""
        return Address(tuple(packed["hosts"]), int(packed["port"]), str(packed["secret"]))


class Wire:
    """A connection: lines of JSON, never waited for."""

    def __init__(self, connection: socket.socket, longest: int = _LONGEST_LINE) -> None:
        """
        Args:
            connection: from now on the wire's.
            longest: bytes of a message; may be changed later.
        """
        self.longest = longest
        connection.setblocking(False)
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        # Any thread sends: without the lock two messages could be mixed, or one sent twice. One
        # thread at a time receives.
        self._lock = threading.Lock()
        self._received = b""
        self._to_send = b""
        self._unread: list[dict[str, Any]] = []
        self.is_open = True
        self.heard_at = time.monotonic()
        _remember(connection)

    @property
    def peer(self) -> str:
        """The other side's address."""
        try:
            return str(self._connection.getpeername()[0])
        except OSError:
            return ""

    def send(self, message: dict[str, Any], *, may_drop: bool = False) -> None:
        """Sends it now, or as soon as the other side reads again.

        Args:
            message: of what JSON can write.
            may_drop: not at all, if that is not now.
        """
        with self._lock:
            if may_drop and self._to_send:
                return
            self._to_send += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what is left of earlier messages."""
        with self._lock, suppress(BlockingIOError, OSError):  # its end is seen where it is read
            while self._to_send:
                sent = self._connection.send(self._to_send)
                self._to_send = self._to_send[sent:]

    def receive(self) -> list[dict[str, Any]]:
        """What has come. Closes at the other side's end, and at what is no message."""
        while self.is_open:
            try:
                piece = self._connection.recv(min(65536, self.longest + 1))
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                piece = b""
            self._received += piece
            if not piece or len(self._received) > self.longest:
                self.is_open = False
                break
            self.heard_at = time.monotonic()
        *lines, self._received = self._received.split(b"\n")
        messages, self._unread = self._unread, []
        for line in lines:
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                self.is_open = False
                break
            if isinstance(message, dict):
                messages.append(message)
        return messages

    def first(self) -> dict[str, Any] | None:
        """The first message that has come, if one has; the others are kept for :meth:`receive`."""
        messages = self.receive()
        self._unread = messages[1:]
        return messages[0] if messages else None

    def close(self) -> None:
        """Closes it. What was sent still arrives."""
        self.is_open = False
        self._connection.close()


@dataclass(slots=True)
class _Peer:
    """Another rank, as this one knows it."""

    address: Address | None = None
    wire: Wire | None = None
    host: str | None = None
    """Where a connection has been made."""
    is_probing: bool = False
    probed_at: float = 0.0
    refused: bool = False
    unreachable_since: float | None = None
    state: Any = None
    """What it was doing when it was last heard of."""


@dataclass(slots=True)
class _Caller:
    wire: Wire
    since: float = field(default_factory=time.monotonic)


class Peers:
    """This rank's connections. :meth:`turn` is one thread's; the rest may be called by any."""

    def __init__(
        self,
        rank: int,
        neighbours: list[int],
        greeting: Callable[[], list[dict[str, Any]]],
    ) -> None:
        """
        Args:
            rank: this one.
            neighbours: ranks to be connected to.
            greeting: what a rank is told that has just been connected.
        """
        self._rank = rank
        self._greeting = greeting
        self._secret = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._peers = {other: _Peer() for other in neighbours}
        self._callers: list[_Caller] = []
        self._listener: socket.socket | None = None
        self._closed = False

    # -- beginning -----------------------------------------------------------------------------

    def listen(self, *, is_one_host: bool) -> Address:
        """Opens the port.

        Args:
            is_one_host: all ranks share a loopback interface, and only that is listened on.

        Raises:
            OSError: it cannot be opened, or everything was closed meanwhile.
        """
        hosts, listener = _open_port("127.0.0.1" if is_one_host else address_for_ranks())
        listener.setblocking(False)
        _remember(listener)
        # close() comes from another thread: one that ran before this socket was known has not
        # closed it, and nothing else would; it would listen until the end of the process.
        with self._lock:
            is_late = self._closed
            if not is_late:
                self._listener = listener
        if is_late:
            listener.close()
            raise OSError("the connections to other ranks are closed")
        return Address(hosts, int(listener.getsockname()[1]), self._secret)

    def know(self, rank: int, address: Address) -> None:
        """A neighbour's address."""
        self._peers[rank].address = address

    def connect(self, rank: int) -> bool:
        """Connects to a neighbour, whose address is known; takes seconds where that is difficult.

        Returns:
            Whether there is a connection now.
        """
        peer = self._peers[rank]
        if peer.address is None:
            return False
        for host in peer.address.hosts if peer.host is None else (peer.host,):
            try:
                connection = socket.create_connection(
                    (host, peer.address.port), timeout=_CONNECT_SECONDS
                )
            except ConnectionRefusedError:
                # Of a host that it was on, or of another one that has the same address at home.
                peer.refused = peer.host is not None
                continue
            except OSError:
                if peer.host is not None and peer.unreachable_since is None:
                    peer.unreachable_since = time.monotonic()
                continue
            peer.unreachable_since = None
            wire = Wire(connection)
            wire.send({"hello": peer.address.secret, "rank": self._rank, "mine": self._secret})
            if self._is_answered(wire, peer.host is not None):
                self._adopt(rank, wire, host)
                return True
            wire.close()
        return False

    def _is_answered(self, wire: Wire, is_known: bool) -> bool:
        """Whether the right rank has accepted; one that was there before may be stopped."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while wire.is_open and not self._closed:
            message = wire.first()
            if message is not None:
                return message.get("welcome") == self._secret
            if time.monotonic() > deadline and not is_known:
                return False
            time.sleep(0.05)
        return False

    def _adopt(self, rank: int, wire: Wire, host: str) -> None:
        # A probe's thread and the turn's may adopt for one rank at once: each must close the wire
        # that it replaces. And close() must see this wire, or it is closed here.
        with self._lock:
            peer = self._peers[rank]
            if peer.wire is not None:
                peer.wire.close()
            peer.wire, peer.host, peer.refused = wire, host, False
            peer.unreachable_since = None
            if self._closed:
                wire.close()
        for message in self._greeting():
            wire.send(message)

    # -- one turn ------------------------------------------------------------------------------

    def turn(self, hear: Callable[[int, dict[str, Any]], None]) -> None:
        """Takes what has come; asks ranks that were lost or are silent whether they are there.

        Args:
            hear: called with a rank and a message of it.
        """
        self._accept()
        now = time.monotonic()
        for rank, peer in self._peers.items():
            wire = peer.wire
            if wire is None:
                continue
            wire.flush()
            for message in wire.receive():
                if "state" in message:
                    peer.state = message["state"]
                    continue
                # What one rank says must not cost the words of another.
                with suppress(Exception):
                    hear(rank, message)
            is_silent = now - wire.heard_at > SILENT_SECONDS
            if (not wire.is_open or is_silent) and not (peer.is_probing or peer.refused):
                self._ask(rank, peer, now)

    def _ask(self, rank: int, peer: _Peer, now: float) -> None:
        if now - peer.probed_at < 1.0 or peer.address is None:
            return
        peer.probed_at, peer.is_probing = now, True

        def probe() -> None:
            try:
                self.connect(rank)
            finally:
                peer.is_probing = False

        # Not in the turn: a host that does not answer would hold up the words of all others.
        threading.Thread(target=probe, name="hytrain-probe", daemon=True).start()

    def _accept(self) -> None:
        listener = self._listener
        accepted = 0
        with suppress(OSError):  # no connection is waiting, or the listener is closed
            while listener is not None and accepted < _MOST_ACCEPTED:
                connection, _ = listener.accept()
                accepted += 1
                self._callers.append(_Caller(Wire(connection, _LONGEST_GREETING)))
                if len(self._callers) >= 2 * _MOST_CALLERS:
                    self._greet_callers()
        self._greet_callers()

    def _greet_callers(self) -> None:
        waiting: list[_Caller] = []
        for caller in self._callers:
            message = caller.wire.first()
            is_late = time.monotonic() - caller.since > _GREETING_SECONDS
            if message is None and caller.wire.is_open and not is_late:
                waiting.append(caller)
            elif message is None or not self._welcome(caller.wire, message):
                caller.wire.close()
        # A rank greets as it connects: who has waited longest is none.
        for caller in waiting[:-_MOST_CALLERS]:
            caller.wire.close()
        self._callers = waiting[-_MOST_CALLERS:]

    def _welcome(self, wire: Wire, message: dict[str, Any]) -> bool:
        rank, shown, own = message.get("rank"), message.get("hello"), message.get("mine")
        # Whatever JSON has may be there: lists, which cannot be looked up, and true, which is 1.
        if type(rank) is not int or rank not in self._peers:
            return False
        if not isinstance(shown, str) or not isinstance(own, str):
            return False
        if not secrets.compare_digest(shown.encode(errors="replace"), self._secret.encode()):
            return False
        wire.longest = _LONGEST_LINE
        wire.send({"welcome": own})
        self._adopt(rank, wire, wire.peer)
        return True

    # -- what is known -------------------------------------------------------------------------

    def send(self, message: dict[str, Any], *, may_drop: bool = False) -> None:
        """To all neighbours."""
        for peer in self._peers.values():
            if peer.wire is not None:
                peer.wire.send(message, may_drop=may_drop)

    def was_connected(self, rank: int) -> bool:
        """Whether a neighbour's words come here, or came until it was lost."""
        return rank in self._peers and self._peers[rank].wire is not None

    def is_at_address_in(self, rank: int, text: str) -> bool:
        """Whether a text has the address of a neighbour's host, in brackets as gloo writes it."""
        address = self._peers[rank].address
        return address is not None and any(f"[{host}]" in text for host in address.hosts)

    def is_refused(self, rank: int) -> bool:
        """Whether connections to a neighbour that was connected are refused now."""
        peer = self._peers.get(rank)
        if peer is None or peer.wire is None or not peer.refused:
            return False
        return not peer.wire.is_open or self.silent_for(rank) > SILENT_SECONDS

    def unreachable_for(self, rank: int) -> float:
        """Seconds for which a lost neighbour's host has not answered."""
        peer = self._peers.get(rank)
        if peer is None or peer.unreachable_since is None:
            return 0.0
        return time.monotonic() - peer.unreachable_since

    def silent_for(self, rank: int) -> float:
        """Seconds since a neighbour was heard of."""
        peer = self._peers.get(rank)
        return 0.0 if peer is None or peer.wire is None else time.monotonic() - peer.wire.heard_at

    def state_of(self, rank: int) -> Any:
        """What a neighbour did when it was last heard of; None: it was not."""
        peer = self._peers.get(rank)
        return None if peer is None else peer.state

    def close(self) -> None:
        """Closes everything."""
        with self._lock:
            self._closed = True
            wires = [peer.wire for peer in self._peers.values() if peer.wire is not None]
            listener = self._listener
        for wire in [*wires, *(caller.wire for caller in self._callers)]:
            wire.flush()
            wire.close()
        if listener is not None:
            listener.close()


def _open_port(host: str | None) -> tuple[tuple[str, ...], socket.socket]:
    """A port at that address, or at all; and the addresses to be tried by others."""
    if host is not None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with suppress(OSError):
            listener = socket.create_server((host, 0), family=family, backlog=_MOST_ACCEPTED)
            return (host,), listener
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return _addresses(), socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=_MOST_ACCEPTED, dualstack_ipv6=True
            )
    return _addresses(), socket.create_server(("", 0), backlog=_MOST_ACCEPTED)


def address_for_ranks() -> str | None:
    """Where ranks of other hosts reach this one: None where that cannot be told.

    On the interface that the process group is told to use, else where this host reaches the master.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip()
    for _, address in _interface_addresses(interface):
        return address
    with suppress(OSError, KeyError):
        found = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, type=socket.SOCK_DGRAM)
        for family, kind, protocol, _, where in found:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)  # no packet is sent
                address = str(probe.getsockname()[0])
            return None if address.startswith(_LOCAL) else address
    return None


_LOCAL = ("127.", "::1", "fe80")


def _interface_addresses(only: str | None = None) -> list[tuple[str, str]]:
    """Interfaces and their addresses that other hosts may reach, those of IPv4 first."""
    import psutil

    found: list[tuple[bool, str, str]] = []
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            is_ip6 = address.family == socket.AF_INET6
            is_other = address.address.startswith(_LOCAL) or only not in (None, interface)
            if not is_other and (is_ip6 or address.family == socket.AF_INET):
                found.append((is_ip6, interface, address.address))
    return [
        (interface, address) for _, interface, address in sorted(found, key=lambda each: each[0])
    ]


def _addresses() -> tuple[str, ...]:
    """This host's, those of the interfaces that NCCL is told to use first."""
    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "").strip()
    names = tuple(name.strip("= ") for name in chosen.split(",") if name)
    wanted = () if chosen.startswith("^") else names  # else it names those to leave out
    found = sorted(_interface_addresses(), key=lambda each: not each[0].startswith(wanted))
    return (*dict.fromkeys(address for _, address in found), "127.0.0.1")


def can_share_loopback(processes: list[Process]) -> bool:
    """Whether all of them reach each other at 127.0.0.1."""
    return len({process.network for process in processes}) == 1 and bool(processes[0].network)


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _remember(connection: socket.socket) -> None:
    _sockets.add(connection)


def _close_in_child() -> None:
    # A data loader's worker outlives its killed rank by seconds: with the connections open in it
    # the other ranks would take the rank for alive.
    for connection in list(_sockets):
        with suppress(OSError):
            connection.close()


os.register_at_fork(after_in_child=_close_in_child)
