"""Connections between the watches of several hosts, which tell whether a process is there.

The store says nothing about a process on another host. So the ranks form a ring: each connects to
the next and to the previous one, and holds the connection. One that closes is made again. If that
is refused, the process is gone: the kernel still accepts for a process that is stopped, and a host
that is down, or whose network is, does not answer.

If all ranks are on one host, none of this is needed. Otherwise each listens at one address. A
caller has a few seconds to show the secret that only ranks have; nothing else is ever read, and few
may wait at a time.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

GREETING_SECONDS = 5.0
REDIAL_SECONDS = 1.0
_CONNECT_SECONDS = 0.2
"""How long the watch waits for a connection: once a second if a host does not answer."""
_MOST_CALLERS = 8
"""Connections that have not shown the secret yet, at most: any process can open one."""
_MOST_ACCEPTED = 64
"""Connections accepted in a turn, at most."""
_KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 17_000}
"""The kernels probe each other: that of a stopped process answers, a host that is down does not."""
_LOCAL = ("127.", "::1", "fe80")


def neighbours_of(rank: int, world_size: int) -> set[int]:
    """The (at most two) ranks that a rank is connected to; they are connected to it, too."""
    return {(rank + 1) % world_size, (rank - 1) % world_size} - {rank}


def address_for_ranks() -> str | None:
    """Returns the address at which ranks of other hosts reach this one; None: there is none.

    It is that of the interface that the process group is told to use, else of the one by which this
    host reaches the master, else of its default route.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        interface = os.environ.get(variable, "").partition(",")[0].strip("= ")
        if interface and not interface.startswith("^"):  # "^": it names those to leave out
            return _address_of(interface)
    for host in (os.environ.get("MASTER_ADDR", ""), "192.0.2.1"):  # example address of RFC 5737
        with suppress(OSError):
            family, kind, _, _, where = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # no packet is sent
                address = str(probe.getsockname()[0])
            if not address.startswith(_LOCAL):
                return address
    return None


def _address_of(interface: str) -> str | None:
    import psutil

    found = [
        (name != interface, each.family == socket.AF_INET6, each.address)
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if name.startswith(interface) and each.family in (socket.AF_INET, socket.AF_INET6)
    ]
    usable = sorted(each for each in found if not each[-1].startswith(_LOCAL))
    return usable[0][-1] if usable else None


@dataclass(frozen=True, slots=True)
class Address:
    """Where a rank listens.

    Attributes:
        host: the IPv4 or IPv6 address.
        secret: shown by a rank that connects.
        answer: shown to it. The ranks tell each other both by a collective.
    """

    host: str
    port: int
    secret: str
    answer: str


class Listener:
    """The port at which this rank listens."""

    def __init__(self, host: str) -> None:
        """
        Args:
            host: the only address to listen at.

        Raises:
            OSError: it cannot listen there.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = _own(socket.create_server((host, 0), family=family))
        port = int(self._socket.getsockname()[1])
        self.address = Address(host, port, secrets.token_hex(16), secrets.token_hex(16))
        self._callers: list[tuple[socket.socket, float]] = []
        self._ranks: list[socket.socket] = []

    def turn(self) -> None:
        """Accepts connections; closes those that are not, or no longer, a rank's."""
        with suppress(OSError):  # no connection is waiting
            for _ in range(_MOST_ACCEPTED):
                self._callers.append((_own(self._socket.accept()[0]), time.monotonic()))
                self._greet()
        self._greet()
        for connection in list(self._ranks):
            if _received(connection) is not None:  # its end: a rank says nothing more
                self._ranks.remove(connection)
                connection.close()

    def _greet(self) -> None:
        waiting: list[tuple[socket.socket, float]] = []
        for caller, since in self._callers:
            shown = _received(caller)
            if shown is None and time.monotonic() - since < GREETING_SECONDS:
                waiting.append((caller, since))
            elif secrets.compare_digest(shown or b"", self.address.secret.encode()):
                with suppress(OSError):
                    caller.send(self.address.answer.encode())
                self._ranks.append(caller)
            else:
                caller.close()
        # A rank shows the secret as it connects: a caller that has waited longest is no rank.
        for caller, _ in waiting[:-_MOST_CALLERS]:
            caller.close()
        self._callers = waiting[-_MOST_CALLERS:]

    def close(self) -> None:
        """Closes the port and all connections."""
        for each in [self._socket, *self._ranks, *(caller for caller, _ in self._callers)]:
            each.close()


class Link:
    """This rank's connection to another one, made again when it is lost."""

    def __init__(self, other: Address) -> None:
        self._other = other
        self._connection: socket.socket | None = None
        self._dialled_at = -REDIAL_SECONDS
        self.has_answered = False
        """Whether the other rank has ever answered."""
        self.is_refused = False
        """Whether the process was there, and nothing listens at its port any more."""
        self.unreachable_since: float | None = None

    def turn(self) -> None:
        """Connects if necessary, and finds out what has become of the connection."""
        if self._connection is None and not self.is_refused:
            self._dial()
        shown = None if self._connection is None else _received(self._connection)
        if shown == self._other.answer.encode():  # else the port is another service's
            self.has_answered = True
        elif shown is not None:
            self.close()

    def _dial(self) -> None:
        now = time.monotonic()
        if now - self._dialled_at < REDIAL_SECONDS:
            return
        self._dialled_at = now
        try:
            where = (self._other.host, self._other.port)
            connection = _own(socket.create_connection(where, timeout=_CONNECT_SECONDS))
        except ConnectionRefusedError:
            # For a rank that has never answered, a firewall may refuse.
            self.is_refused = self.has_answered
        except OSError:
            self.unreachable_since = self.unreachable_since or now
        else:
            self._connection, self.unreachable_since = connection, None
            with suppress(OSError, AttributeError):  # not on every system
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _KEEP_ALIVE.items():
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            with suppress(OSError):
                connection.send(self._other.secret.encode())

    def close(self) -> None:
        """Closes the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class Peers:
    """This rank's connections; used by the watch's thread only."""

    def __init__(self, rank: int, listener: Listener, addresses: Sequence[Address | None]) -> None:
        """``listener``: this rank's port, closed by this object. ``addresses``: those of all ranks;
        None for a rank that could not listen.
        """
        self._listener = listener
        self._addresses = addresses
        self._neighbours = neighbours_of(rank, len(addresses))
        where = {other: addresses[other] for other in self._neighbours}
        self._links = {other: Link(address) for other, address in where.items() if address}

    def turn(self) -> None:
        """Serves the port and the connections; called twice a second."""
        for each in (self._listener, *self._links.values()):
            each.turn()

    def refused(self) -> list[int]:
        """Neighbours whose processes are gone."""
        return [rank for rank, link in self._links.items() if link.is_refused]

    def unreachable(self) -> dict[int, float]:
        """Seconds for which hosts have not answered, of neighbours that have answered before."""
        now = time.monotonic()
        return {
            rank: now - link.unreachable_since
            for rank, link in self._links.items()
            if link.has_answered and link.unreachable_since is not None
        }

    def unheard(self) -> set[int]:
        """Neighbours that have never answered."""
        return self._neighbours - {rank for rank, link in self._links.items() if link.has_answered}

    def ranks_at(self, text: str) -> set[int]:
        """Ranks whose address is in a text, in brackets as gloo writes it."""
        return {r for r, where in enumerate(self._addresses) if where and f"[{where.host}]" in text}

    def close(self) -> None:
        """Closes the port and all connections."""
        for each in (self._listener, *self._links.values()):
            each.close()


def _received(connection: socket.socket) -> bytes | None:
    """Returns what has come, at most 64 bytes; b"": the connection's end; None: nothing yet."""
    try:
        return connection.recv(64)
    except (BlockingIOError, InterruptedError):
        return None
    except OSError:
        return b""


_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _own(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    _sockets.add(connection)
    return connection


def _close_in_child() -> None:
    # A data loader's worker outlives its killed rank by seconds: if it held the connections open,
    # the other ranks would take the rank for alive.
    for connection in list(_sockets):
        with suppress(OSError):
            connection.close()


os.register_at_fork(after_in_child=_close_in_child)
