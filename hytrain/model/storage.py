"""Layer storage: owns a layer's training copy. Here: resident, the whole copy on the device.

:mod:`~hytrain.model.sharded_storage` is the other one.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from hytrain.model.layout import LayerLayout, ParameterSlot


class LayerStorage:
    """What this rank keeps of a layer's training copy."""

    def __init__(self, layout: LayerLayout) -> None:
        self.layout = layout
        self.parts: list[tuple[int, torch.Tensor]] = []
        """(begin in the flat space, flat tensor) of what this rank keeps of each run of one dtype;
        an empty tensor if it keeps nothing of a run."""
        self.moves = 0
        """Number of times that the tensors have moved to other memory."""
        self._parameters: list[torch.Tensor] = [slot.parameter for slot in layout.slots]

    @property
    def kept(self) -> list[torch.Tensor]:
        """The tensors of :attr:`parts`."""
        return [part for _begin, part in self.parts]

    def move(self, kept: Sequence[torch.Tensor]) -> None:
        """Replaces the memory of what this rank keeps; a sharded layer is not gathered then.

        ``kept``: like :attr:`kept`, with the same elements, on any device.
        """
        self.parts = [(begin, part) for (begin, _), part in zip(self.parts, kept, strict=True)]
        self.moves += 1

    def slice(self, begin: int, end: int) -> torch.Tensor:
        """The training copy of ``[begin, end)``, which this rank keeps, within one dtype.

        Returns:
            A 1-D view of ``end - begin`` elements, on the device or the host.
        """
        for start, part in self.parts:
            if start <= begin and end <= start + part.numel():
                return part[begin - start : end - start]
        raise IndexError(
            f"this rank keeps no [{begin}, {end}) of one dtype of layer {self.layout.name}"
        )

    def shard_slices(self, begin: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """(start in the flat space, view) of each dtype run's part of ``[begin, end)``."""
        found: list[tuple[int, torch.Tensor]] = []
        for start, part in self.parts:
            low, high = max(begin, start), min(end, start + part.numel())
            if low < high:
                found.append((low, part[low - start : high - start]))
        return found

    def address(self, begin: int, end: int) -> int:
        """Address of the training copy of ``[begin, end)``, which this rank keeps."""
        return self.slice(begin, end).data_ptr()

    def mark_overwritten(self) -> None:
        """Counts an overwrite of all parameters.

        A backward through a graph that saved the old weights then raises, instead of silently
        using the new ones.
        """
        torch.autograd.graph.increment_version(self._parameters)


class ResidentStorage(LayerStorage):
    """A layer's training copy as one flat device tensor per dtype; parameters are views of it."""

    is_sharded = False
    on_host = False

    def __init__(self, layout: LayerLayout, device: torch.device) -> None:
        """Moves the layer's parameters into flat storage and re-points their ``.data``."""
        super().__init__(layout)
        for dtype, begin, end in layout.dtype_runs:
            self.parts.append((begin, torch.zeros(end - begin, dtype=dtype, device=device)))
        self._views: list[tuple[ParameterSlot, torch.Tensor, int, torch.dtype]] = []
        with torch.no_grad():
            for slot in layout.slots:
                self._view(slot).copy_(slot.parameter.data)
        self._point_here()

    def _view(self, slot: ParameterSlot) -> torch.Tensor:
        return self.slice(slot.offset, slot.offset + slot.numel).view(slot.parameter.shape)

    def _point_here(self) -> None:
        self._views = []
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for slot in self.layout.slots:
                view = self._view(slot)
                slot.parameter.data = view
                self._views.append((slot, view, view.data_ptr(), view.dtype))

    def move(self, kept: Sequence[torch.Tensor]) -> None:
        super().move(kept)
        self._point_here()

    @contextmanager
    def writing(self, begin: int, end: int, master: torch.Tensor) -> Generator[torch.Tensor]:
        """Yields what an update on the device writes the training copy of ``[begin, end)`` to."""
        del master
        yield self.slice(begin, end)

    def restore_views(self) -> list[str]:
        """Makes parameters whose ``.data`` was set to other memory views of the copy again.

        Updates would not reach them. What they hold is dropped: it may be older than the copy.

        Returns:
            Names of these parameters.
        """
        moved: list[str] = []
        with torch._C.DisableTorchFunctionSubclass():  # pyright: ignore[reportPrivateUsage]
            for slot, view, address, dtype in self._views:
                parameter = slot.parameter
                if parameter.data_ptr() != address or parameter.dtype != dtype:
                    parameter.data = view
                    moved.append(slot.name)
        return moved

    def release(self) -> None:
        """Drops the flat tensors; they live as long as a parameter still views them."""
        self.parts = []
        self._views = []
