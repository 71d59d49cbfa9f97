"""From profiles to a problem: every number by hand, and what cannot be told is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from planner_clusters import planned
from recorded_h200 import profile_of
from support.plan_profiles import GIB, MIB, a_device, a_model, a_profile, collectives

from hytrain.errors import PlanError
from hytrain.formats.profile_file import ProfileFile, UpdateRate, merge_profiles
from hytrain.tools.planner.profile_problem import PlanOptions, isotonic, problem_from, times
from hytrain.zero3.plan import gather_settings, most_live


def options(**changes: Any) -> PlanOptions:
    whole = PlanOptions(batch=16, gpu_reserve=lambda total: total // 10, host_reserve=lambda _: GIB)
    return replace(whole, **changes)


def _all(total: int) -> int:
    return total


def test_a_problem_has_what_was_measured() -> None:
    problem = problem_from(a_profile(), options())
    (host,) = problem.cluster.hosts
    fast, slow = host.gpus
    assert (fast.name, slow.name) == ("GPU", "GPU")
    assert (fast.multiprocessors, slow.multiprocessors) == (100, 50)
    assert fast.limit_bytes == 80 * GIB
    usable = 80 * GIB - GIB // 2
    assert fast.memory_bytes == usable - usable // 10
    assert fast.forward_ms.at(2) == pytest.approx(1.2)
    assert slow.backward_ms.at(2) == pytest.approx(4.8)
    assert fast.recompute_ms is not None
    assert fast.recompute_ms.at(4) == pytest.approx(0.2 + 0.5 * 4)
    assert fast.outside_ms.at(8) == pytest.approx(9.6)
    assert fast.copy_rate == 4.5e10
    assert host.memory_bytes == 254 * GIB  # two ranks' staging
    assert host.rank_update_rate == pytest.approx(0.87 * 4e9)  # 16 of 32 cores each
    model = problem.model
    assert (model.num_layers, model.parameters) == (12, 1_301_000_000)
    assert (problem.gpu_state_bytes, problem.host_state_bytes, problem.update_bytes) == (12, 14, 34)


def test_memory_of_a_micro_batch() -> None:
    fast = problem_from(a_profile(), options()).cluster.hosts[0].gpus[0]
    # A layer's own peak is more than what is outside, up to 2 samples; then it is less.
    layer = 2 * 250 * MIB + 400 * MIB
    assert fast.peak_bytes.at(2) == pytest.approx(layer + 4 * 6 * MIB)
    assert fast.peak_bytes.at(8) == pytest.approx(8 * 400 * MIB + 16 * 6 * MIB)
    assert fast.stored_bytes is not None
    assert fast.stored_bytes.at(2) == pytest.approx(11 * 2 * 120 * MIB + 2 * (120 + 400) * MIB)


@pytest.mark.parametrize(("moments", "state"), [("bf16", 8), ("8bit", 6 + 1 / 32)])
def test_moments_in_fewer_bytes(moments: str, state: float) -> None:
    profile = a_profile()
    model = profile.model.model_copy(update={"moments": moments})
    problem = problem_from(profile.model_copy(update={"model": model}), options())
    assert problem.model.moments == moments
    assert (problem.gpu_state_bytes, problem.host_state_bytes) == (state, state + 2)
    assert problem.update_bytes == 2 * state + 10


def test_fp32_takes_twice_as_much_of_what_is_copied() -> None:
    profile = a_profile()
    model = profile.model.model_copy(update={"dtype": "fp32"})
    problem = problem_from(profile.model_copy(update={"model": model}), options())
    assert problem.model.itemsize == 4
    assert problem.model.layer_bytes == pytest.approx(4 * 1_301_000_000 / 12)
    assert (problem.gpu_state_bytes, problem.host_state_bytes, problem.update_bytes) == (12, 16, 44)


def test_stage_3_gathers_layers() -> None:
    two = problem_from(a_profile(), options()).cluster.hosts[0].gpus[0]
    three = problem_from(a_profile(), options(stage=3)).cluster.hosts[0].gpus[0]
    assert three.idle_bytes - two.idle_bytes == 2 * 3 * 100_000_000


def test_gathered_layers_are_those_that_an_h200_held() -> None:
    """experiments/zero3, 2026-11-21: llama-3b took 34.1 GiB with its weights on the GPU, and 29.7
    with weights that came from the host by DeepSpeed's default keys."""
    profile = profile_of((104, 48))
    alone = profile.hosts[0].model_copy(update={"ranks": profile.hosts[0].ranks[:1]})
    settings = gather_settings({})

    def live(sizes: Sequence[int]) -> int:
        return most_live(sizes, range(len(sizes)), settings)

    problem = problem_from(
        profile.model_copy(update={"hosts": (alone,)}),
        options(stage=3, offload_param=True, live_parameters=live),
    )
    weights = 2 * problem.model.parameters
    (gpu,) = problem.cluster.hosts[0].gpus
    assert (weights - gpu.idle_bytes) / GIB == pytest.approx(34.1 - 29.7, abs=0.1)


def test_the_share_of_clipped_steps() -> None:
    assert problem_from(a_profile(), options()).clipped_share == 1.0
    assert problem_from(a_profile(), options(clipped_share=0.25)).clipped_share == 0.25


def test_a_fraction_of_memory() -> None:
    half = problem_from(a_profile(), options(memory_fraction=0.5)).cluster.hosts[0].gpus[0]
    assert half.limit_bytes == 40 * GIB
    assert half.memory_bytes == 36 * GIB
    with pytest.raises(PlanError, match="memory_fraction"):
        problem_from(a_profile(), options(memory_fraction=0.0))
    with pytest.raises(PlanError, match="are to stay free"):
        problem_from(a_profile(), options(gpu_reserve=_all))


def test_collectives_are_those_of_these_ranks() -> None:
    cluster = problem_from(a_profile(), options()).cluster
    assert cluster.all_gather_ms.at(64 * MIB) == pytest.approx(0.05 + 64 / 400)
    size = 200_000_000 / MIB  # of a layer
    gather = (0.06 + size / 350) / (0.05 + size / 400)
    scatter = (0.07 + size / 350) / (0.06 + size / 400)
    assert cluster.uneven_factors == pytest.approx((gather, scatter))


def test_collectives_of_fewer_ranks_stand_in() -> None:
    four = a_profile("one", *[a_device("one", "GPU")] * 4)
    given = four.model_copy(update={"collectives": (collectives("one", "one"),)})
    measured = problem_from(given, options()).cluster
    # A ring moves 3/4 of the bytes through each of four ranks, 1/2 through each of two.
    assert measured.all_gather_ms.at(64 * MIB) == pytest.approx(1.5 * (0.05 + 64 / 400))


def test_collectives_that_nobody_measured_are_asked_for() -> None:
    apart = merge_profiles([a_profile("one"), a_profile("two")])
    with pytest.raises(PlanError, match="--interconnect"):
        problem_from(apart, options())
    given = problem_from(apart, options(interconnect=1e10)).cluster
    assert given.all_gather_ms.at(4e7) == pytest.approx(1e3 * 4e7 * 0.75 / 1e10)
    alone = problem_from(a_profile("one", a_device("one", "GPU")), options()).cluster
    assert alone.all_gather_ms.at(1e9) == 0.0


def test_a_plan_of_a_profile_deals_by_speed() -> None:
    plan = planned(problem_from(a_profile(), options(batch=48)))
    fast, slow = plan.ranks
    assert fast.batch_size == pytest.approx(2 * slow.batch_size, abs=4)
    assert max(fast.microbatch_size, slow.microbatch_size) <= 8
    assert plan.step_seconds / plan.lower_bound - 1.0 < 0.01


def test_a_device_of_a_problem_is_found_by_its_label() -> None:
    profile: ProfileFile = a_profile()
    assert profile.device("one", "GPU, 50 SMs, 80.0 GiB").multiprocessors == 50
    assert a_model().parameters == profile.model.parameters


def test_neighbours_that_fall_share_their_mean() -> None:
    assert isotonic([1.0, 3.0, 2.0, 4.0]) == [1.0, 2.5, 2.5, 4.0]
    assert isotonic([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert isotonic([1.0, 1.0, 2.0]) == [1.0, 1.0, 2.0]


def test_a_size_that_was_not_measured_is_dearer_than_by_a_straight_line() -> None:
    rows = a_profile().devices[0].layer  # 1, 2, 4, 8 samples
    table = times(rows, lambda row: 10.0 * row.samples)
    assert [table.at(size) for size in (1, 2, 4, 8)] == [10.0, 20.0, 40.0, 80.0]
    assert [table.at(size) for size in (3, 5, 6, 7)] == pytest.approx([31.5, 52.5, 63.0, 73.5])
    steps = times(rows, lambda row: 10.0 if row.samples < 8 else 10.2)
    assert [steps.at(size) for size in (5, 7)] == [10.2, 10.2]  # not dearer than the next one


def test_micro_batches_are_chosen_of_those_that_were_measured() -> None:
    fast = problem_from(a_profile(), options()).cluster.hosts[0].gpus[0]
    assert tuple(fast.micro_sizes(32)) == (1, 2, 4, 8)
    assert tuple(fast.micro_sizes(5)) == (1, 2, 4)
    # All samples at once are what is left of 8.
    assert [tuple(fast.micro_batches(n)) for n in (4, 5, 8, 9)] == [
        (1, 2, 4),
        (1, 2, 4, 5),
        (1, 2, 4, 8),
        (1, 2, 4, 8),
    ]
    assert tuple(replace(fast, sizes=(1, 2, 3)).micro_batches(5)) == (1, 2, 3)


def test_adding_gradients_takes_what_was_measured_of_a_layer_and_outside() -> None:
    profile = a_profile()
    device = profile.devices[0].model_copy(update={"accumulation_ms": 0.5})
    given = profile.model_copy(update={"devices": (device, *profile.devices[1:])})
    adding = problem_from(given, options()).cluster.hosts[0].gpus[0].accumulation_ms
    assert adding is not None
    whole = profile.model.parameters / profile.model.num_layers
    each = 0.5 * whole / profile.model.layer_parameters
    assert [adding.at(size) for size in (1, 8)] == pytest.approx([each, each])
    # Where a second sample takes no longer than the first, both wait for the host.
    rows = tuple(
        row.model_copy(update={"forward_ms": 2.0, "backward_ms": 4.0}) if row.samples < 4 else row
        for row in device.layer
    )
    slow = given.model_copy(
        update={"devices": (device.model_copy(update={"layer": rows}), *given.devices[1:])}
    )
    waiting = problem_from(slow, options()).cluster.hosts[0].gpus[0].accumulation_ms
    assert waiting is not None
    assert [waiting.at(size) for size in (1, 2)] == [0.0, 0.0]
    assert waiting.at(8) == pytest.approx(each)


def test_collectives_delay_compute_within_a_host_only() -> None:
    assert problem_from(a_profile(), options()).cluster.contention == 1.0
    network = problem_from(a_profile(), options(interconnect=1e9))
    assert network.cluster.contention == 0.0


def test_noise_does_not_make_more_samples_cheaper() -> None:
    profile = a_profile()
    device = profile.devices[0]
    rows = [row.model_copy(update={"forward_ms": 3.0 - row.samples / 10}) for row in device.layer]
    noisy = device.model_copy(update={"layer": tuple(rows)})
    given = profile.model_copy(update={"devices": (noisy, *profile.devices[1:])})
    forward = problem_from(given, options()).cluster.hosts[0].gpus[0].forward_ms
    assert [forward.at(size) for size in (1, 2, 8)] == [2.625, 2.625, 2.625]  # their mean


def _update_rates(*rows: tuple[int, float, float | None]) -> list[float]:
    profile = a_profile()
    updates = tuple(UpdateRate(threads=t, rate=r, in_training=i) for t, r, i in rows)
    host = profile.hosts[0].model_copy(update={"updates": updates})
    problem = problem_from(profile.model_copy(update={"hosts": (host,)}), options())
    return [rate for _, rate in problem.cluster.hosts[0].update_rates.points]


def test_the_rate_of_a_cpu_update_is_that_beside_a_training() -> None:
    assert _update_rates((4, 2e9, 1.9e9), (16, 4e9, 3e9)) == [1.9e9, 3e9]
    # Old profiles and data sheets have the other one only.
    assert _update_rates((4, 2e9, None), (16, 4e9, None)) == [0.87 * 2e9, 0.87 * 4e9]
    # All cores are too many where another thread wants one: training uses fewer.
    assert _update_rates((8, 3e9, 2.8e9), (15, 4e9, 3.6e9), (16, 4.1e9, 2e9)) == [
        2.8e9,
        3.6e9,
        3.6e9,
    ]
