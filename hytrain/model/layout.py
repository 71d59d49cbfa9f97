"""Where each parameter of a layer is in the layer's flat space, its segments and its chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

from hytrain.model.discovery import LayerParameters
from hytrain.model.partition import ALIGNMENT, align_up, padded_size


@dataclass(frozen=True, slots=True)
class ParameterSlot:
    """A parameter's place: ``[offset, offset + numel)`` of its layer's flat space, in elements."""

    name: str
    parameter: nn.Parameter
    offset: int
    numel: int

    def within(self, flat: torch.Tensor, begin: int) -> torch.Tensor:
        """The parameter as a view of memory that begins at ``begin`` of the flat space."""
        at = self.offset - begin
        return flat[at : at + self.numel].view(self.parameter.shape)


@dataclass(frozen=True, slots=True)
class Segment:
    """``[begin, end)`` of a layer's flat space, of one parameter group and one dtype."""

    group: int
    dtype: torch.dtype
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """A layer's flat space of ``size`` elements: parameters in segments, padded with zeros."""

    index: int
    name: str
    block: nn.Module | None
    slots: tuple[ParameterSlot, ...]
    segments: tuple[Segment, ...]
    size: int
    gaps: tuple[tuple[int, int], ...]
    """Runs of padding between and after parameters; their gradients must be kept at zero."""
    dealt: tuple[int, ...] = ()
    """Elements that each rank owns, in the ranks' order, if parameters are not cut; else empty."""

    @property
    def numel(self) -> int:
        """Parameters of the layer, padding not counted."""
        return sum(slot.numel for slot in self.slots)

    @property
    def dtype_runs(self) -> list[tuple[torch.dtype, int, int]]:
        """(dtype, begin, end) of the maximal runs of one dtype; nearly always one."""
        runs: list[tuple[torch.dtype, int, int]] = []
        for segment in self.segments:
            if runs and runs[-1][0] == segment.dtype:
                runs[-1] = (segment.dtype, runs[-1][1], segment.end)
            else:
                runs.append((segment.dtype, segment.begin, segment.end))
        return runs

    def chunks(self, begin: int, end: int, max_elements: int) -> list[Segment]:
        """Cuts the shard ``[begin, end)`` into chunks of at most ``max_elements``.

        The pieces of a segment are equally long up to alignment: their boundaries depend on the
        layout alone, not on threads, and pinned slots of one size fit them closely.
        """
        chunks: list[Segment] = []
        for segment in self.segments:
            low, high = max(begin, segment.begin), min(end, segment.end)
            if low >= high:
                continue
            count = -(-(high - low) // max_elements)
            length = align_up(-(-(high - low) // count))
            chunks.extend(
                Segment(segment.group, segment.dtype, at, min(at + length, high))
                for at in range(low, high, length)
            )
        return chunks


def lay_out(
    layers: Sequence[LayerParameters],
    group_of: Mapping[int, int],
    num_ranks: int,
    owners: Mapping[int, int] | None = None,
) -> list[LayerLayout]:
    """Gives every parameter its place.

    Args:
        layers: the model's layers.
        group_of: ``id(parameter)`` -> index of its parameter group.
        num_ranks: ranks that share each layer (the size is padded so that an equal split is exact).
        owners: ``id(parameter)`` -> its rank, for all of a layer's parameters or none of them.
    """
    return [
        _lay_out(index, layer, group_of, num_ranks, owners or {})
        for index, layer in enumerate(layers)
    ]


def _lay_out(
    index: int,
    layer: LayerParameters,
    group_of: Mapping[int, int],
    num_ranks: int,
    owners: Mapping[int, int],
) -> LayerLayout:
    def key(item: tuple[str, nn.Parameter]) -> tuple[int, str, int]:
        return owners.get(id(item[1]), 0), str(item[1].dtype), group_of[id(item[1])]

    slots: list[ParameterSlot] = []
    segments: list[Segment] = []
    gaps: list[tuple[int, int]] = []
    begins: list[int] = []  # of the ranks' parts
    at = 0

    def begin_parts(number: int) -> None:
        nonlocal at
        while len(begins) < number:
            if begins and begins[-1] == at:  # every rank owns something
                gaps.append((at, at + ALIGNMENT))
                at += ALIGNMENT
            begins.append(at)

    for name, parameter in sorted(layer.parameters, key=key):  # stable: registration order within
        if id(parameter) in owners:
            begin_parts(owners[id(parameter)] + 1)
        group, end = group_of[id(parameter)], at + align_up(parameter.numel())
        slots.append(ParameterSlot(name, parameter, at, parameter.numel()))
        if at + parameter.numel() < end:
            gaps.append((at + parameter.numel(), end))
        if segments and (segments[-1].group, segments[-1].dtype) == (group, parameter.dtype):
            segments[-1] = Segment(group, parameter.dtype, segments[-1].begin, end)
        else:
            begin = segments[-1].end if segments else 0
            segments.append(Segment(group, parameter.dtype, begin, end))
        at = end
    if begins:
        begin_parts(num_ranks + 1)
        size = at
    else:
        size = padded_size(at, num_ranks)
        if size > at:
            gaps.append((at, size))
    last = segments[-1]
    segments[-1] = Segment(last.group, last.dtype, last.begin, size)
    dealt = tuple(end - begin for begin, end in pairwise(begins))
    return LayerLayout(
        index, layer.name, layer.block, tuple(slots), tuple(segments), size, tuple(gaps), dealt
    )


__all__ = ["ALIGNMENT", "LayerLayout", "ParameterSlot", "Segment", "lay_out"]
