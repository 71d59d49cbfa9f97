"""One layer's trained weights on one rank: its shard, where its state is, and its update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from hytrain.model.layer_update import LayerUpdate, Placement
from hytrain.model.layout import LayerLayout
from hytrain.model.partition import sizes_within
from hytrain.model.sharded_storage import ShardedStorage
from hytrain.model.storage import ResidentStorage

StatePart = Literal["master", "exp_avg", "exp_avg_sq"]


@dataclass(slots=True)
class LayerState:
    """A layer's shard: its place, its optimizer state and, in :attr:`update`, its current step."""

    layout: LayerLayout
    storage: ResidentStorage | ShardedStorage
    begin: int
    end: int
    """This rank owns ``[begin, end)`` of the layer's flat space."""
    sizes: list[int]
    """Elements that each rank owns of the layer."""
    placement: Placement
    gradient_dtype: torch.dtype

    # State, fp32, end - begin elements each, on the host or on the device as placed.
    master: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    exp_avg: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    exp_avg_sq: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    worker_index: int = -1
    """The layer's number in the update worker."""
    state_ready: torch.cuda.Event | None = None
    """State that is moving to the device is there."""
    moving: bool = False
    """A move of the state has not been waited for; the worker may not have finished it."""

    _held_for: Callable[[], None] | None = None

    update: LayerUpdate = field(default_factory=LayerUpdate)
    """The layer's part in the current step."""

    @property
    def index(self) -> int:
        return self.layout.index

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def shard_size(self) -> int:
        return self.end - self.begin

    def set_state(self, flat: torch.Tensor) -> None:
        """Master weights and moments become thirds of one tensor.

        Args:
            flat: fp32, 1-D, 3 * shard_size elements: one block, so that it can be given back whole.
        """
        self.master, self.exp_avg, self.exp_avg_sq = flat.split(self.shard_size)

    def whole_state(self) -> torch.Tensor:
        """The one tensor that :meth:`set_state` was given."""
        assert self.is_one_block
        return self.master.as_strided((3 * self.shard_size,), (1,))

    @property
    def is_one_block(self) -> bool:
        """Whether master weights and moments are still thirds of one tensor."""
        parts = (self.master, self.exp_avg, self.exp_avg_sq)
        same = {part.untyped_storage().data_ptr() for part in parts}
        at = [part.storage_offset() for part in parts]
        return len(same) == 1 and at == [n * self.shard_size + at[0] for n in range(3)]

    def state_part(self, part: StatePart) -> torch.Tensor:
        """A third of the state, fp32, 1-D."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}[part]

    def move_state(self, part: StatePart, tensor: torch.Tensor) -> None:
        """A third of the state is in other memory from now on, with the same elements."""
        setattr(self, part, tensor)

    def hold_for(self, wait: Callable[[], None]) -> None:
        """Somebody reads the state beside training.

        Args:
            wait: returns when the state may change.
        """
        self._held_for = wait

    def before_change(self) -> None:
        """Before anything of the state is written: nobody reads it as of an earlier step."""
        wait, self._held_for = self._held_for, None
        if wait is not None:
            wait()

    @property
    def is_held(self) -> bool:
        """Whether :meth:`before_change` may have to wait."""
        return self._held_for is not None

    def sizes_within(self, low: int, high: int) -> list[int]:
        """Elements of each rank's shard that are in ``[low, high)`` of the flat space."""
        return sizes_within(self.sizes, low, high)

    def release(self) -> None:
        """Lets go of state, gradient and storage; weights that a parameter still views stay."""
        self._held_for = None
        self.update.release_gradient()
        self.master = self.exp_avg = self.exp_avg_sq = torch.empty(0)
        self.storage.release()
