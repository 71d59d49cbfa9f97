"""DeepSpeed's arguments of ``offload_states``, as its enums or as their names."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable
from enum import Enum
from typing import Any, cast

from hytrain.errors import ConfigError, UnsupportedError, did_you_mean
from hytrain.optimizer.offloaded_states import StateKind

logger = logging.getLogger(__name__)


def kinds_to_offload(include: Container[Any] | None, device: Any) -> frozenset[StateKind] | None:
    """What is to leave the device.

    Args:
        include: names or members of an enum of such names; what cannot be walked through is asked
            for each of them. None: everything.
        device: "cpu" or "none", or a member of DeepSpeed's ``OffloadDeviceEnum``.

    Returns:
        The kinds; None where the device is "none".

    Raises:
        ConfigError: a name that is none.
        UnsupportedError: another device.
    """
    where = _name(device)
    if where not in ("cpu", "none"):
        raise UnsupportedError(
            f'offload_states(device={where!r}): states go to host memory; give "cpu"'
        )
    if isinstance(include, str):
        raise ConfigError(f"offload_states(include={include!r}): give a list, as in [{include!r}]")
    if include is None:
        kinds = frozenset(StateKind)
    elif isinstance(include, Iterable):
        kinds = frozenset(_kind(value) for value in cast("Iterable[Any]", include))
    else:
        kinds = frozenset(kind for kind in StateKind if kind.value in include)
    if where == "none":
        logger.warning('offload_states(device="none"): nothing is moved')
        return None
    return kinds


def _kind(value: Any) -> StateKind:
    name = _name(value)
    known = [kind.value for kind in StateKind]
    if name in known:
        return StateKind(name)
    raise ConfigError(
        f"offload_states(include=...) has {name!r}: {did_you_mean(name, known)}known are "
        f"{', '.join(known)}"
    )


def _name(value: Any) -> str:
    return str(value.value if isinstance(value, Enum) else value)
