"""Which numbers of GPU layers are compared where the GPU waits for the host's launches."""

from __future__ import annotations

import pytest

from hytrain.placement.launch_bound import LaunchBoundPlacement
from hytrain.placement.memory import Bounds
from hytrain.placement.prediction import Candidate

LAYERS = 26
SOLVED = 20
EACH = 0.02  # of a step: what the GPU takes to update a layer


def flat(each: float) -> tuple[Candidate, ...]:
    """Predicted to take as long with each number."""
    return tuple(Candidate(k, 1.0, 0.0, 0.0, each * k) for k in range(LAYERS + 1))


def visited(seconds: dict[int, float], each: float = EACH, most_steps: int = 100) -> list[int]:
    """The numbers that training goes to, where a step takes so long with each."""
    placement, here, path = LaunchBoundPlacement(), 0, []
    for _ in range(most_steps):
        chosen = placement.choose(here, Bounds.unlimited(LAYERS), flat(each), SOLVED)
        if placement.is_settled:
            last = SOLVED if chosen is None else chosen
            return path if path[-1] == last else [*path, last]
        assert chosen is not None
        if chosen != here:
            path.append(chosen)
        here = chosen
        placement.add_step(here, seconds[here])
    raise AssertionError(f"not settled after {most_steps} steps: {path}")


@pytest.mark.parametrize(
    ("seconds", "path"),
    [
        # As fast as the solver's choice: the number halfway is looked at, and given up or kept.
        ({20: 1.0, 26: 1.0, 23: 1.0}, [20, 26, 23, 26]),
        ({20: 1.0, 26: 1.0, 23: 0.95}, [20, 26, 23, 26, 23]),
        # In doubt: the solver's choice once more; between two that differ by 2 % nothing is sought.
        ({20: 1.0, 26: 1.02}, [20, 26, 20, 26]),
        # Slower for certain.
        ({20: 1.0, 26: 1.15}, [20, 26, 20]),
        ({20: 1.0, 26: 1.05}, [20, 26, 20]),
        # By more than updates and launches take: believed when two visits to each have shown it.
        ({20: 1.0, 26: 1.3}, [20, 26, 20, 26, 20]),
    ],
)
def test_what_is_visited(seconds: dict[int, float], path: list[int]) -> None:
    assert visited(seconds) == path


def test_a_second_slow_visit_is_short() -> None:
    """Four steps of eight, and those of the first three visits."""
    placement, here, steps = LaunchBoundPlacement(), 0, 0
    while not placement.is_settled:
        chosen = placement.choose(here, Bounds.unlimited(LAYERS), flat(EACH), SOLVED)
        if chosen is None:
            break
        here = chosen
        placement.add_step(here, 1.3 if here == LAYERS else 1.0)
        steps += 1
    assert steps == 3 * 8 + 4


def test_the_number_halfway_is_visited_only_where_it_can_win() -> None:
    seconds = {20: 1.0, 26: 1.0, 23: 0.9}
    assert visited(seconds, each=0.009) == [20, 26]  # three layers' updates are less than 3 %
    assert visited(seconds, each=0.011) == [20, 26, 23, 26, 23]


def test_a_host_that_was_slow_during_one_visit_does_not_decide() -> None:
    """Eight steps with all that fits take half as long again, once."""
    placement, here, path, slow = LaunchBoundPlacement(), 0, [], 8
    while not placement.is_settled:
        chosen = placement.choose(here, Bounds.unlimited(LAYERS), flat(EACH), SOLVED)
        assert chosen is not None, path
        path += [chosen] if chosen != here else []
        here = chosen
        is_slow = here == LAYERS and slow > 0
        slow -= is_slow
        placement.add_step(here, 1.5 if is_slow else 1.0)
    assert path[:4] == [20, 26, 20, 26]
    assert path[-1] == 26
