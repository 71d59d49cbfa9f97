"""Where the random number generators of a process are: Python's, numpy's, torch's, the device's.

Plain numbers and bytes only: any reader of the file can load them, and no class is needed for it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hytrain.comm.collectives import ShardCollectives

logger = logging.getLogger(__name__)


def random_state(device: torch.device) -> dict[str, Any]:
    """Of this process and its device; 10 KB."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (str(name), np.asarray(keys).tobytes(), position, has_gauss, gauss),
        "torch": _bytes(torch.get_rng_state()),
    }
    if device.type == "cuda":
        found["cuda"] = _bytes(torch.cuda.get_rng_state(device))
    return found


def restore_random_states(
    stored: Sequence[Mapping[str, Any]] | None,
    device: torch.device,
    collectives: ShardCollectives,
) -> None:
    """The generators of this process go on where they were; otherwise it is said.

    With another number of ranks there is no state that would be this rank's, and giving one to two
    ranks would make them draw the same numbers: generators go on from the script's own seeds.

    ``stored`` is what :func:`random_state` has returned on each rank.
    """
    if stored is None:
        logger.info("the checkpoint has no states of random number generators")
        return
    if len(stored) != collectives.world_size:
        if collectives.rank == 0:
            logger.warning(
                "the checkpoint has the random number generators of %d ranks and this job has %d: "
                "they are not restored, and dropout goes on from this script's own seeds",
                len(stored),
                collectives.world_size,
            )
        return
    mine = stored[collectives.rank]
    random.setstate(mine["python"])
    name, keys, *rest = mine["numpy"]
    np.random.set_state((name, np.frombuffer(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_tensor(mine["torch"]))
    if device.type == "cuda":
        if "cuda" in mine:
            torch.cuda.set_rng_state(_tensor(mine["cuda"]), device)
        elif collectives.rank == 0:
            logger.warning(
                "the checkpoint was saved without a GPU: the random number generators of the GPUs "
                "are not restored"
            )


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
