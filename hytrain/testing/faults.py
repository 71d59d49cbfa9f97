"""Faults and delays that tests inject through environment variables. Inert if these are not set.

``HYTRAIN_DELAYS=SEED:MAX_US``: the update worker sleeps a random time before each copy and pass,
and so do saves and the watch of other ranks before each of their points.
``HYTRAIN_KILL=POINT[:N[:RANK]]``: the process is killed when it has come to a named point N times
(default: 1), on that rank of the job only (default: on all).
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

from hytrain.errors import ConfigError

DELAYS_VARIABLE = "HYTRAIN_DELAYS"
KILL_VARIABLE = "HYTRAIN_KILL"

_seen: Counter[str] = Counter()
_random: random.Random | None = None


def point(name: str) -> None:
    """A place where tests delay or kill the process; does nothing otherwise.

    Raises:
        ConfigError: a variable is malformed.
    """
    if DELAYS_VARIABLE in os.environ:
        _sleep()
    if KILL_VARIABLE not in os.environ:
        return
    wanted, _, rest = os.environ[KILL_VARIABLE].partition(":")
    count, _, rank = rest.partition(":")
    if wanted != name or (rank and rank != os.environ.get("RANK")):
        return
    _seen[name] += 1
    if _seen[name] == int(count or 1):
        os.kill(os.getpid(), signal.SIGKILL)


def _sleep() -> None:
    global _random
    seed, limit = injected_delays()
    if _random is None:
        _random = random.Random(seed)
    time.sleep(_random.random() * limit / 1e6)


def injected_delays() -> tuple[int, int]:
    """(seed, most microseconds) of the injected delays; (0, 0) for none.

    Raises:
        ConfigError: the variable is malformed.
    """
    text = os.environ.get(DELAYS_VARIABLE, "")
    if not text:
        return 0, 0
    seed, separator, limit = text.partition(":")
    if not (separator and seed.isdigit() and limit.isdigit()):
        raise ConfigError(
            f'{DELAYS_VARIABLE} is "{text}": write SEED:MAX_MICROSECONDS, for example 7:500'
        )
    return int(seed), int(limit)
