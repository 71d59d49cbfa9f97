"""The steps of several ranks: against a twin that goes event by event, and by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from hytrain.cost.simulate import (
    Collectives,
    Place,
    Rank,
    first_on_gpu,
    simulate,
    simulate_step,
)
from hytrain.cost.step import Launches, LayerCosts, StepCosts, clipped_passes
from hytrain.errors import PlacementError
from tests.support.step_twins import train

ROUNDS = 5


@dataclass
class Job:
    """Ranks that train together."""

    ranks: list[Rank]
    places: list[list[Place]]
    collectives: Collectives

    def seconds(self, clipped_share: float) -> float:
        return simulate(self.ranks, self.collectives, clipped_share)

    def trained(self, clipped: Sequence[bool]) -> list[float]:
        steps = train(self.ranks, self.places, self.collectives, clipped)
        return [step.seconds for step in steps]


def random_launches(rng: random.Random, compute: float, num_layers: int) -> Launches:
    """Of a host that is in time, or late; nothing slows it down."""
    if rng.random() < 0.3:
        return Launches()
    once, hooks, handed = (rng.uniform(0.0, most) for most in (1e-3, 3e-4, 2e-4))
    return Launches(
        passes=rng.uniform(0.1, 2.0) * compute,
        on_gpu=tuple(k * once for k in range(num_layers + 1)),
        in_passes=tuple(k * hooks + (num_layers - k) * handed for k in range(num_layers + 1)),
        device_share=rng.uniform(0.2, 1.0),
        after_decision=rng.uniform(0.0, 5e-3),
    )


def random_layer(rng: random.Random, update_rate: float, copy_rate: float) -> LayerCosts:
    forward = rng.uniform(0.5e-3, 8e-3)
    parameters = round(rng.uniform(0.02, 1.0) * 5e7)
    update = parameters / update_rate
    commit, preview = clipped_passes(update)
    return LayerCosts(
        name="random",
        parameters=parameters,
        forward=forward,
        backward=rng.uniform(1.5, 3.0) * forward,
        to_host=2 * parameters / copy_rate,
        cpu_update=update,
        cpu_commit=commit,
        cpu_preview=preview,
        to_device=2 * parameters / copy_rate,
        gpu_update=parameters / rng.uniform(2e10, 2e11),
        cpu_late=update * rng.uniform(0.6, 1.2),
    )


def random_job(
    rng: random.Random, num_ranks: int, num_layers: int, tail: float = 0.0, *, late: float = 0.0
) -> Job:
    """Costs, launches and places of each rank's own, places in any order; some ranks idle.

    ``late``: the share of the layers, the last ones, that the CPU updates late.
    """
    ranks: list[Rank] = []
    places: list[list[Place]] = []
    late_from = (num_layers - round(late * num_layers),) * (num_layers + 1)
    for number in range(num_ranks):
        rates = 10 ** rng.uniform(8.3, 10.3), 10 ** rng.uniform(9.0, 11.0)
        layers = tuple(random_layer(rng, *rates) for _ in range(num_layers))
        has_samples = number == 0 or rng.random() < 0.8
        if not has_samples:
            layers = tuple(replace(one, forward=0.0, backward=0.0) for one in layers)
        between = rng.uniform(0.0, 0.02) * has_samples
        costs = StepCosts(layers, between=between, tail=tail * rng.random(), late_from=late_from)
        own = [Place.GPU if rng.random() < 0.4 else Place.CPU for _ in range(num_layers)]
        if rng.random() < 0.7:
            own = list(first_on_gpu(rng.randint(0, num_layers), num_layers))
        launches = random_launches(rng, costs.compute_seconds - costs.tail, num_layers)
        ranks.append(Rank(costs, own, launches, has_samples=has_samples))
        places.append(own)
    line = [[rng.uniform(0.0, 3e-3)] * num_layers for _ in range(2)]
    return Job(ranks, places, Collectives(*line))


def jobs(seed: int, number: int, most_ranks: int = 4, most_layers: int = 26) -> list[Job]:
    rng = random.Random(seed)
    return [
        random_job(rng, rng.randint(1, most_ranks), rng.randint(1, most_layers))
        for _ in range(number)
    ]


@pytest.mark.parametrize("late", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("tail", [0.0, 5e-3])
def test_every_step_is_that_of_the_twin(clipped: bool, tail: float, late: float) -> None:
    second_passes = 0
    rng = random.Random(1)
    for _ in range(75):
        job = random_job(rng, rng.randint(1, 4), rng.randint(1, 26), tail, late=late)
        never = [0.0] * len(job.ranks)
        at_once = [0.0] * len(job.places[0])
        found = simulate_step(job.ranks, job.collectives, at_once, never, clipped=clipped)
        first, *steps = train(job.ranks, job.places, job.collectives, [clipped] * ROUNDS)
        assert found.seconds == pytest.approx(first.seconds, rel=1e-9)
        for step in steps:
            weights = [rank.updates(found.final, clipped=clipped).ready for rank in job.ranks]
            for own, twin in zip(weights, step.weights, strict=True):
                assert own == pytest.approx(twin, abs=1e-9)
            for rank, own in zip(job.ranks, weights, strict=True):
                second_passes += own != rank.updates(found.final, clipped=False).ready
            updated = [max(times) for times in zip(*weights, strict=True)]
            found = simulate_step(job.ranks, job.collectives, updated, never, clipped=clipped)
            assert found.seconds == pytest.approx(step.seconds, rel=1e-9)
    # Clipping made a difference in enough of them for the comparison to mean something.
    assert (second_passes > 250 * (1.0 - late)) == (clipped and late < 1.0)


def test_late_updates_are_one_pass_after_the_decision() -> None:
    layer = LayerCosts("", 10, 1.0, 1.0, 0.0, 9.0, 9.0, 9.0, 0.0, 0.5, cpu_late=5.0)
    costs = StepCosts((layer,) * 3, late_from=(0,) * 4, clipped_share=0.5)
    rank = Rank(costs, (Place.CPU,) * 3)
    none = Collectives((0.0,) * 3, (0.0,) * 3)
    # All gradients are there at the decision; forward follows the updates, lowest layer first.
    for clipped in (False, True):
        assert rank.updates([-1.0, -2.0, -3.0], clipped=clipped).ready == [5.0, 10.0, 15.0]
        assert rank.busy_seconds(4.0, clipped=clipped) == pytest.approx(11.0)
        assert simulate([rank], none, float(clipped)) == pytest.approx(15.0 + 1.0 + 3.0)
    assert rank.costs.cpu_seconds == pytest.approx(15.0)


def test_late_layers_beside_others() -> None:
    layer = LayerCosts("", 10, 1.0, 1.0, 0.0, 2.0, 3.0, 4.0, 0.0, 0.5, cpu_late=5.0)
    costs = StepCosts((layer,) * 4, late_from=(2, 2, 2, 3, 4), clipped_share=0.5)
    rank = Rank(costs, first_on_gpu(0, 4))
    final = [-1.0, -2.0, -3.0, -4.0]
    # Layer 1 from -2 to 0, layer 0 to 2; then the late ones, lowest first.
    assert rank.updates(final, clipped=False).ready == [2.0, 0.0, 7.0, 12.0]
    # Layer 1 is committed until 1; layer 0 is done in one pass; layer 1 is previewed.
    assert rank.updates(final, clipped=True).ready == [3.0, 7.0, 12.0, 17.0]
    assert rank.busy_seconds(0.0, clipped=False) == pytest.approx(2 * 2.0 + 2 * 5.0)
    assert rank.busy_seconds(0.0, clipped=True) == pytest.approx(2 * 7.0 + 2 * 5.0)
    assert costs.cpu_seconds == pytest.approx((2 * 2.0 + 2 * 7.0) / 2 + 2 * 5.0)
    # With three layers on the GPU the last one is late; with two, both are.
    rank.place(first_on_gpu(3, 4))
    assert rank.updates(final, clipped=False).ready == [0.5, 1.0, 1.5, 5.0]
    rank.place(first_on_gpu(2, 4))
    assert rank.updates(final, clipped=False).ready == [0.5, 1.0, 5.0, 10.0]


def test_late_layers_are_given_for_each_number_on_the_gpu() -> None:
    layer = LayerCosts("", 10, 1.0, 1.0, 0.0, 2.0, 3.0, 4.0, 0.0, 0.5)
    with pytest.raises(PlacementError, match="late_from has 2 numbers for 2 layers"):
        StepCosts((layer,) * 2, late_from=(0, 1))


@pytest.mark.parametrize("clipped", [False, True])
def test_the_step_is_that_of_a_long_training(clipped: bool) -> None:
    """But for a few that take more steps to come to rest than are simulated."""
    off = 0
    for job in jobs(seed=2, number=50):
        trained = job.trained([clipped] * 24)[-8:]
        error = abs(job.seconds(float(clipped)) / (sum(trained) / len(trained)) - 1.0)
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
    for _ in range(30):
        job = random_job(rng, ranks, rng.randint(1, 26))
        clipped = [rng.random() < 0.4 for _ in range(40)]
        trained = job.trained(clipped)[1:]
        share = sum(clipped[1:]) / len(trained)
        mean = sum(trained) / len(trained)
        assert job.seconds(share) == pytest.approx(mean, rel=allowed)


def test_a_layer_between_two_on_the_gpu_is_waited_for_alone() -> None:
    layer = LayerCosts("", 10, 1.0, 1.0, 0.0, 5.0, 5.0, 5.0, 0.0, 0.5)
    places = [Place.GPU, Place.CPU, Place.GPU]
    rank = Rank(StepCosts((layer,) * 3), places)
    # Its gradient is final a second before the decision: ready 4 s after it. Updates take 1 s, the
    # first layer's forward 1 s, so the second one's waits 2 s, and is followed by 1 + 3 of passes.
    none = Collectives((0.0,) * 3, (0.0,) * 3)
    assert simulate([rank], none, 0.0) == pytest.approx(4.0 + 2.0 + 3.0)


def test_while_the_host_waits_for_the_worker_nothing_is_slowed_down() -> None:
    layer = LayerCosts("", 10, 0.5, 0.5, 0.0, 0.6, 0.5, 0.4, 0.0, 0.0)
    costs, launches = StepCosts((layer,) * 2), Launches(passes=2.0, slowdown=2.0)
    rank = Rank(costs, first_on_gpu(0, 2), launches)
    assert rank.busy_seconds(0.0, clipped=False) == pytest.approx(1.2)
    assert rank.busy_seconds(0.0, clipped=True) == pytest.approx(1.8)
    assert rank.busy_seconds(0.7, clipped=True) == pytest.approx(1.1)
    assert rank.busy_seconds(9.0, clipped=True) == 0.0
    # The first layer's weights are late by 3 s, the second's are there when it is launched.
    begun = rank.forward([3.0, 3.1])
    assert begun.host_waits == pytest.approx(3.0)
    assert rank.backward(begun) == pytest.approx([5.0, 4.5])
    rank.place(first_on_gpu(2, 2))
    assert rank.forward([3.0, 3.1]).host_waits == 0.0


def test_what_launching_takes_beside_updates() -> None:
    launches = Launches(2.0, slowdown=2.0, on_gpu=(0.0, 0.3, 1.0), in_passes=(0.2, 0.1, 0.0))
    assert launches.passes_beside(0.0, 0) == 2.2
    assert launches.passes_beside(1.0, 1) == 2.6
    launches = replace(launches, in_passes=())
    assert launches.passes_beside(0.0) == 2.0
    assert launches.passes_beside(1.0) == 2.5  # for one second half of it is launched
    assert launches.passes_beside(9.0) == 4.0  # all of it beside updates
    assert [launches.update_seconds(2, idle) for idle in (-1.0, 0.4, 3.0)] == [1.0, 0.6, 0.0]
    assert Launches().update_seconds(2, idle=0.0) == 0.0


def test_passes_of_clipped_steps_that_were_not_measured() -> None:
    """Together they keep a worker busy 1.7 times as long as an update, as recorded."""
    commit, preview = clipped_passes(1.0)
    assert commit + preview == pytest.approx(1.7, abs=0.05)
    assert 0.67 < preview < 0.93


def test_more_layers_on_the_gpu_do_not_lengthen_the_wait() -> None:
    rng = random.Random(9)
    layers = (random_layer(rng, 1e9, 1e10),) * 12
    rank = Rank(StepCosts(layers), first_on_gpu(0, 12))
    exposed: list[float] = []
    for number in range(13):
        rank.place(first_on_gpu(number, 12))
        exposed.append(rank.forward(rank.updates(rank.final_alone(), clipped=False).ready).exposed)
    assert all(more <= fewer for fewer, more in pairwise(exposed))
    assert exposed[0] > exposed[-1] == 0.0
