"""How many launches update a layer on the GPU: one a parameter group, whatever the moments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hytrain.formats.moment_kinds import MomentsName
from hytrain.model.discovery import LayerParameters
from hytrain.model.layout import LayerLayout, lay_out
from hytrain.model.moment_format import MomentFormat

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
    how = MomentFormat(moments, seed=1)
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
    how = MomentFormat("bf16", seed=1)
    layout = llama_layouts(1)[0]
    (launch,) = how.update_launches(layout, 6400, 20000)
    assert (launch.begin, launch.end) == (6400, 20000)
    assert launch.rounding is not None
    first = launch.rounding.runs[0]
    assert (first.begin, first.end, first.rounding.first_index) == (0, 8192 - 6400, 6400 - 4096)
