"""What a block needs to be computed again: its inputs, kept between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from hytrain.layer_major.graph_cut import NotLayerMajor


class HeldTensor(Protocol):
    """A tensor's value as it was when it was put away."""

    def check(self) -> None:
        """Whether the value can still be had.

        Raises:
            NotLayerMajor: the tensor was written to before its value was safe.
        """
        ...

    def take(self) -> torch.Tensor:
        """The value, on the device; for the current stream, and once only.

        Raises:
            NotLayerMajor: as :meth:`check`.
        """
        ...


class ActivationStore(Protocol):
    """Where the tensors between blocks wait for backward."""

    @property
    def host_bytes(self) -> int:
        """Host memory taken for them so far."""
        ...

    def begin_step(self) -> None:
        """Nothing is held: whatever a step that was given up has left is dropped."""
        ...

    def put(self, tensor: torch.Tensor, *, is_boundary: bool) -> HeldTensor:
        """Puts a tensor away.

        Args:
            tensor: an input of a block.
            is_boundary: it leads from one block to the next and to no other.
        """
        ...

    def expect(self, held: Sequence[HeldTensor]) -> None:
        """These are going to be taken soon."""
        ...

    def close(self) -> None:
        """Gives everything back."""
        ...


def check_unchanged(tensor: torch.Tensor, version: int) -> None:
    """Raises NotLayerMajor where the tensor was written to since it had that version."""
    if tensor._version != version:  # pyright: ignore[reportPrivateUsage]
        raise NotLayerMajor("a block's input is written to in place")


class Kept:
    """On the device, as it is."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version  # pyright: ignore[reportPrivateUsage]

    def check(self) -> None:
        """See :class:`HeldTensor`."""
        check_unchanged(self._tensor, self._version)

    def take(self) -> torch.Tensor:
        """See :class:`HeldTensor`."""
        self.check()
        return self._tensor


class KeptActivations:
    """Everything stays on the device."""

    @property
    def host_bytes(self) -> int:
        """None."""
        return 0

    def begin_step(self) -> None:
        """Nothing to drop: tensors go with their calls."""

    def put(self, tensor: torch.Tensor, *, is_boundary: bool) -> Kept:
        """See :class:`ActivationStore`."""
        del is_boundary
        return Kept(tensor)

    def expect(self, held: Sequence[HeldTensor]) -> None:
        """Everything is there."""

    def close(self) -> None:
        """Nothing to give back."""
