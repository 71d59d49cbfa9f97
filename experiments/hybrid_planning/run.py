"""Search times of hybrid plans: the exact search beside the published ones.

    python experiments/hybrid_planning/run.py [--cases DIR] [--repeats N] [--metis ROW ...] [--big]

Prints, for every case, milliseconds from the case's files to the plan (median and least of the
repeats, wall and CPU), evaluations with their unit, cost, and what was published. Everything is in
one process of one thread. Costs are simulated from profiles.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from experiments.hybrid_planning import synthetic_case  # noqa: E402
from hytrain.formats.text_table import align  # noqa: E402
from hytrain.tools.hybrid import metis, search  # noqa: E402
from hytrain.tools.hybrid.case_files import read_case  # noqa: E402
from hytrain.tools.hybrid.problem import Options, Problem, TpSpeed  # noqa: E402
from hytrain.tools.hybrid.report import EVALUATIONS  # noqa: E402
from hytrain.tools.hybrid.search import Result  # noqa: E402

ROWS = ("row1", "row2", "row3", "row4")
PUBLISHED = {
    "metis": {
        "row1": ("0.098", "612", 1795.45),
        "row2": ("17.8", "58078", 2089.19),
        "row3": ("0.83", "3734", 1111.39),
        "row4": ("962", "1714619", 1158.36),
    },
    "metis-improved": {
        "row1": ("0.078", "562", 1795.45),
        "row2": ("7.1", "41208", 2089.19),
        "row3": ("0.54", "3482", 1111.39),
        "row4": ("391", "1553492", 1158.36),
    },
}
"""Seconds, count and best cost of the published code, constants tp1_bs16, tp_speed "first"."""


def timed(
    make: Callable[[], Problem], solve: Callable[[Problem], Result], repeats: int
) -> dict[str, float | Result]:
    """The last result, and seconds from the files to it."""
    walls: list[float] = []
    cpus: list[float] = []
    result: Result | None = None
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        result = solve(make())
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    assert result is not None
    return {
        "result": result,
        "median": median(walls),
        "least": min(walls),
        "cpu": median(cpus),
        "least_cpu": min(cpus),
    }


def row(case: str, method: str, speed: str, measured: dict[str, float | Result]) -> list[str]:
    result = measured["result"]
    assert isinstance(result, Result)
    seconds, count, cost = PUBLISHED.get(method, {}).get(case, ("", "", None))
    own = "" if method == "exact" else str(result.count)
    return [
        case,
        f"{method}, {speed}",
        *(f"{measured[name]:.3f}" for name in ("median", "least", "cpu", "least_cpu")),
        f"{result.evaluations} {EVALUATIONS[method]}",
        f"{result.cost:.2f}" + ("" if not result.is_optimal else " optimal"),
        own,
        seconds,
        count,
        "" if cost is None else f"{cost:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=Path, default=ROOT.parent / "shared/plan_cases/hybrid")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--metis", nargs="*", choices=ROWS, default=["row1", "row3"])
    parser.add_argument("--big", action="store_true", help="1,024 GPUs of 4 types, 80 layers")
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    arguments = parser.parse_args()
    head = ["case", "method", "s", "least", "CPU s", "least", "evaluations", "cost, ms", "count"]
    rows = [[*head, "published s", "published count", "published cost"]]
    if not arguments.cases.is_dir():
        parser.error(f"--cases {arguments.cases}: no such folder")
    speeds: tuple[TpSpeed, ...] = ("slowest", "first")
    for case in ROWS:
        for speed in speeds:
            options = Options(tp_speed=speed)
            measured = timed(
                lambda: read_case(arguments.cases / case, options),  # noqa: B023
                search.plan,
                arguments.repeats,
            )
            rows.append(row(case, "exact", speed, measured))
        variants: tuple[metis.Variant, ...] = ("metis", "metis-improved")
        for variant in variants if case in arguments.metis else ():
            measured = timed(
                lambda: read_case(arguments.cases / case, Options(tp_speed="first")),  # noqa: B023
                lambda problem: metis.plan(problem, variant),  # noqa: B023
                1,
            )
            rows.append(row(case, variant, "first", measured))
    if arguments.big:
        measured = timed(synthetic_case.problem, search.plan, 1)
        rows.append(row("1,024 GPUs", "exact", "slowest", measured))
    print("\n".join(align(rows, left=(0, 1, 6), width=150)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\npeak memory of the process: {peak:.2f} GiB; costs are simulated from profiles")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([dict(zip(rows[0], r, strict=True)) for r in rows[1:]]))


if __name__ == "__main__":
    main()
