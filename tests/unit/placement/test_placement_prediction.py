"""Predictions worked out by hand, and of a model that was measured.

Times in the comments run from the begin of backward; g: gradient final, w: weights back.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from placement_cases import equal_layers, layer, measured_model, step

from hytrain.cost.prediction import Candidate, predict
from hytrain.cost.step import StepCosts
from hytrain.errors import PlacementError
from tests.support.step_twins import predict_one

TWO = equal_layers(2, forward=1, backward=1, cpu_update=2, gpu_update=0.5)
CLIPPED = replace(
    equal_layers(2, forward=1, backward=1, cpu_update=2, cpu_commit=1.5, cpu_preview=1),
    tail=1,
    clipped_share=1,
)


def with_commit(costs: StepCosts, seconds: float) -> StepCosts:
    return replace(costs, layers=tuple(replace(x, cpu_commit=seconds) for x in costs.layers))


def test_backward_stands_still_for_room_for_gradients() -> None:
    costs = equal_layers(4, forward=1, backward=1, cpu_update=3)
    parameters = costs.layers[0].parameters

    def step(room: float) -> Candidate:
        elements = [round(room * parameters)] * 4
        return predict(costs, gpu_layers=[0], room=lambda _: elements).candidates[0]

    free = predict(costs, gpu_layers=[0]).candidates[0]
    # g 1, 2, 3, 4; worker 1..4 (layer 3), 4..7 (0), 7..10 (1), 10..13 (2); forward 7..8, 10..11,
    # 13..15.
    assert free == step(4) == step(3) == Candidate(0, 15, 12, 7, 0)
    # Room for two: g 1, 2, and 3, when three are there until 4; g 5, when three are there until 7.
    # Worker 1..4 (3), 4..7 (1), 7..10 (0), 10..13 (2); forward 10..12, 13..15.
    assert step(2) == Candidate(0, 15, 12, 3 + 4, 0)
    # Room for one: g 1, and 2, when two are there until 4; g 5 and 8 likewise, until 10, when layer
    # 0 is left, 10..13. Without any room each layer is updated before the next one's backward.
    assert step(1) == Candidate(0, 17, 12, 6 + 3, 0)
    assert step(0) == Candidate(0, 20, 12, 12, 0)
    # What the host updates late is no different: its gradients leave at once.
    late = replace(costs, late_from=(0,) * 5)
    assert predict(late, gpu_layers=[0], room=lambda _: [0] * 4) == predict(late, gpu_layers=[0])
    # Layers 2 and 3 late, room for none: g 1, 2, 3, when backward waits for layer 1 until 6; g 7,
    # and for layer 0 until 10. Late updates take nothing here.
    some = replace(costs, late_from=(2,) * 5)
    (found,) = predict(some, gpu_layers=[0], room=lambda _: [0] * 4).candidates
    assert found.exposed_seconds == 3 + 3


WORKED = {
    # Layer 1: g 1, worker 1..3. Layer 0: g 2, worker 3..5. Forward 0 waits 2..5, runs 5..6,
    # forward 1 runs 6..7.
    "all on the CPU": (TWO, Candidate(0, 7, 4, 3, 0)),
    # Layer 1: worker 1..3. Backward ends at 2, update of layer 0 2..2.5, forward 0 2.5..3.5,
    # forward 1 3.5..4.5.
    "one on the GPU": (TWO, Candidate(1, 4.5, 2, 0, 0.5)),
    # Backward 2, updates 1, forward 2.
    "all on the GPU": (TWO, Candidate(2, 5, 0, 0, 1)),
    # As the first, and the other micro-batches between forward and backward.
    "between": (replace(TWO, between=3), Candidate(0, 10, 4, 3, 0)),
    # The wait shrinks by the tail: 3..5 instead of 2..5.
    "tail": (replace(TWO, tail=1), Candidate(0, 7, 4, 2, 0)),
    # Layer 2: g 1, worker 1..3. At 3 layers 1 (g 2) and 0 (g 3) are ready; the lowest, 0, 3..5;
    # then layer 1 5..7. Forward 0 waits 3..5, runs 5..6; forward 1 waits 6..7, runs 7..8;
    # forward 2 8..9.
    "lowest layer first": (
        equal_layers(3, forward=1, backward=1, cpu_update=2),
        Candidate(0, 9, 6, 3, 0),
    ),
    # g 1; a quarter of the copy in 1..2; kernel 3, in 4, out 2, so worker 2..6; a quarter of the
    # copy out, w 6.5. Backward and tail end at 1.5: wait 5, forward 6.5..7.5.
    "copies by chunk": (
        replace(
            step(layer(forward=1, backward=1, to_host=4, cpu_update=3, to_device=2), tail=0.5),
            chunk_elements=1,
        ),
        Candidate(0, 7.5, 4, 5, 0),
    ),
    # The whole copy in 1..5, worker 5..9, the whole copy out, w 11. Forward 11..12.
    "a chunk larger than the layer": (
        replace(
            step(layer(forward=1, backward=1, to_host=4, cpu_update=3, to_device=2), tail=0.5),
            chunk_elements=8,
        ),
        Candidate(0, 12, 4, 9.5, 0),
    ),
    # Decision at 3. Layer 1: g 1, commit 1..2.5; layer 0: g 2, commit 2.5..4. Previews are ready
    # since 3: layer 0 4..5, layer 1 5..6. Forward 0 waits 3..5, runs 5..6; forward 1 6..7.
    "clipped": (CLIPPED, Candidate(0, 7, 5, 2, 0)),
    # Decision at 3. Layer 1: commit 1..4. Layer 0 begins at 4, after the decision: one job 4..6.
    # Preview of layer 1 6..7. Forward 0 waits 3..6, runs 6..7; forward 1 7..8.
    "clipped, begun late": (with_commit(CLIPPED, 3), Candidate(0, 8, 6, 3, 0)),
    # Layer 1 alone: commit 1..4, preview 4..5. Forward 0 3..4; forward 1 waits 4..5, runs 5..6.
    "clipped, one on the GPU": (with_commit(CLIPPED, 3), Candidate(1, 6, 4, 1, 0)),
    # Both gradients are final at 1, decision at 2. Layer 0: commit 1..4. At 4 its preview and the
    # first job of layer 1 compete: layer 0 4..5, layer 1 5..7. Forward 0 waits 2..5, runs 5..6;
    # forward 1 waits 6..7, runs 7..8.
    "clipped, second job before a first": (
        with_commit(replace(CLIPPED, layers=(layer(forward=1, cpu_update=2, cpu_preview=1),
                                             layer(forward=1, backward=1, cpu_update=2))), 3),
        Candidate(0, 8, 6, 4, 0),
    ),
    # Unclipped with tail 1: 7 (worker 4, exposed 2); clipped, begun late: 8, 6 and 3. Half each.
    "clipped every other step": (
        replace(with_commit(CLIPPED, 3), clipped_share=0.5),
        Candidate(0, 7.5, 5, 2.5, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKED)
def test_worked_example(name: str) -> None:
    costs, expected = WORKED[name]
    (found,) = predict(costs, gpu_layers=[expected.gpu_layers]).candidates
    assert found == expected
    assert predict_one(costs, expected.gpu_layers) == expected.step_seconds


def test_a_slower_worker_can_be_luckier() -> None:
    """Predictions are not monotone in cpu_update: a job that ends later may find that the gradient
    of a layer which is needed earlier has come."""

    def with_update_of_last(seconds: float) -> StepCosts:
        return step(
            layer(forward=2, backward=1, cpu_update=1),
            layer(forward=1, backward=1, cpu_update=2),
            layer(forward=1, backward=1, cpu_update=seconds),
        )

    # Layer 2: 1..2. At 2 only layer 1 is there: 2..4. Layer 0 (g 3) 4..5. Forward 5..9.
    assert predict_one(with_update_of_last(1), 0) == 9
    # Layer 2: 1..3. At 3 layer 0 is there: 3..4; layer 1 4..6. Forward 0 4..6, 1 and 2 6..8.
    assert predict_one(with_update_of_last(2), 0) == 8


def test_bound() -> None:
    assert Candidate(0, 1.0, 0.9, 0.021, 0.0).bound == "host"
    assert Candidate(0, 1.0, 0.9, 0.019, 0.0).bound == "gpu"


def test_candidates_come_as_asked_for() -> None:
    asked = predict(TWO, gpu_layers=[2, 0, 0])
    assert [candidate.gpu_layers for candidate in asked.candidates] == [2, 0, 0]
    assert asked.step_seconds == (5, 7, 7)
    assert predict(TWO).step_seconds == (7, 4.5, 5)
    assert predict(TWO, gpu_layers=[]).candidates == ()


@pytest.mark.parametrize("number", [-1, 3])
def test_a_number_that_does_not_exist_is_refused(number: int) -> None:
    with pytest.raises(PlacementError, match=r"0\.\.2"):
        predict(TWO, gpu_layers=[0, number])


@pytest.mark.parametrize(
    ("clipped_share", "gpu_layers", "measured"),
    [
        (0.0, 0, 0.529),
        (0.0, 13, 0.344),
        (0.0, 18, 0.346),
        (0.0, 26, 0.349),
        (0.8, 0, 0.607),
        (0.8, 8, 0.461),
        (0.8, 13, 0.375),
        (0.8, 18, 0.345),
        (0.8, 26, 0.349),
        (1.0, 0, 0.637),
        (1.0, 18, 0.346),
    ],
)
def test_a_measured_model(clipped_share: float, gpu_layers: int, measured: float) -> None:
    """Steps of real runs: within 4 %, the part of the tail that was not measured included."""
    costs = measured_model(clipped_share)
    (found,) = predict(costs, gpu_layers=[gpu_layers]).candidates
    assert found.step_seconds == pytest.approx(measured, rel=0.04)
    assert found.bound == ("host" if measured > 0.36 else "gpu")


@pytest.mark.parametrize(("gpu_layers", "measured"), [(0, 0.612), (18, 0.2216)])
def test_the_worker_of_a_measured_model(gpu_layers: int, measured: float) -> None:
    (found,) = predict(measured_model(1.0), gpu_layers=[gpu_layers]).candidates
    assert found.worker_seconds == pytest.approx(measured, rel=0.02)
