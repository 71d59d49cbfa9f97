"""What tests of the planner share: small random problems."""

from __future__ import annotations

from hypothesis import strategies as st

from hytrain.tools.planner.curves import Curve
from hytrain.tools.uneven.solver import UnevenGpu, UnevenProblem

# Whole and half numbers: their sums are exact in any order, so that a limit is met by both or none.
_halves = st.integers(min_value=0, max_value=12).map(lambda number: number / 2)


@st.composite
def _curves(draw: st.DrawFn, least: float = 0.0) -> Curve:
    measured = draw(st.lists(_halves, max_size=3))
    slope, intercept = draw(_halves), draw(_halves)
    return Curve(tuple(value + least for value in measured), slope, intercept + least)


@st.composite
def uneven_problems(draw: st.DrawFn, most_gpus: int, most_batch: int) -> UnevenProblem:
    """Up to three types of GPU; curves need not rise; collectives, idle GPUs, tight memory."""
    types = [
        UnevenGpu(
            name=str(number),
            forward=draw(_curves()),
            backward=draw(_curves()),
            memory=draw(_curves(least=0.5)),
            capacity=draw(st.integers(1, 40)) / 2,
            idle_memory=draw(st.sampled_from((0.0, 0.5))),
        )
        for number in range(3)
    ]
    gpus = draw(st.lists(st.sampled_from(types), min_size=1, max_size=most_gpus))
    return UnevenProblem(
        gpus=tuple(gpus),
        batch=draw(st.integers(1, most_batch)),
        parameters=draw(st.integers(1, 6)) * 2**25,  # halves of a GiB of state
        all_gather=draw(_halves),
        reduce_scatter=draw(_halves),
        accumulation=draw(_halves),
        usable=draw(st.sampled_from((0.5, 1.0))),
        allow_idle=draw(st.booleans()),
    )
