"""Ports for jobs that are told one before anything listens there."""

from __future__ import annotations

import random
import socket

_RANDOM = random.SystemRandom()  # whatever a test seeds
_PORTS = range(20_000, 32_000)
"""None that the kernel gives to who asks for any (Linux: from 32768): what other tests connect or
listen to could otherwise take it before the job does."""


def free_port() -> int:
    """A port at which nothing listens."""
    while True:
        port = _RANDOM.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
        return port
