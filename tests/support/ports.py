"""Ports for jobs that are given one before anything listens on it."""

from __future__ import annotations

import random
import socket

_RANDOM = random.SystemRandom()  # independent of what a test seeds
_PORTS = range(20_000, 32_000)
"""None of those that the kernel assigns itself (Linux: from 32768): a connection or listener of
another test could otherwise take the port before the job does."""


def free_port() -> int:
    """Returns a port on which nothing listens."""
    while True:
        port = _RANDOM.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
