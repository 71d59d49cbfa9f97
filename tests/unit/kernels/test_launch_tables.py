"""Tables of launches over rows: which program is of which row, and what a kernel reads of it."""

from __future__ import annotations

import pytest
import torch

from hytrain.kernels.launch_tables import (
    ADDRESSES,
    MOST_PARTIALS,
    NEVER,
    SUM_BLOCK,
    elements_of_partial,
    num_partials,
    row_tables,
)


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
