"""What the pipeline knows of one layer's trained weights on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from hytrain.model.layout import LayerLayout
from hytrain.model.partition import sizes_within
from hytrain.model.sharded_storage import ShardedStorage
from hytrain.model.storage import ResidentStorage
from hytrain.model.weight_reads import WatchedParameters

Placement = Literal["cpu", "gpu"]


@dataclass(slots=True)
class LayerState:
    """A layer's shard: its place, its state and where the current step has got to."""

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
    """The worker has not finished a move of the state that nobody has waited for."""

    # The current step.
    gradient: torch.Tensor | None = None
    """This rank's reduced gradient, owned here until it has left the device or been applied."""
    gradient_ready: torch.cuda.Event | None = None
    weights_ready: torch.cuda.Event | None = None
    sent: bool = False
    """The gradient of a step that is not final yet has been handed over."""
    updated_by: Placement = "cpu"
    """Who made the newest weights; differs from ``placement`` after a move, until the next step."""
    gather_due: bool = False
    """Other ranks' shards of the newest weights are still to be gathered."""

    reads: WatchedParameters | None = None
    """Told of reads while :attr:`waited` is not true; None where storage is sharded, or before."""
    _waited: bool = True

    @property
    def waited(self) -> bool:
        """The compute stream has waited for the newest weights.

        While it has not, the training copy is an old one, or being overwritten.
        """
        return self._waited

    @waited.setter
    def waited(self, value: bool) -> None:
        if value is self._waited:
            return
        self._waited = value
        if self.reads is None:
            return
        if value:
            self.reads.allow()
        else:
            self.reads.disallow_all()

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

    def sizes_within(self, low: int, high: int) -> list[int]:
        """Elements of each rank's shard that lie in ``[low, high)`` of the flat space."""
        return sizes_within(self.sizes, low, high)

    def release(self) -> None:
        """Lets go of state, gradient and storage; weights that a parameter still views stay."""
        self.gradient = None
        self.master = self.exp_avg = self.exp_avg_sq = torch.empty(0)
        self.storage.release()
