"""Layer storage: owns a layer's training copy. Here: resident, the whole copy on the device.

The update pipeline sees only where the copy of a chunk goes (:meth:`ResidentStorage.address`) and
which tensors to gather; :mod:`~hytrain.model.sharded_storage` offers the same.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch

from hytrain.model.layout import LayerLayout, ParameterSlot


class ResidentStorage:
    """A layer's training copy as one flat device tensor a dtype; parameters are views of it."""

    is_sharded = False
    on_host = False

    def __init__(self, layout: LayerLayout, device: torch.device) -> None:
        """Moves the layer's parameters into flat storage and re-points their ``.data``."""
        self.layout = layout
        self.runs: list[tuple[int, int, torch.Tensor]] = []
        """(begin, end, flat tensor of end - begin elements) for each run of one dtype."""
        for dtype, begin, end in layout.dtype_runs:
            self.runs.append((begin, end, torch.zeros(end - begin, dtype=dtype, device=device)))
        self.moves = 0
        """How often the training copy has come to lie in other memory."""
        self._views: list[tuple[ParameterSlot, torch.Tensor, int, torch.dtype]] = []
        self._parameters: list[torch.Tensor] = [slot.parameter for slot in layout.slots]
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

    @property
    def kept(self) -> list[torch.Tensor]:
        """What this rank keeps of the training copy: all of it, one flat tensor a dtype run."""
        return [flat for _begin, _end, flat in self.runs]

    def move(self, kept: Sequence[torch.Tensor]) -> None:
        """The training copy is in other memory from now on; parameters are views of that.

        ``kept``: as :attr:`kept`, with the same elements, on any device.
        """
        self.runs = [
            (begin, end, flat) for (begin, end, _), flat in zip(self.runs, kept, strict=True)
        ]
        self.moves += 1
        self._point_here()

    def slice(self, begin: int, end: int) -> torch.Tensor:
        """The training copy of ``[begin, end)``, which must be within one dtype.

        Returns:
            A 1-D view of ``end - begin`` elements.
        """
        for run_begin, run_end, flat in self.runs:
            if run_begin <= begin and end <= run_end:
                return flat[begin - run_begin : end - run_begin]
        raise IndexError(f"[{begin}, {end}) is not within one dtype of layer {self.layout.name}")

    def shard_slices(self, begin: int, end: int) -> list[tuple[int, torch.Tensor]]:
        """(start in the flat space, view) of each dtype run's part of ``[begin, end)``."""
        return [
            (max(begin, low), flat[max(begin, low) - low : min(end, high) - low])
            for low, high, flat in self.runs
            if max(begin, low) < min(end, high)
        ]

    def address(self, begin: int, end: int) -> int:
        """Device address of the training copy of ``[begin, end)``."""
        return self.slice(begin, end).data_ptr()

    @contextmanager
    def writing(self, begin: int, end: int, master: torch.Tensor) -> Generator[torch.Tensor]:
        """Where an update on the device writes the training copy of ``[begin, end)``."""
        del master
        yield self.slice(begin, end)

    def restore_views(self) -> list[str]:
        """Makes parameters whose ``.data`` was set to other memory views again.

        Updates would not reach them. What they hold is dropped: it may be older than the copy.

        Returns:
            Their names.
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
        """Lets go of the flat tensors; they live as long as a parameter still views them."""
        self.runs = []
        self._views = []

    def mark_overwritten(self) -> None:
        """Counts an overwrite of all parameters.

        A backward through a graph that saved the old weights then raises, instead of silently
        using the new ones.
        """
        torch.autograd.graph.increment_version(self._parameters)
