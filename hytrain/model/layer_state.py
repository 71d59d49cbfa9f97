"""One layer's trained weights on one rank: its shard, where its state is, and its update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from hytrain.kernels import split_weights
from hytrain.kernels.moment_codes import part_of
from hytrain.kernels.moments import Moment
from hytrain.model.layer_update import LayerUpdate, Placement, Side
from hytrain.model.layout import LayerLayout, ParameterSlot
from hytrain.model.partition import sizes_within
from hytrain.model.sharded_storage import ShardedStorage
from hytrain.model.state_format import StateArrays, StateFormat, UpdateLaunch
from hytrain.model.storage import ResidentStorage

StatePart = Literal["master", "moments"]


class UpdatePart(NamedTuple):
    """The part of a layer that one parameter group's update on the device changes.

    Attributes:
        launch: its place in the layer's flat space, and what rounds its moments.
        begin: its first element in the shard.
        master: master weights, a view: fp32, or remainders if they are split.
        m, v: the moments, views.
    """

    launch: UpdateLaunch
    begin: int
    master: torch.Tensor
    m: Moment
    v: Moment


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

    form: StateFormat = field(default_factory=StateFormat)
    """How master weights and moments are kept."""

    # State, end - begin elements each, on the host or on the device as placed.
    master: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    exp_avg: Moment = field(default_factory=lambda: torch.empty(0))
    exp_avg_sq: Moment = field(default_factory=lambda: torch.empty(0))
    memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    """All of the state as one block, so that it can be copied and freed whole."""
    worker_index: int = -1
    """The layer's number in the update worker."""
    state_ready: torch.cuda.Event | None = None
    """Event behind the arrival of state that moves to the device."""
    moving: bool = False
    """Whether a move of the state has not been waited for: the worker may not have finished it."""
    state_moves: int = 0
    """Number of times that the state has moved to other memory."""

    _moments_memory: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    _held_for: Callable[[], None] | None = None
    holds_updates: bool = False
    """Whether :meth:`before_update` may have to wait."""
    _launches: list[UpdateLaunch] = field(default_factory=list[UpdateLaunch])
    _parts: list[UpdatePart] = field(default_factory=list[UpdatePart])

    update: LayerUpdate = field(default_factory=LayerUpdate)
    """The layer's part in the current step."""
    before_write: torch.Tensor | None = None
    """The shard's training copy as it was before others were allowed to write to it: see
    :meth:`adopt_written`."""
    index: int = field(init=False)
    """The layer's number in forward order."""

    def __post_init__(self) -> None:
        self.index = self.layout.index

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def shard_size(self) -> int:
        return self.end - self.begin

    @property
    def state_bytes(self) -> int:
        """Bytes of master weights and moments."""
        return self.form.state_bytes(self.shard_size)

    @property
    def updated_on(self) -> Side:
        """The side on which its updates are made."""
        return "cpu" if self.placement == "cpu" else "gpu"

    def bytes_at(self, placement: Placement) -> int:
        """The layer's :attr:`state_bytes` with that placement."""
        return self.form.at(placement).state_bytes(self.shard_size)

    @property
    def state(self) -> StateArrays:
        """Master weights and moments, on the host or device as placed."""
        return StateArrays(self.master, self.exp_avg, self.exp_avg_sq)

    def set_state(self, memory: torch.Tensor) -> None:
        """Makes master weights and moments parts of one tensor.

        ``memory``: uint8, 1-D, :attr:`state_bytes` long.
        """
        size = self.form.master_bytes(self.shard_size)
        self._set_parts(memory[:size], memory[size:])
        self.memory = memory

    def place(self, placement: Placement, memory: torch.Tensor) -> None:
        """Sets where the state is, and its memory: :meth:`bytes_at` of that placement."""
        self.placement, self.form = placement, self.form.at(placement)
        self.set_state(memory)

    def _set_parts(self, master: torch.Tensor, moments: torch.Tensor) -> None:
        self._moments_memory = moments
        self._parts = []  # views of it would keep the old memory
        self.state_moves += 1
        self.master, self.exp_avg, self.exp_avg_sq = self.form.arrays(master, moments)

    @property
    def is_one_block(self) -> bool:
        """Whether master weights and moments are parts of :attr:`memory`."""
        return self.memory.numel() == self.state_bytes

    def state_part(self, part: StatePart) -> torch.Tensor:
        """The memory of a part of the state, uint8, 1-D."""
        return self._moments_memory if part == "moments" else self.master.view(torch.uint8)

    def move_state(self, part: StatePart, memory: torch.Tensor) -> None:
        """Gives a part of the state other memory, which has the same bytes."""
        parts = {"master": self.state_part("master"), "moments": self.state_part("moments")}
        parts[part] = memory
        self._set_parts(parts["master"], parts["moments"])
        self.memory = torch.empty(0, dtype=torch.uint8)

    def update_parts(self) -> list[UpdatePart]:
        """The shard cut into parts that one device launch can update; kept until it moves."""
        if not self._launches:
            self._launches = self.form.update_launches(self.layout, self.begin, self.end)
        if not self._parts:
            for launch in self._launches:
                begin, end = launch.begin - self.begin, launch.end - self.begin
                m, v = (part_of(moment, begin, end) for moment in (self.exp_avg, self.exp_avg_sq))
                self._parts.append(UpdatePart(launch, begin, self.master[begin:end], m, v))
        return self._parts

    def read_master(self, begin: int, end: int) -> torch.Tensor:
        """Master weights ``[begin, end)`` of the shard, fp32, on the host or device as placed.

        Returns:
            A view; if they are split, a new tensor.
        """
        if not self.form.is_split:
            return self.master[begin:end]
        joined = torch.empty(end - begin, dtype=torch.float32, device=self.master.device)
        for start, copy in self._copies(begin, end):
            part = slice(start, start + copy.numel())
            joined[part.start - begin : part.stop - begin] = split_weights.join(
                copy, self.master[part]
            )
        return joined

    def write_master(self, begin: int, values: torch.Tensor) -> None:
        """Sets the shard's master weights from ``begin`` on; split ones with their training copy.

        ``values``: 1-D, of any floating dtype, on any device.
        """
        if not self.form.is_split:
            self.master[begin : begin + values.numel()].copy_(values)
            return
        for start, copy in self._copies(begin, begin + values.numel()):
            part = slice(start, start + copy.numel())
            own = values[part.start - begin : part.stop - begin]
            split_weights.split(own, copy, self.master[part])

    def _copies(self, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(place in the shard, training copy) of ``[begin, end)`` of the shard, by dtype runs."""
        for start, copy in self.storage.shard_slices(self.begin + begin, self.begin + end):
            yield start - self.begin, copy

    def master_from_copy(self) -> None:
        """Sets master weights to their training copy's values."""
        if self.form.is_split:
            self.master.fill_(split_weights.NO_REMAINDER)
            return
        for start, copy in self._copies(0, self.shard_size):
            self.master[start : start + copy.numel()].copy_(copy)

    def copy_from_master(self) -> None:
        """Rounds master weights to the shard's training copy; split ones have it so already."""
        if self.form.is_split:
            return
        for start, copy in self._copies(0, self.shard_size):
            self.form.round(self.master[start : start + copy.numel()], copy)

    def read_copy(self) -> torch.Tensor:
        """A copy of the shard's training copy, 1-D; of one dtype."""
        return torch.cat([copy for _, copy in self._copies(0, self.shard_size)])

    def adopt_written(self, slots: Sequence[ParameterSlot]) -> None:
        """Sets master weights to what was written into some parameters' training copy.

        An element that equals its rounded master weight was not written: that keeps its fp32 bits.
        If master weights are split, or would be with another placement, only :attr:`before_write`
        can tell; without it the master weights of all these parameters' elements become the copy's.
        """
        before = self.before_write
        for slot in slots:
            begin, end = max(slot.offset, self.begin), min(slot.offset + slot.numel, self.end)
            for start, copy in self._copies(begin - self.begin, max(begin, end) - self.begin):
                part = slice(start, start + copy.numel())
                master, written = self.master[part], copy.to(self.master.device)
                value = written.to(master.dtype)
                if self.form.is_split:
                    value = master.new_full((), split_weights.NO_REMAINDER)
                if before is None and self.form.rounds_away:
                    master.copy_(value)
                    continue
                old = master.to(copy.dtype) if before is None else before[part].to(master.device)
                bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[copy.element_size()]
                is_new = written.view(bits) != old.view(bits)
                master.copy_(torch.where(is_new, value, master))

    def hold_for(self, wait: Callable[[], None], *, updates: bool) -> None:
        """Registers a reader of the state beside training.

        Args:
            wait: returns when the state may change.
            updates: whether updates and moves wait as well; False: the update worker knows of the
                reader, and copies what it is about to change.
        """
        self._held_for = wait
        self.holds_updates = updates

    def before_update(self) -> None:
        """Calls :meth:`before_change`, before an update or a move, if these have to wait."""
        if self.holds_updates:
            self.before_change()

    def before_change(self) -> None:
        """Waits, before any state is written, until no reader needs an earlier step's."""
        self.holds_updates = False
        wait, self._held_for = self._held_for, None
        if wait is not None:
            wait()

    def sizes_within(self, low: int, high: int) -> list[int]:
        """Elements of each rank's shard that are in ``[low, high)`` of the flat space."""
        return sizes_within(self.sizes, low, high)

    def release(self) -> None:
        """Drops state, gradient and storage; weights that a parameter still views stay."""
        self._held_for = None
        self.update.release_gradient()
        self._parts = []
        self.state_moves += 1
        self.master = self.exp_avg = self.exp_avg_sq = torch.empty(0)
        self.memory = self._moments_memory = torch.empty(0, dtype=torch.uint8)
        self.storage.release()
