"""Whether layers on the CPU have whole master weights where those on the GPU are split."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hytrain.formats.moment_kinds import SPLIT
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.host_master import whole_on_host, with_whole_on_host
from hytrain.placement.memory import bounds, host_bytes, state_bytes

LAYERS = with_whole_on_host([LayerBytes(f"layer {i}", 100, master=SPLIT) for i in range(10)])
WHOLE, ON_GPU = 14 * 100, 12 * 100  # with gradients: 4 + 8 + 2 on the host, 2 + 8 + 2 on the GPU
LIMITS = MemoryLimits(gpu=40 * ON_GPU, gpu_reserve=0, gpu_base=0, host=10 * WHOLE, host_reserve=0)


def chosen(
    *, host: int, gpu: int | None = LIMITS.gpu, fixed: int | None = None
) -> tuple[bool, str]:
    return whole_on_host(LAYERS, replace(LIMITS, host=host, gpu=gpu), 0, fixed)


def test_bytes_differ_by_side() -> None:
    assert [layer.state_bytes for layer in LAYERS] == [10 * 100] * 10
    assert [layer.host_state_bytes for layer in LAYERS] == [12 * 100] * 10
    assert state_bytes(LAYERS[:4]) == 4 * 10 * 100
    assert host_bytes(LAYERS, 4, 7) == 6 * WHOLE + 7
    assert bounds(LAYERS, replace(LIMITS, host=7 * WHOLE), 0).min_gpu_layers == 3


@pytest.mark.parametrize(
    ("host", "gpu", "is_whole"),
    [
        (10 * WHOLE, LIMITS.gpu, True),
        (7 * WHOLE, 4 * ON_GPU, True),  # 3 of 4 layers' room: a quarter is left
        (7 * WHOLE, 4 * ON_GPU - 1, False),
        (7 * WHOLE - 1, 4 * ON_GPU, False),
        (7 * WHOLE, 3 * ON_GPU - 1, False),  # no number fits
        (0, LIMITS.gpu, True),  # all of them on the GPU
        (7 * WHOLE, None, True),  # one memory
    ],
)
def test_where_k_is_solved(host: int, gpu: int | None, is_whole: bool) -> None:
    found, why = chosen(host=host, gpu=gpu)
    assert found is is_whole
    assert ("previewed" in why) is is_whole


@pytest.mark.parametrize(("fixed", "is_whole"), [(0, False), (2, False), (3, True), (10, True)])
def test_where_k_is_fixed(fixed: int, is_whole: bool) -> None:
    """What is left of the GPU is the user's own affair."""
    found, why = chosen(host=7 * WHOLE, gpu=3 * ON_GPU, fixed=fixed)
    assert found is is_whole
    assert ("the host has no room with fewer than 3 layers on the GPU" in why) is not is_whole


def test_why_not_is_told() -> None:
    _, why = chosen(host=7 * WHOLE, gpu=2 * ON_GPU)
    assert "no room with fewer than 3 layers on the GPU, which has room for 2" in why
    _, why = chosen(host=7 * WHOLE, gpu=4 * ON_GPU - 1)
    assert "3 layers on the GPU, the fewest that fit then, leave activations" in why
    limits = replace(LIMITS, host=-1)
    assert whole_on_host(LAYERS, limits, 0, 10)[1].endswith("if whole, the host has no room")
