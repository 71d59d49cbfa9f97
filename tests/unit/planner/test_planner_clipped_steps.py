"""Clipped steps of several ranks: against an event-by-event twin; what they make of a plan."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from steps_twin import TwinLaunches, TwinRank, train

from hytrain.errors import PlanError
from hytrain.tools.planner.allocation import Share
from hytrain.tools.planner.cluster import (
    Cluster,
    GpuProfile,
    Host,
    LaunchTimes,
    UpdateLaunchTimes,
)
from hytrain.tools.planner.cost_model import Collectives, Load, load
from hytrain.tools.planner.curves import Table
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.plan_report import plan_text
from hytrain.tools.planner.problem import Model, PlanProblem
from hytrain.tools.planner.rank_walk import RankWalk
from hytrain.tools.planner.result import Plan
from hytrain.tools.planner.step_simulator import StepSimulator

ITEMSIZE = 2
ROUNDS = 5


def launches(rng: random.Random, layer_ms: float) -> LaunchTimes | None:
    """Of a host that is in time, or late, or was not measured; nothing slows it down."""
    if rng.random() < 0.3:
        return None
    pace, device = rng.uniform(0.1, 2.0), rng.uniform(0.2, 1.0)
    return LaunchTimes(
        layer_ms=Table(((1.0, pace * layer_ms),)),
        outside_ms=Table(((1.0, rng.uniform(0.0, 9.0)),)),
        slowdown=1.0,
        updates=UpdateLaunchTimes(
            *(rng.uniform(0.0, most) for most in (1.0, 1.0, 0.5, 0.3, 3.0, 0.2))
        ),
        layer_device_ms=Table(((1.0, device * layer_ms),)),
    )


def gpu(rng: random.Random) -> GpuProfile:
    ms = rng.uniform(0.5, 8.0)
    backward_ms = rng.uniform(1.5, 3.0) * ms
    return GpuProfile(
        name="random",
        memory_bytes=80 * 10**9,
        forward_ms=Table(((1.0, ms),)),
        backward_ms=Table(((1.0, backward_ms),)),
        peak_bytes=Table(((1.0, 1e9),)),
        idle_bytes=10**9,
        update_rate=rng.uniform(2e10, 2e11),
        copy_rate=rng.choice((2e9, 2e10, 2e11)) * rng.uniform(0.9, 1.1),
        outside_ms=Table(((1.0, rng.uniform(0.0, 9.0)),)),
        stored_bytes=Table(((1.0, 1e9),)),
        launches=launches(rng, ms + backward_ms),
    )


def random_steps(rng: random.Random, num_ranks: int, num_layers: int) -> StepSimulator:
    """Ranks with shards, samples, micro-batches, GPU layers and rates of their own; some idle."""
    host = Host(
        name="h",
        gpus=tuple(gpu(rng) for _ in range(num_ranks)),
        cores=num_ranks,
        memory_bytes=2**40,
        bandwidth=rng.uniform(5e10, 1e12),
        update_rates=Table(((1.0, 10 ** rng.uniform(8.3, 10.3)),)),
    )
    lines = [Table(((1e8, rng.uniform(0.0, 3.0)),)) for _ in range(2)]
    model = Model("m", num_layers, num_layers * 50_000_000, itemsize=ITEMSIZE)
    problem = PlanProblem(Cluster((host,), *lines, 1.0), model, 64, activations=("store",))
    collectives = Collectives.of(problem, even=True)
    loads: list[Load] = []
    for number, one in enumerate(host.gpus):
        batch = rng.randint(1 if number == 0 else 0, 4)
        loads.append(load(problem, one, collectives, batch, min(batch, 2), "store"))
    weights = [rng.uniform(0.1, 1.0) for _ in loads]
    shares = [Share(each / sum(weights), rng.randint(0, num_layers)) for each in weights]
    return StepSimulator(problem, loads, shares, even=True)


def cases(
    seed: int, number: int, most_ranks: int = 4, most_layers: int = 26
) -> list[StepSimulator]:
    rng = random.Random(seed)
    return [
        random_steps(rng, rng.randint(1, most_ranks), rng.randint(1, most_layers))
        for _ in range(number)
    ]


def twin_launches(rank: RankWalk) -> TwinLaunches:
    measured = rank.layers * (rank.first + rank.last) + rank.middle
    passes = rank.launches.passes_beside(0.0, rank.gpu_layers)
    device = rank.launches.device_share * measured
    updates = 0.0
    if rank.launches.updates is not None:
        updates = max(
            0.0, rank.launches.updates.on_gpu[rank.gpu_layers] - max(0.0, device - passes)
        )
    return TwinLaunches(updates, rank.launches.end, passes, device)


def twins(steps: StepSimulator) -> list[TwinRank]:
    return [
        TwinRank(
            first=rank.first,
            middle=rank.middle,
            last=rank.last,
            gpu_layers=rank.gpu_layers,
            gpu_update=rank.gpu_update,
            update=rank.cpu_update,
            preview=rank.cpu_preview,
            chunk=rank.chunk,
            launches=twin_launches(rank),
        )
        for rank in steps._ranks
    ]


def twin_steps(steps: StepSimulator, clipped: list[bool]) -> list[float]:
    times = steps._collectives
    found = train(twins(steps), steps._num_layers, times.gather, times.scatter, clipped)
    return [step.seconds for step in found]


@pytest.mark.parametrize("clipped", [False, True])
def test_every_walk_is_that_of_the_twin(clipped: bool) -> None:
    second_passes = 0
    for steps in cases(seed=1, number=150):
        times, layers = steps._collectives, steps._num_layers
        expected = train(
            twins(steps), layers, times.gather, times.scatter, [clipped] * (ROUNDS + 1)
        )
        never = [0.0] * len(steps._ranks)  # without a slowdown it makes no difference
        walked = steps._walk(steps._ranks, [0.0] * layers, never, clipped=clipped)
        assert walked.seconds == pytest.approx(expected[0].seconds, rel=1e-9)
        for step in expected[1:]:
            weights = [rank.updated(walked.final, clipped=clipped) for rank in steps._ranks]
            for found, twin in zip(weights, step.weights, strict=True):
                assert found == pytest.approx(twin, abs=1e-9)
            for rank, found in zip(steps._ranks, weights, strict=True):
                unclipped = rank.updated(walked.final, clipped=False)
                second_passes += found != unclipped
            updated = [max(times) for times in zip(*weights, strict=True)]
            walked = steps._walk(steps._ranks, updated, never, clipped=clipped)
            assert walked.seconds == pytest.approx(step.seconds, rel=1e-9)
    # Clipping made a difference in enough of them for the comparison to mean something.
    assert (second_passes > 500) == clipped


@pytest.mark.parametrize("clipped", [False, True])
def test_the_step_is_that_of_a_long_training(clipped: bool) -> None:
    """But for a few cases that take more rounds to come to rest than are walked."""
    off = 0
    for steps in cases(seed=2, number=100):
        trained = twin_steps(steps, [clipped] * 24)[-8:]
        found = steps.seconds(clipped_share=float(clipped))
        error = abs(found / (sum(trained) / len(trained)) - 1.0)
        assert error < 0.05
        off += error > 1e-5
    assert off <= 3


@pytest.mark.parametrize(
    ("ranks", "allowed"),
    # One rank carries nothing from a step to the next. Several carry who waited for whom.
    [(1, 1e-9), (3, 0.03)],
)
def test_steps_of_both_kinds_take_their_mean(ranks: int, allowed: float) -> None:
    rng = random.Random(3)
    for _ in range(60):
        steps = random_steps(rng, ranks, rng.randint(1, 26))
        clipped = [rng.random() < 0.4 for _ in range(40)]
        trained = twin_steps(steps, clipped)[1:]
        share = sum(clipped[1:]) / len(trained)
        mean = sum(trained) / len(trained)
        assert steps.seconds(clipped_share=share) == pytest.approx(mean, rel=allowed)


def test_the_share_weighs_both_steps() -> None:
    for steps in cases(seed=4, number=20):
        clipped, unclipped = (steps.seconds(clipped_share=share) for share in (1.0, 0.0))
        for share in (0.25, 0.5):
            expected = share * clipped + (1.0 - share) * unclipped
            assert steps.seconds(clipped_share=share) == pytest.approx(expected)


def test_a_clipped_step_is_not_shorter() -> None:
    """The first passes are those of an unclipped step; second ones come on top."""
    longer = 0
    for steps in cases(seed=5, number=400, most_layers=12):
        clipped, unclipped = (steps.seconds(clipped_share=share) for share in (1.0, 0.0))
        assert clipped >= unclipped * (1.0 - 1e-9)
        longer += clipped > unclipped * 1.01
    assert longer > 100


def test_a_preview_takes_its_part_of_an_update_and_as_long_as_its_copy() -> None:
    bound_by_copies = 0
    for steps in cases(seed=6, number=40):
        for rank in steps._ranks:
            ratio = rank.cpu_preview / rank.cpu_update
            assert 0.8 <= ratio * (1 + 1e-9) <= 1 + 1e-8
            bound_by_copies += ratio > 0.8 * 1.001
    assert bound_by_copies > 0


# -- what plans make of it ---------------------------------------------------------------------


def two_gpus(
    gigabytes: int = 139, rate: float = 2e9, clipped_share: float = 1.0, batch: int = 48
) -> PlanProblem:
    """A model of 3 B parameters; backward of a rank hides the updates of an unclipped step."""

    def device(name: str, ms: float) -> GpuProfile:
        return GpuProfile(
            name=name,
            memory_bytes=gigabytes * 10**9,
            forward_ms=Table(((1.0, ms),)),
            backward_ms=Table(((1.0, 2.0 * ms),)),
            peak_bytes=Table(((1.0, 2e9), (2.0, 3e9))),
            idle_bytes=10**9,
            update_rate=1.2e11,
            copy_rate=4e10,
            stored_bytes=Table(((1.0, 2e9), (2.0, 3e9))),
            sizes=(1, 2, 4, 8),
        )

    gpus = (device("fast", 0.5), device("slow", 1.0))
    host = Host("h", gpus, 32, 256 * 10**9, 1.7e11, Table(((16.0, rate),)))
    line = Table(((1e8, 0.4), (2e8, 0.8)))
    return PlanProblem(
        Cluster((host,), line, line),
        Model("m", 24, 3 * 10**9),
        batch,
        activations=("store",),
        clipped_share=clipped_share,
    )


def planned(problem: PlanProblem) -> Plan:
    plan = make_plan(problem)
    assert isinstance(plan, Plan), plan
    return plan


def steps_of(problem: PlanProblem) -> StepSimulator:
    collectives = Collectives.of(problem, even=True)
    loads = [
        load(problem, one, collectives, batch, 8, "store")
        for (_, one), batch in zip(problem.cluster.ranks, (32, 16), strict=True)
    ]
    return StepSimulator(problem, loads, [Share(0.5, 0)] * 2, even=True)


def test_more_layers_are_updated_on_the_gpu_where_more_steps_are_clipped() -> None:
    shares = (0.0, 0.25, 0.5, 1.0)
    chosen = [
        steps_of(two_gpus(clipped_share=share)).worthwhile_layers([24, 24]) for share in shares
    ]
    for fewer, more in itertools.pairwise(chosen):
        assert all(a <= b for a, b in zip(fewer, more, strict=True))
    assert sum(chosen[-1]) > sum(chosen[0])


def test_never_more_layers_than_have_room() -> None:
    rng = random.Random(7)
    for steps in cases(seed=8, number=25):
        own = [rank.gpu_layers for rank in steps._ranks]
        most = [rng.randint(number, steps._num_layers) for number in own]
        found = steps.worthwhile_layers(most)
        assert all(a <= b <= c for a, b, c in zip(own, found, most, strict=True))
    for gigabytes in (14, 18, 24, 30, 40):
        for share in (0.0, 1.0):
            problem = two_gpus(gigabytes, clipped_share=share)
            plan = planned(problem)
            for rank, (_, device) in zip(plan.ranks, problem.cluster.ranks, strict=True):
                assert rank.gpu_bytes <= device.memory_bytes


def test_a_plan_with_gpu_memory_left_hides_clipped_steps_too() -> None:
    roomy = planned(two_gpus())
    careless = planned(two_gpus(clipped_share=0.0))
    layers = [sum(rank.gpu_layers for rank in plan.ranks) for plan in (roomy, careless)]
    assert layers[0] > layers[1]
    assert roomy.clipped_seconds <= careless.unclipped_seconds * 1.02
    assert roomy.clipped_seconds < careless.clipped_seconds * 0.98
    # For what it was planned for, each is the better one.
    assert careless.predicted_seconds == careless.unclipped_seconds
    assert roomy.predicted_seconds == roomy.clipped_seconds
    # The bound is of unclipped steps, and of all plans.
    for plan in (roomy, careless):
        assert plan.lower_bound <= plan.unclipped_seconds


def test_the_table_says_what_clipping_costs_where_it_does() -> None:
    poor = two_gpus(gigabytes=16)
    plan = planned(poor)
    assert plan.clipped_seconds > 1.01 * plan.unclipped_seconds
    (line,) = [line for line in plan_text(poor, plan, ()).splitlines() if "clipped" in line]
    assert line == (
        f"a step that is clipped takes {1e3 * plan.clipped_seconds:.1f} ms, one that is not "
        f"{1e3 * plan.unclipped_seconds:.1f}; predicted for 100% clipped"
    )
    same = replace(plan, clipped_seconds=1.005 * plan.unclipped_seconds)
    assert "clipped" not in plan_text(poor, same, ())


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_what_is_no_share_is_refused(share: float) -> None:
    with pytest.raises(PlanError, match=r"clipped_share must be in \[0, 1\]"):
        two_gpus(clipped_share=share)
