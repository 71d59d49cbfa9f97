"""Tables and JSON of solved cases. No files, no torch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hytrain.formats.text_table import align
from hytrain.tools.infeasible import Infeasible
from hytrain.tools.uneven.problem import UnevenCase
from hytrain.tools.uneven.solver import Assignment, solve, state_shares


@dataclass(frozen=True, slots=True)
class Solved:
    """A case, what was found, and how long that took."""

    case: UnevenCase
    result: Assignment | Infeasible
    seconds: float


def solve_cases(cases: Sequence[UnevenCase]) -> list[Solved]:
    """Solves each case, timed."""
    solved: list[Solved] = []
    for case in cases:
        begin = time.perf_counter()
        result = solve(case.problem)
        solved.append(Solved(case, result, time.perf_counter() - begin))
    return solved


def cases_json(solved: Sequence[Solved]) -> list[dict[str, Any]]:
    """Returns a record for each case; ``time`` in ms, null if nothing fits."""
    records: list[dict[str, Any]] = []
    for one in solved:
        found = one.result if isinstance(one.result, Assignment) else None
        records.append(
            {
                "model": one.case.model,
                "gpus": list(one.case.gpus),
                "global_batch": one.case.problem.batch,
                "time": found.time if found else None,
                "batch_sizes": list(found.batch_sizes) if found else None,
                "microbatch_sizes": list(found.microbatch_sizes) if found else None,
                "seconds": one.seconds,
                "missing": one.result.reason if isinstance(one.result, Infeasible) else None,
            }
        )
    return records


def cases_table(solved: Sequence[Solved]) -> str:
    """Returns a table: a line for each case, and below it its plan or what is missing."""
    if not solved:
        return "no cases"
    rows = [("case", "GPUs", "batch", "optimum ms", "published ms", "GiB of budget", "solved in s")]
    details: list[list[str]] = []
    for number, one in enumerate(solved):
        problem, result = one.case.problem, one.result
        optimum, memory = "none fits", f"- of {problem.budget:.1f}"
        if isinstance(result, Assignment):
            optimum, memory = f"{result.time:.3f}", f"{result.memory:.1f} of {problem.budget:.1f}"
        published = "-" if one.case.published is None else f"{one.case.published:.3f}"
        if isinstance(result, Infeasible) and one.case.published is not None:
            published += " *"
        name = f"{number + 1} {one.case.model}"
        size = (str(len(one.case.gpus)), str(problem.batch))
        rows.append((name, *size, optimum, published, memory, f"{one.seconds:.3f}"))
        details.append(_details(one))
    lines = align(rows)
    text = [lines[0]]
    for line, below in zip(lines[1:], details, strict=True):
        text += [line, *(f"    {words}" for words in below)]
    if any(isinstance(one.result, Infeasible) and one.case.published for one in solved):
        text.append(
            "* does not fit in memory: the published solver returns a plan without a warning"
        )
    return "\n".join(text)


def _details(one: Solved) -> list[str]:
    """Returns a case's lines: equal GPUs with equal work together."""
    result = one.result
    if isinstance(result, Infeasible):
        return [result.reason]
    rows = zip(
        one.case.gpus,
        result.batch_sizes,
        result.num_microbatches,
        result.microbatch_sizes,
        (f"{share:.1%}" for share in state_shares(one.case.problem, result)),
        strict=True,
    )
    words: list[str] = []
    for (gpu, batch, number, size, share), same in itertools.groupby(sorted(rows)):
        work = f"{batch} samples, {number} x {size}" if batch else "no samples"
        words.append(f"{sum(1 for _ in same)} x {gpu}: {work}, {share} of the state each")
    return words
