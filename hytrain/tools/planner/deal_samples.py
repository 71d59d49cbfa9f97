"""Loads for what the mixed-integer program chose: whole samples, in micro-batches that are full."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from hytrain.tools.planner.cost_model import Collectives, Load, fits_rounds, load
from hytrain.tools.planner.problem import PlanProblem
from hytrain.tools.planner.step_program import Choice


def deals(problem: PlanProblem, choices: Sequence[Choice], *, even: bool) -> Iterator[list[Load]]:
    """Loads that make the batch, close to what was chosen, in several ways.

    Args:
        problem: what is dealt.
        choices: of each rank; together at least the batch.
        even: whether all shards are equal.
    """
    collectives = Collectives.of(problem, even=even)
    sizes = [choice.microbatch for choice in choices]
    near = _rounded(problem, [choice.samples for choice in choices])
    tried = [near]
    if problem.rounds is None:
        tried.insert(0, _in_full_micro_batches(problem, choices, near))
    for batches in {tuple(batches): batches for batches in tried}.values():
        reduced = _reduced(problem, choices, batches, sizes)
        if reduced is not None:
            rows = zip(problem.cluster.ranks, choices, *reduced, strict=True)
            yield [
                load(problem, gpu, collectives, batch, min(size, batch), choice.activations)
                for (_, gpu), choice, batch, size in rows
            ]


def _rounded(problem: PlanProblem, samples: Sequence[float]) -> list[int]:
    """Whole numbers by largest remainder; all rounded up where they are more than the batch."""
    rounded = [math.floor(number + 1e-6) for number in samples]
    order = sorted(range(len(samples)), key=lambda rank: rounded[rank] - samples[rank])
    for rank in order:
        if sum(rounded) < problem.batch and rounded[rank] < samples[rank]:
            rounded[rank] += 1
    short = problem.batch - sum(rounded)
    if short > 0:  # a solver's rounding
        rounded[max(range(len(samples)), key=lambda rank: samples[rank])] += short
    return rounded


def _in_full_micro_batches(
    problem: PlanProblem, choices: Sequence[Choice], near: Sequence[int]
) -> list[int]:
    """Multiples of the micro-batches, as close as can be; the rest goes to one rank."""
    batches = [
        batch if batch <= choice.microbatch else batch // choice.microbatch * choice.microbatch
        for batch, choice in zip(near, choices, strict=True)
    ]
    left = min(sum(near), problem.batch) - sum(batches)
    cut = [near[rank] - batches[rank] for rank in range(len(near))]
    for rank in sorted(range(len(near)), key=lambda rank: cut[rank], reverse=True):
        if cut[rank]:
            added = min(left, choices[rank].microbatch)
            batches[rank] += added
            left -= added
    return batches


def _reduced(
    problem: PlanProblem, choices: Sequence[Choice], batches: Sequence[int], sizes: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Samples and micro-batches with samples taken from the fullest until they are the batch.

    None where that would leave a rank with another number of micro-batches than all shall have.
    """
    batches, sizes = list(batches), list(sizes)
    least = 0 if problem.allow_idle else 1
    for _ in range(sum(batches) - problem.batch):
        fewer = [
            _micro_size(problem, batch - 1, size) if batch > least else None
            for batch, size in zip(batches, sizes, strict=True)
        ]
        able = [rank for rank, size in enumerate(fewer) if size is not None]
        if not able:
            return None
        fullest = max(able, key=lambda rank: batches[rank] / choices[rank].samples)
        batches[fullest] -= 1
        sizes[fullest] = fewer[fullest] or 0
    for rank, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        fitting = _micro_size(problem, batch, size)
        if fitting is None:
            return None
        sizes[rank] = fitting
    return batches, sizes


def _micro_size(problem: PlanProblem, batch: int, most: int) -> int | None:
    """The largest micro-batch, up to ``most``, that makes the rounds; None where none does."""
    if not batch:
        return 0
    sizes = range(min(most, batch), 0, -1)
    return next((size for size in sizes if fits_rounds(problem, batch, size)), None)
