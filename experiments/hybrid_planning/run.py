"""Search times of hybrid plans, beside what the published searches took.

    python experiments/hybrid_planning/run.py [--cases DIR] [--repeats N] [--big]

Prints, for every case, seconds from the case's files to the plan (median and least of the repeats,
wall and CPU), shortest paths computed, the cost, and what was published. Everything is in one
process of one thread. Costs are simulated from profiles.
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
from hytrain.tools.hybrid import search  # noqa: E402
from hytrain.tools.hybrid.case_files import read_case  # noqa: E402
from hytrain.tools.hybrid.problem import Options, Problem, TpSpeed  # noqa: E402

PUBLISHED = {
    "row1": ("0.098", "0.078", "1795.45"),
    "row2": ("17.8", "7.1", "2089.19"),
    "row3": ("0.83", "0.54", "1111.39"),
    "row4": ("962", "391", "1158.36"),
}
"""Figures of the published code, with constants tp1_bs16 and tp_speed "first": seconds of Metis'
search and of its improved variant, and their best cost."""


def timed(name: str, make: Callable[[], Problem], speed: TpSpeed, repeats: int) -> list[str]:
    """A row of the table: seconds from the files to the plan, and the last plan."""
    walls: list[float] = []
    cpus: list[float] = []
    results: list[search.Result] = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        results.append(search.plan(make()))
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    result = results[-1]
    return [
        name,
        speed,
        *(f"{seconds:.3f}" for seconds in (median(walls), min(walls), median(cpus), min(cpus))),
        str(result.evaluations),
        f"{result.cost:.2f}" + (" optimal" if result.is_optimal else ""),
        *(PUBLISHED.get(name, ("", "", "")) if speed == "first" else ("", "", "")),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Search times of hybrid plans.")
    parser.add_argument("--cases", type=Path, default=ROOT.parent / "shared/plan_cases/hybrid")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--big", action="store_true", help="1,024 GPUs of 4 types, 80 layers")
    parser.add_argument("--out", type=Path, help="the numbers as JSON")
    arguments = parser.parse_args()
    if not arguments.cases.is_dir():
        parser.error(f"--cases {arguments.cases}: no such folder")
    head = ["case", "tp_speed", "s", "least", "CPU s", "least", "paths", "cost, ms"]
    rows = [[*head, "Metis s", "improved s", "Metis cost"]]
    speeds: tuple[TpSpeed, ...] = ("slowest", "first")
    for case in PUBLISHED:
        for speed in speeds:

            def make(case: str = case, speed: TpSpeed = speed) -> Problem:
                return read_case(arguments.cases / case, Options(tp_speed=speed))

            rows.append(timed(case, make, speed, arguments.repeats))
    if arguments.big:
        rows.append(timed("1,024 GPUs", synthetic_case.problem, "slowest", 1))
    print("\n".join(align(rows, left=(0, 1), width=150)))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"\npeak memory of the process: {peak:.2f} GiB; costs are simulated from profiles")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([dict(zip(rows[0], r, strict=True)) for r in rows[1:]]))


if __name__ == "__main__":
    main()
