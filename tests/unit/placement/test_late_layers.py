"""Which layers on the CPU have whole master weights where those on the GPU are split."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hytrain.formats.moment_kinds import FP32, SPLIT
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import (
    all_split,
    as_kept,
    bounds,
    first_late_layers,
    host_bytes,
    late_layers,
    state_bytes,
    taken_of_host,
)
from hytrain.placement.memory_report import master_words, table

LAYERS = tuple(LayerBytes(f"layer {i}", 100, master=SPLIT) for i in range(10))
WHOLE = tuple(replace(layer, host_master=FP32) for layer in LAYERS)
ON_HOST, MORE = 12 * 100, 2 * 100  # with gradients: 2 + 8 + 2, and 2 if whole
LIMITS = MemoryLimits(gpu=10 * ON_HOST, gpu_reserve=0, gpu_base=0, host=0, host_reserve=0)


def test_bytes_differ_by_side() -> None:
    assert [layer.state_bytes for layer in WHOLE] == [10 * 100] * 10
    assert [layer.host_state_bytes for layer in WHOLE] == [12 * 100] * 10
    assert state_bytes(WHOLE[:4]) == 4 * 10 * 100
    assert host_bytes(WHOLE, 4, 7) == 6 * (ON_HOST + MORE) + 7
    assert all_split(WHOLE) == LAYERS


@pytest.mark.parametrize(
    ("host", "first"),
    [
        (10 * (ON_HOST + MORE), [10] * 11),  # all whole
        (10 * ON_HOST, [0, 7, *[10] * 9]),  # a layer that leaves has room for six whole ones
        (10 * ON_HOST + MORE, [1, 8, *[10] * 9]),
        (10 * ON_HOST + MORE - 1, [0, 7, *[10] * 9]),
        (8 * ON_HOST, [0, 1, 2, 9, *[10] * 7]),  # fewer than two do not fit: all are split
        (0, list(range(11))),
    ],
)
def test_late_layers_are_as_few_as_memory_asks_for(host: int, first: list[int]) -> None:
    limits = replace(LIMITS, host=host)
    assert first_late_layers(LAYERS, limits, 0) == first
    assert first_late_layers(WHOLE, limits, 0) == first  # however they are kept now
    staged = replace(limits, host=host + 8, host_reserve=3)
    assert first_late_layers(LAYERS, staged, 5) == first
    for k in range(11):
        kept = as_kept(WHOLE, limits, 0, k)
        assert [layer.host_master for layer in kept] == [FP32] * first[k] + [None] * (10 - first[k])
        assert late_layers(kept, k) == 10 - max(k, first[k])


def test_no_layer_more_would_fit() -> None:
    chance = random.Random(4)
    for _ in range(300):
        sizes = [chance.randint(1, 50) for _ in range(chance.randint(1, 12))]
        layers = tuple(LayerBytes("", size, master=SPLIT) for size in sizes)
        limits = replace(
            LIMITS,
            host=chance.randint(0, 16 * sum(sizes)),
            host_reserve=chance.randint(0, 30),
            host_base=chance.randint(0, 30),
            shares_host=chance.random() < 0.3,
        )
        room, staging = limits.host - limits.host_reserve, chance.randint(0, 30)
        fewest = bounds(layers, limits, staging)
        for k, first in enumerate(first_late_layers(layers, limits, staging)):
            kept = as_kept(layers, limits, staging, k)
            assert (taken_of_host(kept, limits, staging, k) <= room) or first == k
            assert k <= first <= len(layers)
            if first < len(layers):
                one_more = (
                    *kept[:first],
                    replace(kept[first], host_master=FP32),
                    *kept[first + 1 :],
                )
                assert taken_of_host(one_more, limits, staging, k) > room
            if fewest.allow(k):
                assert taken_of_host(kept, limits, staging, k) <= room


@pytest.mark.parametrize(
    "layers",
    [
        [replace(layer, keeps_pending=False) for layer in LAYERS],
        [replace(layer, master=FP32) for layer in LAYERS],
    ],
    ids=["committed directly", "fp32"],
)
def test_where_no_update_can_be_late(layers: list[LayerBytes]) -> None:
    assert first_late_layers(layers, LIMITS, 0) == []
    assert as_kept(layers, LIMITS, 0, 3) == tuple(layers)
    assert late_layers(layers, 0) == 0
    assert master_words(layers, 3) == ""


def test_what_fits_does_not_depend_on_how_they_are_kept_now() -> None:
    limits = replace(LIMITS, host=7 * ON_HOST)
    assert bounds(WHOLE, limits, 0) == bounds(LAYERS, limits, 0)
    assert bounds(WHOLE, limits, 0).min_gpu_layers == 3
    shown = table(WHOLE, replace(limits, host=7 * ON_HOST * 2**20), 0, [0, 3])
    assert shown == table(LAYERS, replace(limits, host=7 * ON_HOST * 2**20), 0, [0, 3])


@pytest.mark.parametrize(
    ("late", "words"),
    [
        (0, "master weights of layers on the CPU are whole, and updates there previewed"),
        (2, "master weights of the last 2 of 6 layers on the CPU are split, too, and updated after "
            "backward: the host has no room for whole ones; those of the others are whole, and "
            "their updates previewed"),
        (6, "master weights of layers on the CPU are split, too, and updated after backward: the "
            "host has no room for whole ones"),
    ],
)  # fmt: skip
def test_words(late: int, words: str) -> None:
    assert master_words((*WHOLE[: 10 - late], *LAYERS[10 - late :]), 4) == words
