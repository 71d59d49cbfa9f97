"""The memory budget, in numbers small enough to be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hytrain.errors import MemoryBudgetError, PlacementError
from hytrain.offload.update_groups import LIMITS as GROUPS
from hytrain.placement.costs import LayerBytes, MemoryLimits
from hytrain.placement.memory import (
    Bounds,
    bounds,
    gpu_peak_bytes,
    gradient_bytes,
    gradient_room,
    host_bytes,
    state_bytes,
    waiting_bytes,
)
from hytrain.placement.memory_report import check_fits, table

# State 12 B and gradient 2 B a parameter: 1200 and 200, 2400 and 400, 3600 and 600.
LAYERS = [LayerBytes("a", 100), LayerBytes("b", 200), LayerBytes("c", 300)]
LIMITS = MemoryLimits(gpu=10_000, gpu_reserve=0, gpu_base=1_000, host=10_000, host_reserve=0)
GIB = 1024**3


def test_host_bytes() -> None:
    # (12 + 2) * 600, less (12 + 2) * 100 for the first layer, ...; 50 of staging whatever k is.
    assert [host_bytes(LAYERS, k, 50) for k in range(4)] == [8450, 7050, 4250, 50]


def test_gpu_peak_without_measured_backward() -> None:
    # 1000 + 14 * parameters of the first k layers.
    assert [gpu_peak_bytes(LAYERS, LIMITS, k) for k in range(4)] == [1000, 2400, 5200, 9400]


def test_gradients_kept_between_micro_batches_are_there_at_any_k() -> None:
    limits = replace(LIMITS, kept_gradients=700)
    alone = [gpu_peak_bytes(LAYERS, LIMITS, k) - state_bytes(LAYERS[:k]) - 1000 for k in range(4)]
    found = [gpu_peak_bytes(LAYERS, limits, k) - state_bytes(LAYERS[:k]) - 1000 for k in range(4)]
    assert found == [max(700, waiting) for waiting in alone]
    assert min(alone) < 700 < max(alone)


def test_gpu_peak_while_activations_are_released() -> None:
    limits = replace(LIMITS, gpu_base_at=(300, 600, 900))
    # k 0: the peak of all, 1000. k 1: 1200 + max(1000; 900, 600, 300 + 200).
    # k 2: 3600 + max(1000; 900, 600 + 400, 300 + 600) = 4600.
    # k 3: 7200 + max(1000; 900 + 600, 600 + 1000, 300 + 1200) = 8800.
    assert [gpu_peak_bytes(LAYERS, limits, k) for k in range(4)] == [1000, 2200, 4600, 8800]


def test_gradients_in_flight_have_what_nothing_else_takes() -> None:
    limits = replace(LIMITS, gpu=10_000, gpu_reserve=100, gpu_base_at=(300, 600, 900))
    # 9900 + 2 * 600 (the two that each placement has room for) less the state, the base of each
    # layer and waiting gradients; 2 bytes an element.
    assert gradient_room(LAYERS, limits, 0) == [5400, 5250, 5100]
    assert gradient_room(LAYERS, limits, 2) == [3300, 3250, 3300]
    assert gradient_room(LAYERS, replace(limits, gpu_base_at=()), 0) is None
    assert gradient_room(LAYERS, replace(limits, gpu=None), 0) is None


def test_fp32_gradients_count_in_full() -> None:
    layers = [replace(layer, gradient_itemsize=4) for layer in LAYERS]
    assert host_bytes(layers, 0, 0) == 16 * 600
    assert gpu_peak_bytes(layers, LIMITS, 3) == 1000 + 16 * 600


def test_where_updates_commit_directly_no_gradient_waits_on_the_host() -> None:
    direct = [replace(layer, keeps_pending=False) for layer in LAYERS]
    assert [host_bytes(direct, k, 50) for k in range(4)] == [7250, 6050, 3650, 50]
    limits = replace(LIMITS, host=7250)
    assert (bounds(LAYERS, limits, 50), bounds(direct, limits, 50)) == (
        Bounds(3, 1, 3),
        Bounds(3, 0, 3),
    )


def test_where_updates_commit_directly_the_gpu_has_gradients_of_two_launches() -> None:
    """A layer's own, or of small ones that share a launch."""
    alone = [replace(layer, keeps_pending=False, moments="8bit") for layer in LAYERS]
    assert waiting_bytes(alone[:1], 1) == 200
    assert waiting_bytes(alone * 9, 9 * len(alone)) == 2 * max(
        gradient_bytes([layer]) for layer in alone
    )
    shared = [replace(layer, keeps_pending=False, parameters=1 << 20) for layer in LAYERS]
    assert waiting_bytes(shared * 9, 9 * len(shared)) == 27 << 21
    assert waiting_bytes(shared * 99, 99 * len(shared)) == 2 * 2 * GROUPS.most_elements
    # Of the layers that backward has been through, with what it used there.
    limits = replace(LIMITS, gpu_base_at=(0,) * 8 + (900,), gpu_base=900)
    nine = [replace(layer, parameters=100) for layer in alone * 3]
    assert gpu_peak_bytes(nine, limits, 8) == state_bytes(nine[:8]) + 900
    limits = replace(limits, gpu_base_at=(700,) * 8 + (900,))
    assert gpu_peak_bytes(nine, limits, 8) == state_bytes(nine[:8]) + 700 + 2 * 200


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # All of it fits on either side.
        ({}, Bounds(3, 0, 3)),
        # The host's needs are 8450, 7050, 4250, 50; the GPU's 1000, 2400, 5200, 9400.
        ({"host": 8450}, Bounds(3, 0, 3)),
        ({"host": 8449}, Bounds(3, 1, 3)),
        ({"host": 8450, "host_reserve": 1}, Bounds(3, 1, 3)),
        ({"host": 49}, Bounds(3, 4, 3)),
        ({"gpu": 9400}, Bounds(3, 0, 3)),
        ({"gpu": 9399}, Bounds(3, 0, 2)),
        ({"gpu": 9400, "gpu_reserve": 1}, Bounds(3, 0, 2)),
        ({"gpu": 999}, Bounds(3, 0, -1)),
        ({"gpu": None, "gpu_reserve": 10**9}, Bounds(3, 0, 3)),
        ({"gpu": 5200, "host": 4250}, Bounds(3, 2, 2)),
        ({"gpu": 5199, "host": 4250}, Bounds(3, 2, 1)),
    ],
)
def test_bounds(changes: dict[str, int | None], expected: Bounds) -> None:
    found = bounds(LAYERS, replace(LIMITS, **changes), 50)  # pyright: ignore[reportArgumentType]
    assert found == expected
    assert found.fits == (expected.min_gpu_layers <= expected.max_gpu_layers)


sizes = st.lists(st.integers(min_value=0, max_value=500), min_size=1, max_size=8)
amounts = st.integers(min_value=0, max_value=30_000)


@st.composite
def budgets(draw: st.DrawFn) -> tuple[list[LayerBytes], MemoryLimits, int]:
    layers = [LayerBytes("layer", size) for size in draw(sizes)]
    at = draw(st.none() | st.lists(amounts, min_size=len(layers), max_size=len(layers)))
    gpu = draw(st.none() | amounts)
    limits = MemoryLimits(
        gpu=gpu,
        gpu_reserve=draw(st.integers(0, 2000)),
        gpu_base=draw(amounts) if at is None else max(at),
        host=draw(amounts),
        host_reserve=draw(st.integers(0, 2000)),
        gpu_base_at=tuple(at or ()),
        host_base=draw(st.integers(0, 2000)),
        shares_host=gpu is not None and draw(st.booleans()),
    )
    return layers, limits, draw(st.integers(0, 2000))


@given(budget=budgets())
def test_bounds_are_what_fits_one_by_one(
    budget: tuple[list[LayerBytes], MemoryLimits, int],
) -> None:
    layers, limits, staging = budget

    def fits(k: int) -> bool:
        on_gpu = limits.gpu is None or (
            gpu_peak_bytes(layers, limits, k) <= limits.gpu - limits.gpu_reserve
        )
        on_host = host_bytes(layers, k, staging) + limits.host_base
        if limits.shares_host:
            on_host += gpu_peak_bytes(layers, limits, k)
            return on_host <= limits.host - limits.host_reserve
        return on_gpu and on_host <= limits.host - limits.host_reserve

    found = bounds(layers, limits, staging)
    every = range(len(layers) + 1)
    assert [found.allow(k) for k in every] == [fits(k) for k in every]
    if found.fits:
        assert check_fits(layers, limits, staging) == found
    else:
        with pytest.raises(MemoryBudgetError):
            check_fits(layers, limits, staging)


def test_clamp() -> None:
    assert [Bounds(9, 3, 5).clamp(k) for k in (0, 3, 4, 9)] == [3, 3, 4, 5]
    with pytest.raises(PlacementError, match="no number of GPU layers fits"):
        Bounds(9, 6, 5).clamp(5)


def test_a_measurement_of_other_layers_is_refused() -> None:
    limits = replace(LIMITS, gpu_base_at=(1, 2))
    for call in (
        lambda: gpu_peak_bytes(LAYERS, limits, 1),
        lambda: bounds(LAYERS, limits, 0),
        lambda: check_fits(LAYERS, limits, 0),
    ):
        with pytest.raises(PlacementError, match="2 entries for 3 layers"):
            call()


@pytest.mark.parametrize("k", [-1, 4])
def test_a_number_that_does_not_exist_is_refused(k: int) -> None:
    with pytest.raises(PlacementError, match=r"0\.\.3"):
        gpu_peak_bytes(LAYERS, LIMITS, k)
    with pytest.raises(PlacementError, match=r"0\.\.3"):
        host_bytes(LAYERS, k, 0)
    with pytest.raises(PlacementError, match=r"0\.\.3"):
        table(LAYERS, LIMITS, 0, [k])


# -- the text ----------------------------------------------------------------------------------

# 4 layers of 1 Gi parameters: 14 GiB each on either side, 56 GiB in all.
LARGE = [LayerBytes(f"block {number}", GIB) for number in range(4)]
SMALL_MACHINE = MemoryLimits(
    gpu=30 * GIB, gpu_reserve=2 * GIB, gpu_base=10 * GIB, host=30 * GIB, host_reserve=GIB
)


def refusal(limits: MemoryLimits, **arguments: int) -> str:
    with pytest.raises(MemoryBudgetError) as caught:
        check_fits(LARGE, limits, GIB, **arguments)
    return str(caught.value)


def test_the_refusal_has_the_table_and_what_is_missing() -> None:
    # One layer on the GPU: 24 of 28 GiB there; 43 of 29 on the host: 14 short. Two: 38 of 28, 10
    # short; 29 of 29 on the host. Three: 24 short.
    text = refusal(SMALL_MACHINE)
    assert table(LARGE, SMALL_MACHINE, GIB, [0, 2, 4]) in text
    assert "nearest: 2 of 4 layers on the GPU; missing: 10.00 GiB" in text
    assert "missing: 10.00 GiB of GPU memory" in text
    assert "of host memory" not in text.split("nearest")[1]


def test_the_refusal_has_offloaded_activations() -> None:
    assert "offloaded activations" not in refusal(SMALL_MACHINE)
    # Two layers on each side fit the host with 1 GiB to spare, and the GPU.
    limits = replace(SMALL_MACHINE, gpu=40 * GIB, host=31 * GIB)
    assert bounds(LARGE, limits, GIB) == Bounds(4, 2, 2)
    text = refusal(replace(limits, host_base=2 * GIB))
    assert "host: offloaded activations" in text
    assert "missing: 1.00 GiB of host memory" in text


def test_memory_of_a_gpu_without_its_own_is_counted_once() -> None:
    """A DGX Spark: 56 GiB of state and gradients, 10 of the model and 1 of staging."""
    spark = replace(SMALL_MACHINE, gpu=100 * GIB, host=68 * GIB)
    assert bounds(LARGE, spark, GIB) == Bounds(4, 0, 4)  # as if there were 168 GiB
    spark = replace(spark, shares_host=True)
    assert bounds(LARGE, spark, GIB) == Bounds(4, 0, 4)
    # What the driver calls free leaves out caches that the kernel drops: it bounds nothing.
    assert bounds(LARGE, replace(spark, gpu=GIB), GIB) == Bounds(4, 0, 4)
    short = replace(spark, host=67 * GIB)
    assert bounds(LARGE, short, GIB) == Bounds(4, 5, -1)
    text = refusal(short)
    assert "host: the GPU's, which has no memory of its own" in text
    assert "missing: 1.00 GiB of host memory" in text
    assert "of GPU memory" not in text


def test_the_refusal_says_what_would_do() -> None:
    text = refusal(SMALL_MACHINE, num_ranks=2)
    assert "activation checkpointing" not in text  # no activation has been measured
    measured = replace(SMALL_MACHINE, gpu_base_at=(10 * GIB,) * 4)
    words = "activation checkpointing or a smaller micro-batch: with the model activations take 10"
    assert words in refusal(measured, num_ranks=2)
    # For state there are 18 GiB on the GPU and 28 on the host. 3 ranks: 9.33 a layer; one on the
    # GPU, and three, rounded up to whole parameters, are 28 and some bytes. 4 ranks: 7 a layer.
    assert "4 ranks instead of 2" in text
    assert "memory_reserve_bytes" not in text  # 2 GiB, of 10 that are missing


def test_the_refusal_names_a_reserve_that_would_do() -> None:
    # Two layers on each side: 38 GiB and 29 GiB; the reserve is 1 GiB too large.
    limits = replace(SMALL_MACHINE, gpu=40 * GIB, gpu_reserve=3 * GIB)
    text = refusal(limits)
    assert f'gpu_memory_reserve_bytes": {2 * GIB} at most (now {3 * GIB}, 3.00 GiB)' in text
    bounds_then = bounds(LARGE, replace(limits, gpu_reserve=2 * GIB), GIB)
    assert bounds_then == Bounds(4, 2, 2)


def test_the_refusal_names_the_hosts_reserve() -> None:
    limits = replace(SMALL_MACHINE, gpu=40 * GIB, host_reserve=2 * GIB)
    text = refusal(limits)
    assert f'"hytrain.solver.host_memory_reserve_bytes": {GIB} at most (now {2 * GIB}, ' in text
    assert "gpu_memory_reserve_bytes" not in text


def test_ranks_are_no_advice_where_the_model_alone_is_too_large() -> None:
    text = refusal(replace(SMALL_MACHINE, gpu_base=29 * GIB))
    assert "ranks" not in text
    assert text.startswith("the model alone takes more than the GPU has")
    assert '- ZeRO stage 3 with "offload_param": {"device": "cpu"}' in text


@given(num_ranks=st.integers(1, 5), gpu=st.integers(13, 30), host=st.integers(3, 30))
def test_the_advised_ranks_are_the_fewest(num_ranks: int, gpu: int, host: int) -> None:
    limits = replace(SMALL_MACHINE, gpu=gpu * GIB, host=host * GIB)

    def fits(ranks: int) -> bool:
        shards = [replace(layer, parameters=-(-GIB * num_ranks // ranks)) for layer in LARGE]
        return bounds(shards, limits, GIB).fits

    if fits(num_ranks):
        return
    told = refusal(limits, num_ranks=num_ranks)
    if num_ranks == 1:  # several keep all gradients in the first backward
        limits = replace(limits, gpu_base=limits.gpu_base + 8 * GIB)
    expected = next((ranks for ranks in range(num_ranks, 1024) if fits(ranks)), None)
    words = f"- {expected} ranks instead of {num_ranks},"
    assert (words if expected else "What would make it fit:\n- more memory") in told


def test_table() -> None:
    text = table(LARGE, SMALL_MACHINE, GIB, [0, 2])
    rows = {line[:46].strip(): line[46:].split("  ") for line in text.splitlines()}
    cells = {name: [cell.strip() for cell in row if cell.strip()] for name, row in rows.items()}
    assert cells["layers on the GPU"] == ["0 of 4", "2 of 4"]
    assert cells["GPU: optimizer state"] == ["0", "24.00 GiB"]
    assert cells["GPU: weights, known activations and gradients"] == ["10.00 GiB"] * 2
    assert cells["GPU: waiting gradients"] == ["0", "4.00 GiB"]
    assert cells["GPU: needed at the peak"] == ["10.00 GiB", "38.00 GiB"]
    assert cells["GPU: there is"] == ["30.00 GiB", "30.00 GiB"]
    assert cells["GPU: missing"] == ["0", "10.00 GiB"]
    assert cells["host: optimizer state"] == ["48.00 GiB", "24.00 GiB"]
    assert cells["host: waiting gradients, pinned"] == ["8.00 GiB", "4.00 GiB"]
    assert cells["host: staging, pinned"] == ["1.00 GiB", "1.00 GiB"]
    assert cells["host: needed"] == ["57.00 GiB", "29.00 GiB"]
    assert cells["host: missing"] == ["28.00 GiB", "0"]
    assert len({len(line) for line in text.splitlines()}) == 1
    text = table(LARGE, SMALL_MACHINE, GIB, [0, 2], gpu_weights=SMALL_MACHINE.gpu_base)
    assert "\nGPU: weights             " in text


def test_table_without_a_gpu() -> None:
    text = table(LARGE, replace(SMALL_MACHINE, gpu=None), GIB, [0])
    assert "no limit" in text
    assert "GPU: missing" not in text


def test_moments_in_fewer_bytes_are_advised_where_they_would_fit() -> None:
    limits = MemoryLimits(gpu=0, gpu_reserve=0, gpu_base=0, host=44 * GIB, host_reserve=0)
    with pytest.raises(
        MemoryBudgetError, match=r'"hytrain\.moments": "bf16": the state then takes'
    ):
        check_fits(LARGE, limits, 0)
    smaller = [replace(layer, moments="bf16") for layer in LARGE]
    assert check_fits(smaller, limits, 0).fits
    assert state_bytes(smaller) == 4 * 8 * GIB
    assert state_bytes([replace(LARGE[0], moments="8bit")]) == 6 * GIB + GIB // 32


BOTH_KEYS = r'"hytrain\.moments": "8bit" and "hytrain\.master": "split" \(bf16 only\): the state'
SPLIT_ALONE = r'- "hytrain\.master": "split" \(bf16 only\): the state then takes 16\.12 GiB instead'


@pytest.mark.parametrize(
    ("moments", "match"), [("fp32", BOTH_KEYS), ("bf16", BOTH_KEYS), ("8bit", SPLIT_ALONE)]
)
def test_split_master_weights_are_advised_where_moments_do_not_do(moments: Any, match: str) -> None:
    layers = [replace(layer, moments=moments) for layer in LARGE]
    limits = MemoryLimits(gpu=0, gpu_reserve=0, gpu_base=0, host=30 * GIB, host_reserve=0)
    with pytest.raises(MemoryBudgetError, match=match):
        check_fits(layers, limits, 0)
    smaller = [replace(layer, moments="8bit", master="split") for layer in LARGE]
    assert check_fits(smaller, limits, 0).fits
    assert state_bytes(smaller) == 16 * GIB + GIB // 8
    with pytest.raises(MemoryBudgetError) as refused:
        check_fits(smaller, replace(limits, host=20 * GIB), 0)
    assert "hytrain.master" not in str(refused.value)
