"""Host memory for copies of the state: reserved once, touched beside training, kept between saves.

Memory that is written for the first time comes from the kernel page by page, at a fraction of the
rate at which it can be copied to. So it is touched before a save needs it, and stays for the next.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import torch

from hytrain import _C
from hytrain.errors import HostMemoryError
from hytrain.kernels.host_memory import host_zeros
from hytrain.kernels.moments import native_arrays
from hytrain.model.layer_state import LayerState

logger = logging.getLogger(__name__)

_TOUCHED_BYTES = 16 * 2**20
"""Between two looks at whether to go on."""


class CopyMemory:
    """Memory for one copy of each layer on the host, as far as there is room."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, _C.StateArrays]] = {}
        self._toucher: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return sum(copy.nbytes for copy, _ in list(self._copies.values()))

    def fit(self, layers: Iterable[LayerState], room: Callable[[], int]) -> None:
        """Has memory for the layers that are on the host, and for no others; touched soon.

        Nothing of what it has may be in use. ``room`` is asked where some is missing: bytes of host
        memory that may be taken.
        """
        here = {layer.index: layer for layer in layers if layer.placement == "cpu"}
        for index in self._copies.keys() - here.keys():
            del self._copies[index]
        missing = [layer for index, layer in here.items() if index not in self._copies]
        left = room() if missing else 0
        new: list[torch.Tensor] = []
        for layer in missing:
            size = layer.state_bytes
            if size > left:
                continue
            try:
                purpose = f"a copy of layer '{layer.name}' to save"
                copy = host_zeros(size, dtype=torch.uint8, purpose=purpose)
            except HostMemoryError as error:
                logger.warning("%s", error)
                break
            left -= size
            arrays = layer.form.split(copy, layer.shard_size)
            self._copies[layer.index] = copy, native_arrays(*arrays, layer.form.seed)
            new.append(copy)
        if new:
            self._touch(new)

    def of(self, layer: LayerState) -> tuple[torch.Tensor | None, _C.StateArrays | None]:
        """The layer's: uint8, 1-D, of its state's length, and as the update worker takes it.

        None where there is no room, or the layer is not on the host.
        """
        return self._copies.get(layer.index, (None, None))

    def _touch(self, new: list[torch.Tensor]) -> None:
        self._halt()

        def touch() -> None:
            for copy in new:
                for at in range(0, copy.numel(), _TOUCHED_BYTES):
                    if self._stop.is_set():
                        return
                    # What a save may have copied there meanwhile stays.
                    part = copy[at : at + _TOUCHED_BYTES]
                    _C.touch(part.data_ptr(), part.numel(), 1)

        self._toucher = threading.Thread(target=touch, name="hytrain-touch", daemon=True)
        self._toucher.start()

    def _halt(self) -> None:
        if self._toucher is not None:
            self._stop.set()
            self._toucher.join()
            self._toucher = None
            self._stop.clear()

    def wait_touched(self) -> None:
        """Until all of it is there (measurements)."""
        if self._toucher is not None:
            self._toucher.join()

    def give_back(self) -> None:
        """Gives all of it back; nothing of it may be in use. May be called twice."""
        self._halt()
        self._copies.clear()
