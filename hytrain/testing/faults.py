"""Faults and delays that tests inject through the environment. Inert where it is not set.

``HYTRAIN_DELAYS=SEED:MAX_US``: the update worker sleeps a random time before each copy and pass.
"""

from __future__ import annotations

import os

from hytrain.errors import ConfigError

DELAYS_VARIABLE = "HYTRAIN_DELAYS"


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
