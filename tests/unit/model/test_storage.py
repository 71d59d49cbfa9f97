"""The training copy: parameters are views of it, and an overwrite is counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hytrain.model.discovery import LayerParameters
from hytrain.model.layout import LayerLayout, lay_out
from hytrain.model.storage import ResidentStorage

CPU = torch.device("cpu")


def _layer() -> tuple[nn.ModuleDict, LayerLayout]:
    module = nn.ModuleDict({"a": nn.Linear(5, 7), "b": nn.Linear(3, 3).bfloat16()})
    layer = LayerParameters("layer", list(module.named_parameters()))
    group_of = {id(p): int(p.dim() < 2) for p in module.parameters()}
    (layout,) = lay_out([layer], group_of, 2)
    return module, layout


def test_values_stay_and_become_views() -> None:
    module, layout = _layer()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    storage = ResidentStorage(layout, CPU)
    for slot in layout.slots:
        assert torch.equal(slot.parameter, before[slot.name])
        view = storage.slice(slot.offset, slot.offset + slot.numel)
        assert view.data_ptr() == slot.parameter.data_ptr()
        assert storage.address(slot.offset, slot.offset + slot.numel) == view.data_ptr()
        view.fill_(3.0)
        assert bool((slot.parameter == 3.0).all())
        assert isinstance(slot.parameter, nn.Parameter)
        assert slot.parameter.is_leaf


def test_shard_slices_cover_the_shard() -> None:
    _module, layout = _layer()
    storage = ResidentStorage(layout, CPU)
    half = layout.size // 2
    for begin, end in ((0, half), (half, layout.size), (0, layout.size)):
        at = begin
        for start, view in storage.shard_slices(begin, end):
            assert start == at
            at += view.numel()
        assert at == end


def test_a_slice_over_two_dtypes_is_refused() -> None:
    _module, layout = _layer()
    storage = ResidentStorage(layout, CPU)
    with pytest.raises(IndexError, match="one dtype"):
        storage.slice(0, layout.size)


def test_an_overwrite_is_counted() -> None:
    module, layout = _layer()
    storage = ResidentStorage(layout, CPU)
    x = torch.randn(2, 5, requires_grad=True)
    loss = module["a"](x).sum()
    storage.mark_overwritten()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
