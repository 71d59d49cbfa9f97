"""Launches that update layers on the GPU: how many there are, and their tables."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hytrain.formats.moment_kinds import MomentsName
from hytrain.kernels.launch_tables import (
    ADDRESSES,
    MOST_PARTIALS,
    NEVER,
    SUM_BLOCK,
    elements_of_partial,
    num_partials,
    row_tables,
)
from hytrain.model.discovery import LayerParameters
from hytrain.model.layout import LayerLayout, lay_out
from hytrain.model.state_format import StateFormat

# -- how many launches update a layer on the GPU -----------------------------------------------

BLOCKS = 24
_SIZES = (4096, 4096, 4096, 4096, 11264, 11264, 11264, 100, 64)
"""Of a Llama block's parameters, made smaller; the last two are its norms."""


def llama_layouts(groups: int) -> list[LayerLayout]:
    """A layout for each block; with two groups norms are in a group of their own."""
    layers: list[LayerParameters] = []
    group_of: dict[int, int] = {}
    for block in range(BLOCKS):
        layer = LayerParameters(f"layers.{block}")
        for number, size in enumerate(_SIZES):
            parameter = nn.Parameter(torch.zeros(size, dtype=torch.bfloat16))
            layer.parameters.append((f"layers.{block}.{number}", parameter))
            group_of[id(parameter)] = int(groups == 2 and number >= len(_SIZES) - 2)
        layers.append(layer)
    return lay_out(layers, group_of, 1)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_a_llama_of_24_blocks(moments: MomentsName, groups: int) -> None:
    how = StateFormat(moments, seed=1)
    found = [
        (layout, how.update_launches(layout, 0, layout.size)) for layout in llama_layouts(groups)
    ]
    assert sum(len(launches) for _, launches in found) == groups * BLOCKS
    for layout, launches in found:
        runs = how.update_runs(layout, 0, layout.size)
        if moments == "fp32":
            assert [(each.begin, each.end, each.group) for each in launches] == [
                (run.begin, run.end, run.group) for run in runs
            ]
            assert all(each.rounding is None for each in launches)
            continue
        assert len(runs) == len(_SIZES)
        covered = [
            (each.begin + run.begin, each.begin + run.end, each.group, run.rounding)
            for each in launches
            if each.rounding is not None
            for run in each.rounding.runs
        ]
        assert covered == [(run.begin, run.end, run.group, run.rounding) for run in runs]


def test_a_shard_that_begins_within_a_parameter() -> None:
    how = StateFormat("bf16", seed=1)
    layout = llama_layouts(1)[0]
    (launch,) = how.update_launches(layout, 6400, 20000)
    assert (launch.begin, launch.end) == (6400, 20000)
    assert launch.rounding is not None
    first = launch.rounding.runs[0]
    assert (first.begin, first.end, first.rounding.first_index) == (0, 8192 - 6400, 6400 - 4096)


# -- tables of launches over rows --------------------------------------------------------------


def test_rows_are_cut_into_launches_and_programs_counted_in_each() -> None:
    programs = [1 + row % 5 for row in range(ADDRESSES + 3)]
    fields = [(100 + row, 200 + row) for row in range(len(programs))]
    tables = row_tables(programs, fields, torch.device("cpu"))
    assert [table.first for table in tables] == [0, ADDRESSES]
    assert [table.programs for table in tables] == [sum(programs[:ADDRESSES]), 2 + 3 + 4]
    for table in tables:
        own = range(table.first, min(len(programs), table.first + ADDRESSES))
        assert table.words.shape == (3, ADDRESSES)
        assert table.words[1, : len(own)].tolist() == [100 + row for row in own]
        assert table.words[2, : len(own)].tolist() == [200 + row for row in own]
        assert (table.words[:, len(own) :] == NEVER).all()
        # As the kernels find it: the last row whose first program is not behind this one.
        found = [int((table.words[0] <= program).sum()) - 1 for program in range(table.programs)]
        assert found == [row - table.first for row in own for _ in range(programs[row])]
    every = list(range(1000, 1000 + len(programs)))
    assert tables[0].addresses(every) == every[:ADDRESSES]
    assert tables[1].addresses(every) == every[ADDRESSES:] + [every[ADDRESSES]] * (ADDRESSES - 3)


@pytest.mark.parametrize("numel", [0, 1, SUM_BLOCK, SUM_BLOCK + 1, 52_000_000, 3 << 30])
def test_partial_sums_cover_all_elements(numel: int) -> None:
    partials = num_partials(numel)
    assert 1 <= partials <= MOST_PARTIALS
    each = elements_of_partial(numel, partials)
    assert each % SUM_BLOCK == 0
    assert partials * each >= numel
