"""How a run keeps its layers' state ("hytrain.moments", "hytrain.master"): one block a layer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hytrain.formats.moment_kinds import (
    FP32,
    SPLIT,
    MasterName,
    MomentsName,
    master_bytes,
    state_bytes,
)
from hytrain.kernels.device_optimizer import DeviceOptimizer
from hytrain.kernels.moments import MOMENT_BLOCK, EightBit, Moment, Rounding
from hytrain.kernels.rounded_runs import RoundedRuns, Run
from hytrain.kernels.split_weights import REMAINDER, split
from hytrain.model.layer_update import Placement
from hytrain.model.layout import LayerLayout

_KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
_MOMENTS = ("exp_avg", "exp_avg_sq")


class StateArrays(NamedTuple):
    """A shard's optimizer state: master weights and Adam's two moments.

    Master weights are fp32, or remainders of split ones (int16, ``hytrain.kernels.split_weights``).
    Another optimizer's states take the moments' places; the second may be empty."""

    master: torch.Tensor
    exp_avg: Moment
    exp_avg_sq: Moment


@dataclass(frozen=True, slots=True)
class UpdateRun:
    """A part of a shard that one update can be made for.

    Attributes:
        begin: first element in the layer's flat space; a multiple of 64.
        end: behind its last element, padding included.
        group: index of its parameter group.
        rounding: what rounds its moments; None if they are fp32.
    """

    begin: int
    end: int
    group: int
    rounding: Rounding | None


@dataclass(frozen=True, slots=True)
class UpdateLaunch:
    """A part of a shard that one launch on the device updates.

    Attributes:
        begin: first element in the layer's flat space; a multiple of 64.
        end: behind its last element, padding included.
        group: index of its parameter group.
        rounding: its runs, relative to ``begin``, and what rounds their moments; None if these are
            fp32.
    """

    begin: int
    end: int
    group: int
    rounding: RoundedRuns | None


@dataclass(frozen=True, slots=True)
class StateFormat:
    """How moments and master weights are kept.

    Attributes:
        name: the moments' format, as in the configuration.
        seed: of the random bits that round them, the same on all ranks.
        master: the master weights' format.
        host_master: that of layers on the CPU, if it is another one: whole, beside split ones on
            the GPU.
        optimizer: what updates these layers, on the device wherever the state is; None: Adam.
    """

    name: MomentsName = FP32
    seed: int = 0
    master: MasterName = FP32
    host_master: MasterName | None = None
    optimizer: DeviceOptimizer | None = None

    def of(self, optimizer: DeviceOptimizer | None) -> StateFormat:
        """The format with this optimizer: unless it is Adam, no codes, and whole master weights."""
        if optimizer is None:
            return self
        return StateFormat("bf16" if self.is_rounded else FP32, self.seed, optimizer=optimizer)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the state tensors, as in checkpoints: "fp32" is the master weight."""
        return ("fp32", *(self.optimizer.states if self.optimizer else _MOMENTS))

    def at(self, placement: Placement) -> StateFormat:
        """The format of a layer with that placement."""
        if self.host_master is None:
            return self
        return replace(self, master=self.host_master if placement == "cpu" else SPLIT)

    @property
    def kind(self) -> torch.dtype:
        """The dtype that tells kernels the moments' format: uint8 is 8-bit codes."""
        return _KINDS[self.name]

    @property
    def is_rounded(self) -> bool:
        """Whether moments are rounded when they are stored."""
        return self.name != FP32

    @property
    def is_split(self) -> bool:
        """Whether master weights are the remainders of their training copy."""
        return self.master == SPLIT

    @property
    def rounds_away(self) -> bool:
        """Whether copies are rounded with ties away from zero, as those of split master weights."""
        return self.is_split or self.host_master is not None

    def master_bytes(self, numel: int) -> int:
        """Bytes of a shard's master weights."""
        return master_bytes(self.master) * numel

    def round(self, values: torch.Tensor, copy: torch.Tensor) -> None:
        """Writes values to their training copy as an update would round them."""
        if self.rounds_away:
            split(values, copy)
        else:
            copy.copy_(values)

    def state_bytes(self, numel: int) -> int:
        """Bytes of a shard's state."""
        states = None if self.optimizer is None else len(self.optimizer.states)
        return state_bytes(self.name, numel, self.master, states)

    def split(self, memory: torch.Tensor, numel: int) -> StateArrays:
        """The state of ``numel`` parameters in a block: uint8, 1-D, :meth:`state_bytes` long."""
        size = self.master_bytes(numel)
        return self.arrays(memory[:size], memory[size:])

    def arrays(self, master: torch.Tensor, moments: torch.Tensor) -> StateArrays:
        """The state of a shard as views of its memory.

        ``master``: uint8, 1-D, 4 bytes a parameter, 2 if they are split. ``moments``: uint8, 1-D,
        the rest of :meth:`state_bytes`. If moments are codes, the number of parameters is a
        multiple of 64.
        """
        numel = master.numel() // master_bytes(self.master)
        each = self.kind.itemsize * numel
        if self.optimizer is not None:
            m, v = moments[:each].view(self.kind), moments[each:].view(self.kind)
            return StateArrays(master.view(torch.float32), m, v)
        blocks = numel // MOMENT_BLOCK if self.name == "8bit" else 0
        m, v, m_exponents, v_exponents = moments.split([each, each, blocks, blocks])
        weights = master.view(REMAINDER if self.is_split else torch.float32)
        if self.name == "8bit":
            return StateArrays(weights, EightBit(m, m_exponents), EightBit(v, v_exponents))
        return StateArrays(weights, m.view(self.kind), v.view(self.kind))

    def update_launches(self, layout: LayerLayout, begin: int, end: int) -> list[UpdateLaunch]:
        """The shard ``[begin, end)`` cut into segments, each of one parameter group and dtype."""
        launches: list[UpdateLaunch] = []
        for segment in layout.segments:
            low, high = max(begin, segment.begin), min(end, segment.end)
            if low >= high:
                continue
            rounded = [
                Run(run.begin - low, run.end - low, run.rounding)
                for run in self.update_runs(layout, low, high)
                if run.rounding is not None
            ]
            rounding = RoundedRuns(rounded) if self.is_rounded else None
            launches.append(UpdateLaunch(low, high, segment.group, rounding))
        return launches

    def update_runs(self, layout: LayerLayout, begin: int, end: int) -> list[UpdateRun]:
        """The shard ``[begin, end)`` cut into runs: of a segment, or of one parameter.

        The latter if moments are rounded: that depends on the parameter. Padding goes with the
        parameter before it: its gradients, and with them its moments, are zero.
        """
        runs: list[UpdateRun] = []
        for segment in layout.segments:
            low, high = max(begin, segment.begin), min(end, segment.end)
            if low >= high:
                continue
            if not self.is_rounded:
                runs.append(UpdateRun(low, high, segment.group, None))
                continue
            slots = [x for x in layout.slots if segment.begin <= x.offset < segment.end]
            ends = [*(slot.offset for slot in slots[1:]), segment.end]
            for slot, stop in zip(slots, ends, strict=True):
                first, last = max(low, slot.offset), min(high, stop)
                if first < last:
                    number = parameter_number(slot.name)
                    rounding = Rounding(self.seed, number, first - slot.offset)
                    runs.append(UpdateRun(first, last, segment.group, rounding))
        return runs


def parameter_number(name: str) -> int:
    """A parameter's number for the random bits: the same in every layout, group and job."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
