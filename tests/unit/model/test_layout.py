"""Layout, partition and chunks of a layer, and the training copy that has them."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hytrain.errors import ConfigError
from hytrain.model.discovery import LayerParameters
from hytrain.model.layout import ALIGNMENT, LayerLayout, lay_out
from hytrain.model.partition import align_up, padded_size, partition
from hytrain.model.storage import ResidentStorage

# -- layout, partition and chunks cover every element exactly once, whatever the sizes ---------

DTYPES = (torch.float32, torch.bfloat16)

parameters = st.lists(
    st.tuples(
        st.integers(min_value=1, max_value=700),  # elements
        st.integers(min_value=0, max_value=2),  # parameter group
        st.sampled_from(DTYPES),
    ),
    min_size=1,
    max_size=12,
)
num_ranks = st.integers(min_value=1, max_value=5)
fractions = st.lists(st.floats(min_value=0.01, max_value=1.0), min_size=1, max_size=5)
max_elements = st.integers(min_value=1, max_value=40).map(lambda units: units * ALIGNMENT)


def make_layout(specs: list[tuple[int, int, torch.dtype]], ranks: int) -> LayerLayout:
    layer = LayerParameters("layer")
    group_of: dict[int, int] = {}
    for number, (size, group, dtype) in enumerate(specs):
        parameter = nn.Parameter(torch.zeros(size, dtype=dtype))
        layer.parameters.append((f"p{number}", parameter))
        group_of[id(parameter)] = group
    (layout,) = lay_out([layer], group_of, ranks)
    return layout


def covers_once(spans: list[tuple[int, int]], begin: int, end: int) -> bool:
    """Whether the spans, in order, are exactly ``[begin, end)``."""
    at = begin
    for low, high in spans:
        if low != at or high <= low:
            return False
        at = high
    return at == end


def test_covers_once_sees_gaps_and_overlaps() -> None:
    assert covers_once([(0, 2), (2, 5)], 0, 5)
    assert not covers_once([(0, 2), (3, 5)], 0, 5)
    assert not covers_once([(0, 3), (2, 5)], 0, 5)
    assert not covers_once([(0, 5), (5, 5)], 0, 5)
    assert not covers_once([(0, 4)], 0, 5)


@given(parameters, num_ranks)
@settings(deadline=None)
def test_layout(specs: list[tuple[int, int, torch.dtype]], ranks: int) -> None:
    layout = make_layout(specs, ranks)
    assert layout.numel == sum(size for size, _, _ in specs)
    assert layout.size % (ALIGNMENT * ranks) == 0
    used = [(slot.offset, slot.offset + slot.numel) for slot in layout.slots]
    assert covers_once(sorted(used + list(layout.gaps)), 0, layout.size)
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)
    segments = [(segment.begin, segment.end) for segment in layout.segments]
    assert covers_once(segments, 0, layout.size)
    # Each parameter lies in the one segment of its group and dtype.
    group_of = {f"p{number}": spec[1] for number, spec in enumerate(specs)}
    for slot in layout.slots:
        (home,) = [s for s in layout.segments if s.begin <= slot.offset < s.end]
        assert slot.offset + slot.numel <= home.end
        assert (home.group, home.dtype) == (group_of[slot.name], slot.parameter.dtype)
    assert len({(s.group, s.dtype) for s in layout.segments}) == len(layout.segments)
    runs = layout.dtype_runs
    assert covers_once([(begin, end) for _, begin, end in runs], 0, layout.size)
    assert len({dtype for dtype, _, _ in runs}) == len(runs)


@given(parameters, fractions, max_elements)
@settings(deadline=None)
def test_chunks_of_all_ranks(
    specs: list[tuple[int, int, torch.dtype]], shares: list[float], largest: int
) -> None:
    total = sum(shares)
    shares = [share / total for share in shares]
    layout = make_layout(specs, len(shares))
    (sizes,) = partition([layout.size], len(shares), shares)
    spans: list[tuple[int, int]] = []
    for begin, end in pairwise(accumulate(sizes, initial=0)):
        chunks = layout.chunks(begin, end, largest)
        assert covers_once([(c.begin, c.end) for c in chunks], begin, end)
        for chunk in chunks:
            assert chunk.end - chunk.begin <= largest
            assert chunk.begin % ALIGNMENT == 0
            (home,) = [s for s in layout.segments if s.begin <= chunk.begin < s.end]
            assert chunk.end <= home.end
            assert (chunk.group, chunk.dtype) == (home.group, home.dtype)
        spans += [(c.begin, c.end) for c in chunks]
    assert covers_once(spans, 0, layout.size)


@given(parameters, max_elements)
@settings(deadline=None)
def test_pieces_of_a_segment_are_equally_long(
    specs: list[tuple[int, int, torch.dtype]], largest: int
) -> None:
    """One slot size fits all of them closely, but for the last."""
    layout = make_layout(specs, 1)
    chunks = layout.chunks(0, layout.size, largest)
    for segment in layout.segments:
        sizes = [c.end - c.begin for c in chunks if segment.begin <= c.begin < segment.end]
        assert set(sizes[:-1]) <= {sizes[0]}
        assert sizes[-1] <= sizes[0]


@given(st.lists(st.integers(min_value=1, max_value=300), min_size=1, max_size=6), fractions)
def test_partition(units: list[int], shares: list[float]) -> None:
    ranks = len(shares)
    total = sum(shares)
    shares = [share / total for share in shares]
    sizes = [padded_size(unit * ALIGNMENT, ranks) for unit in units]
    for size, owned in zip(sizes, partition(sizes, ranks, shares), strict=True):
        assert sum(owned) == size
        assert all(one > 0 and one % ALIGNMENT == 0 for one in owned)
        if size // ALIGNMENT >= 50 * ranks:  # too few units cannot follow the fractions
            for one, share in zip(owned, shares, strict=True):
                assert abs(one - share * size) <= ALIGNMENT * ranks


@given(st.integers(min_value=1, max_value=10**6), num_ranks)
def test_equal_shares_are_exactly_equal(elements: int, ranks: int) -> None:
    size = padded_size(elements, ranks)
    assert elements <= size < elements + ALIGNMENT * ranks
    assert partition([size], ranks, None) == [[size // ranks] * ranks]


@given(st.integers(min_value=0, max_value=10**9))
def test_align_up(elements: int) -> None:
    aligned = align_up(elements)
    assert aligned % ALIGNMENT == 0
    assert elements <= aligned < elements + ALIGNMENT


def test_a_wrong_number_of_fractions() -> None:
    with pytest.raises(ConfigError, match="has 3 numbers but the job has 2 ranks"):
        partition([128], 2, [0.2, 0.3, 0.5])


def test_a_layer_that_is_not_padded() -> None:
    with pytest.raises(ValueError, match="is not padded"):
        partition([ALIGNMENT], 2, None)


# -- the training copy -------------------------------------------------------------------------

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
