"""Layer storage under ZeRO-3: this rank keeps its shard, the whole layer exists while it is used.

The whole copy is one flat tensor per dtype whose *storage* gets memory when the layer is gathered
and loses it afterwards. What autograd saved of a weight, views such as a transpose included, refers
to that storage: it costs nothing while the layer is away and holds the weights again in backward.
Parameters are views of it while the layer is there. In between they are NaNs of the right shape: a
read without a gather gives NaN instead of freed memory.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from hytrain.kernels.split_weights import is_split
from hytrain.model.layout import LayerLayout, ParameterSlot
from hytrain.model.storage import LayerStorage
from hytrain.model.weight_reads import WatchedParameters


class ShardedStorage(LayerStorage):
    """A layer's training copy: a shard of it always, all of it between gather and release."""

    is_sharded = True

    def __init__(
        self,
        layout: LayerLayout,
        shard: tuple[int, int],
        device: torch.device,
        home: torch.Tensor | None = None,
    ) -> None:
        """Copies this rank's shard out of the layer's parameters, which lose their own memory.

        Args:
            shard: ``[begin, end)`` of the layer's flat space that this rank keeps.
            device: the one that computes with the layer.
            home: uint8 host memory, :func:`shard_bytes` long, for the shard; None: on the device.
        """
        super().__init__(layout)
        self.device = device
        self.begin, self.end = shard
        self.on_host = home is not None
        self.runs: list[tuple[int, int, torch.Tensor]] = []
        """(begin, end, flat tensor of end - begin elements) for each run of one dtype; without
        memory while the layer is not gathered."""
        taken = 0
        for dtype, low, high in layout.dtype_runs:
            self.runs.append((low, high, torch.empty(high - low, dtype=dtype, device=device)))
            begin = min(max(self.begin, low), high)
            length = max(begin, min(self.end, high)) - begin
            if home is None:
                part = torch.zeros(length, dtype=dtype, device=device)
            else:
                size = length * dtype.itemsize
                part = home[taken : taken + size].view(dtype).zero_()
                taken += size
            self.parts.append((begin, part))
        self.is_gathered = False
        self.reads: WatchedParameters | None = None
        """Told of reads while no module of the layer runs and it is not gathered explicitly."""
        for slot in layout.slots:
            self.take(slot, slot.parameter.data)
        self._away: dict[torch.dtype, torch.Tensor] = {
            flat.dtype: torch.full((), torch.nan, dtype=flat.dtype, device=device)
            for _low, _high, flat in self.runs
        }
        # Made while there is memory: torch refuses a view of a storage without any.
        self._views = [self.view(slot) for slot in layout.slots]
        self._num_holders = [_num_holders(flat) for _low, _high, flat in self.runs]
        """Holders of each run's storage, as long as there are no tensors of it but these."""
        self.dismiss()

    def view(self, slot: ParameterSlot) -> torch.Tensor:
        """A parameter as a view of the whole copy; this does not count as a read of it."""
        begin, end = slot.offset, slot.offset + slot.numel
        for low, high, flat in self.runs:
            if low <= begin and end <= high:
                return slot.within(flat, low)
        raise IndexError(f"[{begin}, {end}) is in no run of {self.layout.name}")

    # -- this rank's shard ---------------------------------------------------------------------

    def take(self, slot: ParameterSlot, weights: torch.Tensor) -> None:
        """Sets this rank's part of a parameter to that of ``weights``.

        ``weights``: the whole parameter, on any device and of any dtype.
        """
        low, high = max(self.begin, slot.offset), min(self.end, slot.offset + slot.numel)
        if low < high:
            flat = weights.reshape(-1)[low - slot.offset : high - slot.offset]
            with torch.no_grad():
                self.slice(low, high).copy_(flat)

    @contextmanager
    def writing(self, begin: int, end: int, master: torch.Tensor) -> Generator[torch.Tensor]:
        """Yields what an update on the device writes the training copy of ``[begin, end)`` to.

        For a shard on the host that is a tensor on the device, copied to the host afterwards, on
        the current stream.

        Args:
            begin: of a run of one dtype within this rank's shard.
            end: of the run.
            master: the run's master weights on the device, before the update. The tensor is made
                from them, so that a skipped update leaves the copy as it was; if they are split,
                from the copy, which is half of them.
        """
        home = self.slice(begin, end)
        if not self.on_host:
            yield home
            return
        if is_split(master):
            outgoing = home.to(master.device, non_blocking=True)
        else:
            outgoing = master.to(home.dtype)
        if outgoing is master:
            outgoing = master.clone()
        yield outgoing
        home.copy_(outgoing, non_blocking=True)

    # -- the whole layer -----------------------------------------------------------------------

    @property
    def gathered_bytes(self) -> int:
        """Bytes of memory that the whole copy has now."""
        return sum(flat.untyped_storage().nbytes() for _low, _high, flat in self.runs)

    def materialize(self) -> None:
        """Gives the whole copy memory from the current stream; its contents are undefined."""
        for low, high, flat in self.runs:
            flat.untyped_storage().resize_((high - low) * flat.element_size())
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for slot, view in zip(self.layout.slots, self._views, strict=True):
                slot.parameter.data = view
        self.is_gathered = True

    def dismiss(self) -> None:
        """Frees the whole copy's memory. All uses must be queued on the current stream."""
        self._point_away()
        for _low, _high, flat in self.runs:
            flat.untyped_storage().resize_(0)
        self.is_gathered = False
        if self.reads is not None:
            self.reads.disallow_all()

    def dismiss_to_holders(self) -> None:
        """Like :meth:`dismiss`, but tensors that others made of the whole copy keep their memory.

        They may be the user's, from a block that gathered: ``parameter.detach()``, and on a CPU
        its ``.cpu()``, share the memory. With DeepSpeed they keep their values.
        """
        self._point_away()
        counts = [_num_holders(flat) for _low, _high, flat in self.runs]
        if counts != self._num_holders:
            self.runs = [(low, high, torch.empty_like(flat)) for low, high, flat in self.runs]
            self._views = [self.view(slot) for slot in self.layout.slots]
        self.dismiss()

    def keep_gathered(self) -> None:
        """Copies this rank's shard from the whole copy."""
        for (low, _high, flat), (start, part) in zip(self.runs, self.parts, strict=True):
            part.copy_(flat[start - low : start - low + part.numel()])

    def _point_away(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for slot in self.layout.slots:
                parameter = slot.parameter
                parameter.data = self._away[parameter.dtype].expand(parameter.shape)

    # -- as every storage ----------------------------------------------------------------------

    def release(self) -> None:
        """Drops everything; the parameters hold no weights any more."""
        if self.is_gathered:
            self.dismiss()
        self.runs = []
        self.parts = []
        self._views = []


def _num_holders(tensor: torch.Tensor) -> int:
    """Number of tensors that share its storage, plus the handle used to ask for it."""
    storage: Any = tensor.untyped_storage()
    # torch has no public name for it; its CUDA graph trees use the same.
    return int(torch._C._storage_Use_Count(storage._cdata))  # pyright: ignore


def shard_bytes(layout: LayerLayout, shard: tuple[int, int]) -> int:
    """Bytes of the training copy of ``[begin, end)`` of a layer."""
    return sum(
        max(0, min(shard[1], high) - max(shard[0], low)) * dtype.itemsize
        for dtype, low, high in layout.dtype_runs
    )
