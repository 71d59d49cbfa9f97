"""Whole matrices are dealt to ranks: none is cut, each rank's part is in one piece."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hytrain.config import HyTrainConfig
from hytrain.kernels.muon import MUON
from hytrain.model.discovery import LayerParameters
from hytrain.model.layout import lay_out
from hytrain.model.partition import ALIGNMENT, align_up, deal
from hytrain.optimizer.model_cut import cut_model

sizes = st.lists(st.integers(min_value=1, max_value=900), min_size=1, max_size=30)
ranks = st.integers(min_value=1, max_value=5)


@given(sizes, ranks)
def test_no_rank_has_more_than_another_by_more_than_one_item(sizes: list[int], ranks: int) -> None:
    owners = deal(sizes, ranks, None)
    taken = [
        sum(size for size, o in zip(sizes, owners, strict=True) if o == r) for r in range(ranks)
    ]
    assert sum(taken) == sum(sizes)
    assert max(taken) - min(taken) <= max(sizes)


def test_fractions_are_followed() -> None:
    owners = deal([10] * 100, 2, [0.7, 0.3])
    assert owners.count(0) == 70


@given(sizes, ranks)
def test_a_ranks_part_is_whole_parameters(sizes: list[int], ranks: int) -> None:
    layer = LayerParameters("layer")
    layer.parameters = [(f"p{i}", nn.Parameter(nn.init.zeros_(nn.Linear(1, n).bias))) for i, n in
                        enumerate(sizes)]  # fmt: skip
    owners = dict(zip((id(p) for _, p in layer.parameters), deal(sizes, ranks, None), strict=True))
    (layout,) = lay_out([layer], dict.fromkeys(owners, 0), ranks, owners)
    cuts = list(accumulate(layout.dealt, initial=0))
    assert len(layout.dealt) == ranks
    assert cuts[-1] == layout.size
    assert all(part >= ALIGNMENT and part % ALIGNMENT == 0 for part in layout.dealt)
    for slot in layout.slots:
        owner = owners[id(slot.parameter)]
        assert cuts[owner] <= slot.offset
        assert slot.offset + align_up(slot.numel) <= cuts[owner + 1]
    # Parameters and gaps cover the flat space, each element once.
    covered = [(s.offset, s.offset + s.numel) for s in layout.slots] + list(layout.gaps)
    assert sorted(covered)[0][0] == 0
    assert sum(end - begin for begin, end in covered) == layout.size
    assert [s.begin for s in layout.segments] == [0, *(s.end for s in layout.segments[:-1])]


def test_what_muon_updates_is_a_piece_of_its_own() -> None:
    model = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(8, 24) for _ in range(3))})
    group_of = {id(p): int(p.dim() < 2) for p in model.parameters()}
    layers = cut_model(model, group_of, HyTrainConfig(), 2, None, (MUON, None))
    assert [[part.layout.name for part in layer.trained] for layer in layers] == [
        [f"blocks.{i}", f"blocks.{i}, piece 2"] for i in range(3)
    ]
    parts = [part for layer in layers for part in layer.trained]
    assert [part.optimizer for part in parts] == [MUON, None] * 3
    assert sorted(tuple(part.sizes) for part in parts[::2]) == [(64, 192), (192, 64), (192, 64)]
