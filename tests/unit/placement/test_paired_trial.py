"""Two ways of a step, compared in turns; all that fits against the solver's choice."""

from __future__ import annotations

import pytest

from hytrain.placement.launch_bound import VISIT_STEPS, LaunchBoundPlacement, PairedTrial
from hytrain.placement.memory import Bounds

LAYERS, SOLVED = 26, 20


@pytest.mark.parametrize(
    ("visits", "verdict"),
    [
        ([1.0, 1.0], False),
        ([0.98, 1.0], False),  # less than what twice is more than noise
        ([0.9, 1.0, 0.9, 1.0], True),
        ([0.9, 1.0, 1.0, 1.0], False),  # the host was slow during the second visit
    ],
)
def test_what_seems_faster_is_measured_twice(visits: list[float], verdict: bool) -> None:
    trial, found = PairedTrial(), list[bool | None]()
    for number, seconds in enumerate(visits):
        assert trial.is_at_other is (number % 2 == 0)
        found.append(trial.add_visit(seconds))
    assert found == [*[None] * (len(visits) - 1), verdict]


def visited(seconds: dict[int, float], allowed: Bounds, start: int = SOLVED) -> list[int]:
    """The numbers of GPU layers that launch-bound training goes to, with such steps."""
    placement, here, path = LaunchBoundPlacement(), start, [start]
    for _ in range(10 * VISIT_STEPS):
        chosen = placement.choose(here, allowed, min(SOLVED, allowed.max_gpu_layers))
        if placement.is_settled:
            last = SOLVED if chosen is None else chosen
            return path if path[-1] == last else [*path, last]
        assert chosen is not None
        path += [chosen] if chosen != here else []
        here = chosen
        placement.add_step(here, seconds[here])
    raise AssertionError(f"not settled: {path}")


def test_all_that_fits_is_compared_with_the_solvers_choice() -> None:
    free = Bounds(LAYERS, 0, LAYERS)
    assert visited({20: 1.0, 26: 1.0}, free) == [20, 26]
    assert visited({20: 1.0, 26: 1.02}, free) == [20, 26]
    assert visited({20: 1.0, 26: 1.1}, free) == [20, 26, 20, 26, 20]
    assert visited({20: 1.0, 26: 1.0}, free, start=26) == [26, 20, 26]
    # There is nothing to compare.
    assert visited({}, Bounds(LAYERS, 0, 20), start=0) == [0, 20]


def test_free_memory_that_wavers_is_not_followed_but_much_more_is() -> None:
    placement = LaunchBoundPlacement()
    assert placement.choose(0, Bounds(LAYERS, 0, 12), 12) == 12
    assert placement.choose(12, Bounds(LAYERS, 0, 13), 12) == 12
    assert placement.choose(12, Bounds(LAYERS, 0, 11), 12) == 11
    assert placement.choose(11, Bounds(LAYERS, 0, 14), 12) == 14
    assert placement.choose(25, Bounds(LAYERS, 0, LAYERS), 12) == LAYERS


def test_what_the_host_does_not_hold_any_more_is_not_gone_to() -> None:
    placement = LaunchBoundPlacement()
    assert placement.choose(20, Bounds(38, 8, 30), 10) == 10
    assert placement.choose(20, Bounds(38, 12, 30), 12) == 12
    assert placement.choose(20, Bounds(38, 30, 30), 30) == 30
