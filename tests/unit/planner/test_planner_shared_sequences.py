"""Ranks that share each sequence: a D-th part of a sample each, and what attention exchanges."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planner_clusters import planned
from support.plan_profiles import GIB, MIB, a_device, a_profile, collectives

from hytrain.formats.policies import Activations
from hytrain.formats.profile_file import ProfileFile, UpdateLaunches
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.planner.cost_model import Collectives, peaks, workload
from hytrain.tools.planner.plan import make_plan_without_spare
from hytrain.tools.planner.plan_report import passes
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from

SENT = 24.0 * MIB  # of a sample: as the default profile's boundary, four times
LAYERS = 12


def alike(ranks: int, **changes: Any) -> ProfileFile:
    return a_profile("one", *[a_device("one", "GPU", **changes)] * ranks)


def problem(profile: ProfileFile, degree: int = 1, **changes: Any) -> PlanProblem:
    whole = PlanOptions(
        batch=16,
        gpu_reserve=lambda total: total // 10,
        host_reserve=lambda _: GIB,
        sequence_ranks=degree,
        exchanged_bytes=SENT * (degree > 1),
    )
    return problem_from(profile, replace(whole, **changes))


def gather_ms(num_bytes: float, ranks: int = 4) -> float:
    """Of so many ranks, where those of 4 were measured: a ring moves 3 / 4 of the bytes there."""
    measured = 0.05 + max(16.0, num_bytes / MIB) / 400.0
    return (ranks - 1) / ranks / 0.75 * measured


@pytest.mark.parametrize(
    ("policy", "ways"), [("store", 2), ("recompute", 3), ("keep", 3), ("offload", 3)]
)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("degree", [2, 4])
def test_a_rank_computes_a_part_and_exchanges(
    policy: Activations, ways: int, stage: int, degree: int
) -> None:
    """D b samples of the group take what b whole ones take, and all-to-alls that nothing hides."""
    profile = alike(4)
    alone = problem(profile, stage=stage, activations=(policy,))
    shared = problem(profile, degree, stage=stage, activations=(policy,))
    assert (shared.batch, shared.sequence_ranks) == (degree * alone.batch, degree)
    no_time = Collectives(0.0, 0.0)
    gpus = [one.cluster.hosts[0].gpus[0] for one in (alone, shared)]
    for batch, size in ((1, 1), (2, 1), (4, 2), (16, 8), (3, 2)):
        own = workload(alone, gpus[0], no_time, batch, size, policy)
        part = workload(shared, gpus[1], no_time, degree * batch, degree * size, policy)
        counts = [(batch // size, size), (1, batch % size)][: 2 if batch % size else 1]
        exchanged = sum(
            n * 4 * gather_ms(SENT / 4 * samples, degree) / 1e3 * LAYERS * ways
            for n, samples in counts
        )
        assert part.compute - own.compute == pytest.approx(exchanged, rel=1e-9)
        # Memory: as of b samples, since they are what the rank has.
        assert (part.room, part.end_room) == pytest.approx((own.room, own.end_room))
        assert part.offloaded == pytest.approx(own.offloaded)


@pytest.mark.parametrize(("policy", "ways"), [("store", 2), ("recompute", 3)])
def test_a_step_takes_that_longer(policy: Activations, ways: int) -> None:
    """The simulated step, of the fastest even split; state is sharded over all ranks."""
    profile = alike(4)
    alone = planned(problem(profile, activations=(policy,)))
    part = problem(profile, 2, activations=(policy,))
    shared, same = planned(part), problem(profile, 2, exchanged_bytes=0.0)
    assert [rank.batch_size for rank in alone.ranks] == [4] * 4
    assert [rank.batch_size for rank in shared.ranks] == [8] * 4  # of each of two groups
    for plan, size in ((alone, 4), (shared, 8)):
        assert {rank.microbatch_size for rank in plan.ranks} == {size}
        assert {rank.shard_fraction for rank in plan.ranks} == {0.25}
        assert len({rank.gpu_layers for rank in plan.ranks}) == 1
    exchanged = LAYERS * ways * 4 * gather_ms(SENT / 4 * 4, 2) / 1e3
    assert alone.ranks[0].limit == shared.ranks[0].limit == "gpu"
    assert shared.ranks[0].gpu_layers == alone.ranks[0].gpu_layers
    longer = shared.predicted_seconds - alone.predicted_seconds
    assert longer == pytest.approx(exchanged, rel=1e-6)
    free = planned(replace(same, activations=(policy,)))
    assert free.predicted_seconds == pytest.approx(alone.predicted_seconds, rel=1e-9)
    # It is told among the collectives.
    others = passes(replace(part, exchange_ms=same.exchange_ms), shared)[0][1]
    assert passes(part, shared)[0][1] - others == pytest.approx(exchanged, rel=1e-9)


def test_micro_batches_are_equal() -> None:
    """Training without a plan makes no micro-batches of 16 and 8 samples, nor 16 and 4."""
    for batch, size in ((24, 8), (20, 4), (32, 16), (6, 6)):
        plan = planned(problem(alike(4), 2, batch=2 * batch, activations=("store",)))
        assert {(rank.batch_size, rank.microbatch_size) for rank in plan.ranks} == {(batch, size)}


def test_less_than_a_sample_that_was_measured() -> None:
    """On the line through the two smallest sizes, not less than its part of the smallest."""
    gpu = problem(alike(4), 4, exchanged_bytes=0.0).cluster.hosts[0].gpus[0]
    for size in (1, 2, 3, 4):
        assert gpu.forward_ms.at(size) == pytest.approx(0.2 + 0.5 * size / 4)
        assert gpu.outside_ms.at(size) == pytest.approx(1.2 * size / 4)
        layer = 250 * MIB * size / 4 + 400 * MIB + 2 * size * 6 * MIB / 4
        assert gpu.layer_peak(size) == pytest.approx(layer)
    device = a_device("one", "GPU")
    rows = [device.layer[0], device.layer[1].model_copy(update={"forward_ms": 3.0})]
    steep = a_profile("one", *[device.model_copy(update={"layer": tuple(rows)})] * 4)
    gpu = problem(steep, 4, exchanged_bytes=0.0).cluster.hosts[0].gpus[0]
    assert gpu.forward_ms.at(1) == pytest.approx(0.7 / 4)
    launched = [row.model_copy(update={"launch_ms": 2.0 + row.samples}) for row in device.layer]
    updates = UpdateLaunches(**dict.fromkeys(UpdateLaunches.model_fields, 0.0))
    host = device.model_copy(update={"layer": tuple(launched), "update_launches": updates})
    gpu = problem(a_profile("one", *[host] * 4), 4).cluster.hosts[0].gpus[0]
    assert gpu.launches is not None
    assert gpu.launches.layer_ms.at(1) == 3.0  # the host launches as many kernels


def test_inputs_of_blocks_are_a_part() -> None:
    shared = problem(alike(4), 2, stage=3, activations=("recompute",))
    gpu = shared.cluster.hosts[0].gpus[0]
    most, _ = peaks(shared, gpu, 2, 2, "recompute")
    assert most - gpu.peak_bytes.at(2) == LAYERS * 2 * 6 * MIB / 2


def test_the_group_of_a_host_exchanges_within_it() -> None:
    """Not as slowly as collectives of all ranks; a group of several hosts does."""
    device, other = a_device("one", "GPU"), a_device("two", "GPU")
    first, second = a_profile("one", device, device), a_profile("two", other, other)
    slow = collectives("one", "one", "two", "two")
    rows = [
        row.model_copy(update={"all_gather_ms": 10 * row.all_gather_ms}) for row in slow.samples
    ]
    slow = slow.model_copy(update={"samples": tuple(rows)})
    both = first.model_copy(
        update={
            "devices": first.devices + second.devices,
            "hosts": first.hosts + second.hosts,
            "collectives": (*first.collectives, slow),
        }
    )
    for degree, factor in ((2, 1), (4, 10)):
        found = problem(both, degree).exchange_ms.at(8 * degree)
        assert found == pytest.approx(4 * factor * gather_ms(8 * SENT / 4))
    # Of three neighbouring groups of two ranks one has both hosts, and all wait for it.
    labels = [device.label] * 3
    three = [host.model_copy(update={"ranks": tuple(labels)}) for host in both.hosts]
    all_six = slow.model_copy(update={"hosts": ("one",) * 3 + ("two",) * 3})
    known = (*first.collectives, slow, all_six)
    uneven = both.model_copy(update={"hosts": tuple(three), "collectives": known})
    ring = 4 / 3 / 2  # of two ranks, by that of four
    assert problem(uneven, 2).exchange_ms.at(16) == pytest.approx(
        4 * 10 * ring * gather_ms(8 * SENT / 4)
    )
    given = problem(both, 2, interconnect=1e9).exchange_ms
    assert given.at(2) == pytest.approx(1e3 * SENT / 2 / 1e9)


def test_gradients_are_reduced_in_more_bytes() -> None:
    own, more = problem(alike(4), 2), problem(alike(4), 2, reduced=2.0)
    size = 100 * MIB
    assert more.cluster.reduce_scatter_ms.at(size) == own.cluster.reduce_scatter_ms.at(2 * size)
    assert more.cluster.all_gather_ms == own.cluster.all_gather_ms


@pytest.mark.parametrize("stage", [2, 3])
def test_where_no_equal_parts_fit(stage: int) -> None:
    found = make_plan_without_spare(problem(alike(4, gigabytes=1.5), 2, stage=stage))[1]
    assert isinstance(found, Infeasible)
    assert "no equal parts fit" in found.reason
