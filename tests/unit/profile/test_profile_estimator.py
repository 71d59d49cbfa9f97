"""From spans and samples to rates and costs: what counts, what is estimated, what follows."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hytrain import _C
from hytrain.cost.step import StepCosts
from hytrain.placement.costs import LayerBytes
from hytrain.placement.measure import (
    CONFIRMING,
    CostEstimator,
    InitialRates,
    is_step_change,
)
from hytrain.placement.step_timer import StepSample

L = 8
SIZE = 1000
INITIAL = InitialRates(
    cpu_seconds_per_parameter=3.0, gpu_seconds_per_parameter=0.5, copy_seconds_per_byte=0.25
)
SAMPLE = StepSample(
    forward=[1.0] * L,
    cpu_wait=0.0,
    gpu_wait=0.0,
    between=0.5,
    backward=[2.0] * L,
    tail=0.25,
    gpu_update={},
    seconds=24.75,
)


def make(
    sizes: list[int] | None = None, *, updates_overlap: bool = True, chunk: int = 100
) -> CostEstimator:
    layers = [LayerBytes(f"layer {i}", n) for i, n in enumerate(sizes or [SIZE] * L)]
    return CostEstimator(layers, chunk, INITIAL, updates_overlap=updates_overlap)


def span(
    layer: int,
    job_pass: _C.Pass,
    rate: float,
    *,
    committed: bool = True,
    waited: float = 0.0,
    size: int = SIZE,
) -> Any:
    """A job that took ``rate`` seconds a parameter, beside what it waited for its gradient."""
    seconds = rate * size + waited
    return SimpleNamespace(
        layer=layer,
        job_pass=job_pass,
        begin_ns=7,
        end_ns=7 + round(seconds * 1e9),
        kernel_ns=0,
        wait_gradient_ns=round(waited * 1e9),
        final=False,
        committed=committed,
    )


def costs_of(estimator: CostEstimator) -> StepCosts:
    costs = estimator.costs()
    assert costs is not None
    return costs


def update_all(estimator: CostEstimator, rate: float, layers: range = range(L)) -> None:
    estimator.add_spans([span(index, _C.Pass.update, rate) for index in reversed(layers)])


# -- the worker's passes -----------------------------------------------------------------------


def test_before_anything_is_seen_the_calibration_holds() -> None:
    estimator = make()
    assert estimator.cpu_seconds_per_parameter("update") == 3.0
    assert estimator.cpu_seconds_per_parameter("commit") == pytest.approx(3.0 * 26 / 30)
    assert estimator.cpu_seconds_per_parameter("preview") == pytest.approx(3.0 * 16 / 30)
    assert estimator.gpu_seconds_per_parameter == 0.5
    assert estimator.step_seconds is None
    assert estimator.costs() is None


def test_whether_a_second_pass_follows_is_known_at_the_next_update() -> None:
    estimator = make()
    update_all(estimator, 2.0)
    assert estimator.cpu_seconds_per_parameter("update") == 3.0
    update_all(estimator, 5.0)
    assert estimator.cpu_seconds_per_parameter("update") == pytest.approx(2.0)


def test_a_clipped_step_tells_commit_and_preview_apart_from_update() -> None:
    estimator = make()
    estimator.add_spans([span(i, _C.Pass.update, 1.5) for i in range(L)])
    estimator.add_spans([span(i, _C.Pass.preview, 0.5) for i in range(L)])
    update_all(estimator, 2.0)
    assert estimator.cpu_seconds_per_parameter("commit") == pytest.approx(1.5)
    assert estimator.cpu_seconds_per_parameter("preview") == pytest.approx(0.5)
    assert estimator.cpu_seconds_per_parameter("update") == pytest.approx(1.5 * 30 / 26)
    update_all(estimator, 2.0)
    assert estimator.cpu_seconds_per_parameter("update") == pytest.approx(2.0)
    assert estimator.cpu_seconds_per_parameter("commit") == pytest.approx(1.5)


@pytest.mark.parametrize("seen", [_C.Pass.direct, _C.Pass.update], ids=str)
def test_passes_that_were_not_seen_follow_from_their_traffic(seen: _C.Pass) -> None:
    estimator = make()
    for _ in range(2):
        estimator.add_spans([span(i, seen, 30.0) for i in range(L)])
    for kind, rate in (("update", 30.0), ("commit", 26.0), ("preview", 16.0)):
        assert estimator.cpu_seconds_per_parameter(kind) == pytest.approx(rate)


def test_waits_for_gradients_are_not_the_pass() -> None:
    estimator = make()
    estimator.add_spans([span(0, _C.Pass.direct, 2.0, waited=1e6)])
    assert estimator.cpu_seconds_per_parameter("update") == pytest.approx(2.0)


def test_the_first_pass_after_an_arrival_is_another_one() -> None:
    estimator = make()
    estimator.add_spans([span(0, _C.Pass.arrive, 100.0)])
    estimator.add_spans([span(0, _C.Pass.update, 0.1, committed=False)])
    update_all(estimator, 2.0)
    assert estimator.cpu_seconds_per_parameter("update") == 3.0
    update_all(estimator, 2.0)
    assert estimator.cpu_seconds_per_parameter("update") == pytest.approx(2.0)


def test_a_second_pass_after_such_a_first_one_counts() -> None:
    estimator = make()
    estimator.add_spans([span(0, _C.Pass.update, 0.1, committed=False)])
    estimator.add_spans([span(0, _C.Pass.preview, 0.5)])
    update_all(estimator, 2.0)
    assert estimator.cpu_seconds_per_parameter("preview") == pytest.approx(0.5)
    assert estimator.cpu_seconds_per_parameter("commit") == pytest.approx(0.5 * 26 / 16)


@pytest.mark.parametrize("end", [_C.Pass.drop, _C.Pass.withdraw, _C.Pass.leave], ids=str)
def test_an_update_that_came_to_nothing_does_not_count(end: _C.Pass) -> None:
    estimator = make()
    estimator.add_spans([span(0, _C.Pass.update, 50.0), span(0, end, 70.0)])
    estimator.add_spans([span(0, _C.Pass.preview, 90.0)])
    estimator.add_spans([span(0, _C.Pass.update, 2.0)])
    estimator.add_spans([span(0, _C.Pass.update, 2.0)])
    assert estimator.cpu_seconds_per_parameter("update") == pytest.approx(2.0)
    assert estimator.cpu_seconds_per_parameter("preview") == pytest.approx(2.0 * 16 / 30)


@pytest.mark.parametrize("on_host", [L, 3, 1])
def test_a_change_of_the_host_is_followed_however_few_layers_are_there(on_host: int) -> None:
    estimator = make()
    layers = range(L - on_host, L)
    for _ in range(30):
        update_all(estimator, 2.0, layers)
    for _ in range(4):  # three, and one more because an update counts once the next one is there
        update_all(estimator, 4.0, layers)
    assert estimator.cpu_seconds_per_parameter("update") == pytest.approx(4.0)


def test_two_outliers_of_the_host_change_nothing() -> None:
    estimator = make()
    for number in range(30):
        update_all(estimator, 40.0 if number % 10 in (4, 5) else 2.0)
        assert estimator.cpu_seconds_per_parameter("update") in (3.0, pytest.approx(2.0))


@pytest.mark.parametrize(("large", "rate"), [(range(1, L), 2.0), ((), 3.0)])
def test_small_layers_weigh_little_and_alone_tell_nothing(large: Any, rate: float) -> None:
    estimator = make([10, *[SIZE] * (L - 1)])
    for _ in range(3):
        # The small one ends in a call of its own: launches cost it more than its parameters.
        estimator.add_spans([span(i, _C.Pass.update, 2.0) for i in large])
        estimator.add_spans([span(0, _C.Pass.update, 50.0, size=10)])
    assert estimator.cpu_seconds_per_parameter("update") == pytest.approx(rate, rel=0.1)


# -- the compute stream ------------------------------------------------------------------------


def test_costs_are_the_measured_ones() -> None:
    estimator = make()
    estimator.add_samples([SAMPLE] * 3)
    for _ in range(2):
        update_all(estimator, 2.0)
    costs = costs_of(estimator)
    assert costs.chunk_elements == 100
    assert (costs.between, costs.tail, costs.clipped_share) == (0.5, 0.25, 0.0)
    for index, layer in enumerate(costs.layers):
        assert layer.name == f"layer {index}"
        assert layer.parameters == SIZE
        assert (layer.forward, layer.backward) == (1.0, 2.0)
        assert layer.cpu_update == pytest.approx(2.0 * SIZE)
        assert layer.cpu_commit == pytest.approx(2.0 * SIZE * 26 / 30)
        assert layer.cpu_preview == pytest.approx(2.0 * SIZE * 16 / 30)
        assert layer.gpu_update == 0.5 * SIZE
        assert (layer.to_host, layer.to_device) == (0.25 * 2 * SIZE, 0.25 * 2 * SIZE)
    assert estimator.step_seconds == 24.75


def scaled(factor: float) -> StepSample:
    return replace(
        SAMPLE,
        forward=[factor * seconds for seconds in SAMPLE.forward],
        backward=[factor * seconds for seconds in SAMPLE.backward],
        between=factor * SAMPLE.between,
        tail=factor * SAMPLE.tail,
        seconds=factor * SAMPLE.seconds,
    )


def test_a_change_is_followed_within_three_samples() -> None:
    estimator = make()
    estimator.add_samples([SAMPLE] * 30)
    estimator.add_samples([scaled(2.0)] * 2)
    assert costs_of(estimator).backward_seconds == 16.0
    estimator.add_samples([scaled(2.0)])
    costs = costs_of(estimator)
    assert (costs.forward_seconds, costs.backward_seconds) == (16.0, 32.0)
    assert (costs.between, costs.tail) == (1.0, 0.5)
    assert estimator.step_seconds == 49.5


def test_two_outliers_change_nothing() -> None:
    estimator = make()
    estimator.add_samples([SAMPLE, SAMPLE, scaled(100.0), scaled(0.01), SAMPLE])
    costs = costs_of(estimator)
    assert (costs.forward_seconds, costs.backward_seconds) == (8.0, 16.0)


def test_the_fastest_large_update_had_the_gpu_to_itself() -> None:
    estimator = make([10, *[SIZE] * (L - 1)])
    updates = {0: 10 * 0.001, 1: SIZE * 0.25, 2: SIZE * 0.75}
    estimator.add_samples([replace(SAMPLE, gpu_update=updates)])
    assert estimator.gpu_seconds_per_parameter == 0.25


@pytest.mark.parametrize(
    ("seconds", "wait", "overlap", "forward"),
    [
        (1.0, 0.5, True, 6.5),  # of 2 s of updates 1.5 were not waited for: they are not forward
        (1.0, 0.5, False, 8.0),  # on a CPU they come one after the other
        (1.0, 2.0, True, 8.0),
        (1.0, 100.0, True, 8.0),
        (1.0, 0.0, True, 6.0),
        (50.0, 0.0, True, 4.0),  # half of it at most
    ],
)
def test_an_update_that_forward_did_not_wait_for_slowed_it_down(
    seconds: float, wait: float, overlap: bool, forward: float
) -> None:
    estimator = make(updates_overlap=overlap)
    updates = {0: seconds, 1: seconds}
    estimator.add_samples([replace(SAMPLE, gpu_update=updates, gpu_wait=wait)])
    assert costs_of(estimator).forward_seconds == pytest.approx(forward)


# -- copies, clipping --------------------------------------------------------------------------


def statistics(**values: int) -> Any:
    none = dict.fromkeys(("to_host_ns", "to_host_bytes", "to_device_ns", "to_device_bytes"), 0)
    return SimpleNamespace(**{**none, **values})


def test_copies_are_medians_a_byte_and_steps_without_any_do_not_count() -> None:
    estimator = make()
    estimator.add_samples([SAMPLE])
    for seconds in (4, 1, 2):
        times = {"to_host_ns": seconds * 10**9, "to_device_ns": seconds * 10**10}
        estimator.add_copies(statistics(**times, to_host_bytes=10, to_device_bytes=10))
        estimator.add_copies(statistics())
    costs = costs_of(estimator)
    assert costs.layers[0].to_host == pytest.approx(0.2 * 2 * SIZE)
    assert costs.layers[0].to_device == pytest.approx(2.0 * 2 * SIZE)


def test_the_share_of_clipped_steps() -> None:
    estimator = make()
    estimator.add_samples([SAMPLE])
    shares: list[float] = []
    for number in range(32):
        estimator.add_outcome(clipped=number >= 16)
        shares.append(costs_of(estimator).clipped_share)
    assert shares[15] == 0.0
    assert shares[23] == 0.5
    assert shares[31] == 1.0


# -- changes -----------------------------------------------------------------------------------


def test_a_change_of_the_step_is_certain_with_the_third_sample() -> None:
    estimator = make()
    assert estimator.add_samples([SAMPLE] * 8) == 1.0
    assert not estimator.is_changing
    for _ in range(2):
        assert estimator.add_samples([scaled(2.0)]) == 1.0
        assert estimator.is_changing
    assert estimator.add_samples([scaled(2.0)]) == 2.0
    assert not estimator.is_changing
    assert estimator.num_samples == CONFIRMING
    # What has become usual is no change.
    assert estimator.add_samples([scaled(2.0)] * 5) == 1.0
    assert estimator.num_samples == 8


def test_a_step_that_was_held_up_is_no_change() -> None:
    estimator = make()
    estimator.add_samples([SAMPLE] * 8)
    for _ in range(5):
        assert estimator.add_samples([scaled(3.0), SAMPLE, SAMPLE]) == 1.0
        assert not estimator.is_changing


def test_the_first_samples_of_a_placement_are_no_change() -> None:
    estimator = make()
    estimator.add_samples([SAMPLE] * 8)
    estimator.forget_earlier()
    assert estimator.num_samples == 0
    estimator.add_samples([scaled(2.0)] * 2)
    assert estimator.step_seconds is None, "it would be one of the placement before"
    assert estimator.add_samples([scaled(2.0)] * 3) == 1.0
    assert estimator.step_seconds == 2.0 * SAMPLE.seconds


def test_steps_that_scatter_do_not_change() -> None:
    estimator, rng = make(), random.Random(0)
    for _ in range(200):
        assert estimator.add_samples([scaled(rng.uniform(0.9, 1.1))]) == 1.0


@pytest.mark.parametrize(("factor", "expected"), [(0.84, True), (0.86, False), (1.16, True)])
def test_a_step_change_is_more_than_scatter(factor: float, expected: bool) -> None:
    assert is_step_change([SAMPLE] * 3, scaled(factor)) is expected


def test_compute_that_changes_behind_a_wait_for_the_cpu_is_a_change() -> None:
    sample = replace(SAMPLE, cpu_wait=0.5 * SAMPLE.seconds)
    assert is_step_change([SAMPLE] * 3, sample)
