"""Tests whether a model's blocks can be computed twice, on a step that may fail without loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hytrain.layer_major.graph_cut import NotLayerMajor
from hytrain.layer_major.thread_context import process_settings

_TOLERANCE = 1e-3
"""Largest difference, as a share of the sum of absolute values (losses: of the loss). Kernels that
add up in any order stay far below it."""


Place = tuple[dict[str, torch.Tensor | None], str]
"""A module's buffers, and the name of one of them."""


def buffers_of(model: nn.Module) -> list[Place]:
    """All buffers of a model."""
    tables: list[dict[str, torch.Tensor | None]] = [
        vars(module)["_buffers"] for module in model.modules()
    ]
    return [(table, name) for table in tables for name in table]


class SavedBuffers:
    """Some buffers' present values: a forward may write to them, or replace the buffers."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._saved = [
            (table, name, buffer, None if buffer is None else (buffer.clone(), buffer._version))
            for table, name in places
            for buffer in (table.get(name),)
        ]

    def changed(self) -> list[Place]:
        """Returns those that were written to or replaced."""
        return [
            (table, name)
            for table, name, buffer, saved in self._saved
            if table.get(name) is not buffer
            or (buffer is not None and saved is not None and buffer._version != saved[1])
        ]

    def restore(self) -> None:
        """Restores all of them."""
        with torch.no_grad():
            for table, name, buffer, saved in self._saved:
                table[name] = buffer
                if buffer is not None and saved is not None:
                    buffer.copy_(saved[0])


class Validation:
    """Compares a step's losses with those of plain forwards, and its second passes with its first.

    Nothing here waits for the device before :meth:`check`.
    """

    def __init__(self, blocks: Sequence[nn.Module], names: Sequence[str]) -> None:
        self._names = names
        self._buffers = [list(block.buffers()) for block in blocks]
        self._blocks = blocks
        self._versions: list[int] = []
        self._first: dict[tuple[int, int], torch.Tensor] = {}
        self._differences: list[tuple[int, torch.Tensor]] = []
        self._settings = process_settings()
        self.plain_losses: list[torch.Tensor] = []
        """The micro-batches' losses, computed by one forward after another."""
        self._losses: list[torch.Tensor] = []

    def at_block(self, index: int) -> None:
        """Checks a micro-batch's forward that has stopped at a block; others go on before it does.

        Raises:
            NotLayerMajor: it has changed settings of the whole process: neither the others nor the
                block's second pass would know that they are meant for this one.
        """
        now = process_settings()
        changed = [name for name, value in self._settings.items() if now[name] != value]
        if changed:
            raise NotLayerMajor(
                f"its forward changes {' and '.join(changed)} of the whole process around "
                f"'{self._names[index]}': do it outside of the model, or inside of the blocks"
            )

    def before_block(self, index: int) -> None:
        """Notes that a block is about to be computed for the first time for a micro-batch."""
        self._versions = _versions(self._buffers[index])

    def after_block(self, index: int) -> None:
        """Checks a block that has been computed.

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
        """Notes what a block has returned for a micro-batch."""
        self._first[index, number] = _fingerprint(tensors)

    def second_pass(self, index: int, number: int, tensors: Sequence[torch.Tensor]) -> None:
        """Compares with that what the block has returned when it was computed again."""
        before, now = self._first.pop((index, number)), _fingerprint(tensors)
        if before.shape != now.shape:
            raise NotLayerMajor(f"'{self._names[index]}' returns something else the second time")
        if before.numel():
            sums, sizes = before.unbind(1)
            difference = ((now[:, 0] - sums).abs() / (sizes + 1e-30)).max()
            self._differences.append((index, difference))

    def loss(self, value: torch.Tensor) -> None:
        """Notes the next micro-batch's loss."""
        self._losses.append(value.detach())

    def check(self) -> None:
        """Checks what was noted; waits for the device.

        Raises:
            NotLayerMajor: a loss differs, or a block has returned something else the second time.
        """
        found = [difference for _, difference in self._differences]
        values: list[float] = torch.stack(found).tolist() if found else []
        for (index, _), value in zip(self._differences, values, strict=True):
            # No number is smaller or larger than NaN: a model that has diverged passes.
            if value > _TOLERANCE:
                raise NotLayerMajor(
                    f"'{self._names[index]}' returns something else the second time: the sum of "
                    f"its outputs differs by {value:.2g} of their size (state that a forward "
                    "changes, for example a cache)"
                )
        for number, (plain, loss) in enumerate(zip(self.plain_losses, self._losses, strict=True)):
            if abs(float(plain) - float(loss)) > _TOLERANCE * abs(float(plain)):
                raise NotLayerMajor(
                    f"micro-batch {number} of the step has another loss when all of them go "
                    "through the layers together (a forward leaves something behind in the model, "
                    "and the next one overwrites it)"
                )


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
