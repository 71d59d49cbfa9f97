"""Which numbers of GPU layers are compared where the GPU waits for the host's launches."""

from __future__ import annotations

import pytest

from hytrain.placement.launch_bound import LaunchBoundPlacement
from hytrain.placement.memory import Bounds
from hytrain.placement.prediction import Candidate

LAYERS = 26
SOLVED = 20
FLAT = tuple(Candidate(number, 1.0, 0.0, 0.0, 0.0) for number in range(LAYERS + 1))


def visited(seconds: dict[int, float], most_steps: int = 100) -> list[int]:
    """The numbers that training goes to, where a step takes so long with each."""
    placement, here, path = LaunchBoundPlacement(), 0, []
    for _ in range(most_steps):
        chosen = placement.choose(here, Bounds.unlimited(LAYERS), FLAT, SOLVED)
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
        ({20: 1.0, 26: 1.0, 23: 0.9}, [20, 26, 23]),
        # In doubt: the solver's choice once more; between two that differ by 2 % nothing is sought.
        ({20: 1.0, 26: 1.02}, [20, 26, 20, 26]),
        # Slower for certain.
        ({20: 1.0, 26: 1.2}, [20, 26, 20]),
        ({20: 1.0, 26: 1.05}, [20, 26, 20]),
    ],
)
def test_what_is_visited(seconds: dict[int, float], path: list[int]) -> None:
    assert visited(seconds) == path
