"""Copies of small objects and tensors that are written later, as they are at the call."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Mapping
from typing import Any, cast

import torch

logger = logging.getLogger(__name__)

_MOST_ON_DEVICE = 64 * 2**20
"""Bytes of tensors that are copied on their device: nothing is waited for. More go to the host."""


def copy_objects(objects: Any) -> Any:
    """A copy that later changes do not reach; tensors stay on their devices.

    Raises:
        Exception: whatever the objects raise that cannot be copied.
    """
    try:
        return copy.deepcopy(objects)
    except Exception:
        # Not all that can be pickled can be copied: tensors that autograd has made, for one.
        logger.debug("copied by pickling", exc_info=True)
        return pickle.loads(pickle.dumps(objects))


def copy_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of tensors, on current streams; those that share memory share it in the copies."""
    copies: dict[int, torch.UntypedStorage] = {}
    left = _MOST_ON_DEVICE
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        handle = int(cast(Any, storage)._cdata)
        copied = copies.get(handle)
        if copied is None:
            is_waited_for = False
            if tensor.device.type != "cpu":
                left -= storage.nbytes()
                is_waited_for = left < 0
            copied = storage.cpu() if is_waited_for else storage.clone()
            copies[handle] = copied
        place = torch.empty(0, dtype=tensor.dtype, device=copied.device)
        found[name] = place.set_(copied, tensor.storage_offset(), tensor.shape, tensor.stride())
    return found
