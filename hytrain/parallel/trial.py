"""Whether a model's blocks can be computed twice: tried on a step that nothing is lost by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hytrain.parallel.graph_cut import NotLayerMajor

_TOLERANCE = 1e-3
"""Of the sum of absolute values. Kernels that add up in any order stay far below it."""


class Trial:
    """Compares a step's second passes with its first ones; can undo what forward does to buffers.

    Nothing here waits for the device before :meth:`check`.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
        self._names = list(names)
        self._buffers = [list(block.buffers()) for block in blocks]
        self._blocks = list(blocks)
        self._saved = [(buffer, buffer.clone()) for buffer in model.buffers()]
        self._versions: list[int] = []
        self._first: dict[tuple[int, int], torch.Tensor] = {}
        self._differences: list[tuple[int, torch.Tensor]] = []

    def before_block(self, index: int) -> None:
        """A block is about to be computed for the first time for a micro-batch."""
        self._versions = _versions(self._buffers[index])

    def after_block(self, index: int) -> None:
        """It has been computed.

        Raises:
            NotLayerMajor: its forward has changed its buffers, and would again.
        """
        now = list(self._blocks[index].buffers())
        same = len(now) == len(self._buffers[index]) and all(
            a is b for a, b in zip(now, self._buffers[index], strict=True)
        )
        if not same or _versions(now) != self._versions:
            raise NotLayerMajor(
                f"the forward of '{self._names[index]}' changes its buffers (running statistics)"
            )

    def first_pass(self, index: int, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """What a block has returned for a micro-batch."""
        self._first[index, number] = _fingerprint(tensors)

    def second_pass(self, index: int, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """What it has returned when it was computed again."""
        before, now = self._first.pop((index, number)), _fingerprint(tensors)
        if before.shape != now.shape:
            raise NotLayerMajor(f"'{self._names[index]}' returns something else the second time")
        if before.numel():
            sums, sizes = before.unbind(1)
            difference = ((now[:, 0] - sums).abs() / (sizes + 1e-30)).max()
            self._differences.append((index, difference))

    def check(self) -> None:
        """Waits for the device.

        Raises:
            NotLayerMajor: a block has returned something else the second time.
        """
        if not self._differences:
            return
        values = torch.stack([difference for _, difference in self._differences]).tolist()
        for (index, _), value in zip(self._differences, values, strict=True):
            # No number is smaller or larger than NaN: a model that has diverged passes.
            if value > _TOLERANCE:
                raise NotLayerMajor(
                    f"'{self._names[index]}' returns something else the second time: the sum of "
                    f"its outputs differs by {value:.2g} of their size (state that a forward "
                    "changes, for example a cache)"
                )

    def undo(self) -> None:
        """Buffers are what they were before the step."""
        with torch.no_grad():
            for buffer, value in self._saved:
                buffer.copy_(value)


def _versions(buffers: Sequence[torch.Tensor]) -> list[int]:
    return [buffer._version for buffer in buffers]  # pyright: ignore[reportPrivateUsage]


def _fingerprint(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum and sum of absolute values of each tensor; [tensors, 2], fp32."""
    with torch.no_grad():
        rows = [
            torch.stack((values.sum(dtype=torch.float32), values.abs().sum(dtype=torch.float32)))
            for values in (t.float() if not t.is_floating_point() else t for t in tensors)
        ]
        return torch.stack(rows) if rows else torch.zeros(0, 2)
