"""Holds plans of random clusters against the oracle, and writes down what comes of each.

    python tests/unit/planner/hold_plans.py --out held.jsonl [--first 0] [--end 200]

A line a cluster; those that a file has already are left out, so it can be stopped and gone on with,
and several may write to files of their own. Ends with the table, and 1 where a plan did not hold.
`make test-uneven-plans` runs it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from plan_oracle import may_be_as_fast
from planner_large_clusters import large_problem

from hytrain.formats.text_table import align
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.result import Plan

GAP = 0.02
"""A plan's step, by the limits of the cost model, is longer than the best by no more."""
_TIGHTER = (0.005, 0.01, GAP)


@dataclass(frozen=True)
class Held:
    """What came of one cluster.

    Attributes:
        seed: its own.
        stage: of ZeRO.
        ranks: of it.
        batch: samples.
        fits: whether there is a plan.
        step: seconds by the limits, the shortest that was found; 0 where nothing fits.
        gap: between that and the planner's own bound.
        chosen_gap: between that bound and the chosen plan, which may be faster by the finer model.
        predicted: seconds of a step by that one; not shorter than the bound either.
        denied: the least of 0.5, 1 and 2 % such that the oracle denies a step shorter by more;
            infinite where it denies none, or where it does not deny that something fits.
        seconds: of CPU that planning took.
        oracle_seconds: that the oracle took.
    """

    seed: int
    stage: int
    ranks: int
    batch: int
    fits: bool
    step: float
    gap: float
    chosen_gap: float
    predicted: float
    denied: float
    seconds: float
    oracle_seconds: float

    @property
    def predicted_gap(self) -> float:
        """By what share the predicted step is longer than the bound."""
        return self.predicted * (1.0 + self.gap) / self.step - 1.0

    @property
    def holds(self) -> bool:
        """Whether both bounds say that no plan is faster by more than the gap."""
        return self.gap <= GAP and self.denied <= GAP


def hold(seed: int) -> Held:
    """Plans for a cluster and asks the oracle whether some plan may be faster."""
    problem = large_problem(seed)
    begin = time.process_time()
    plan = make_plan(problem)
    planned = time.process_time()
    if isinstance(plan, Plan):
        assert plan.lower_bound <= plan.shortest_step <= plan.step_seconds
        assert plan.step_seconds <= plan.predicted_seconds
        step, gap = plan.shortest_step, plan.shortest_step / plan.lower_bound - 1.0
        chosen_gap, predicted = plan.limits_gap, plan.predicted_seconds
        denied = next(
            (part for part in _TIGHTER if not may_be_as_fast(problem, step / (1.0 + part))),
            float("inf"),
        )
    else:
        # What is said not to fit does not, however long a step may be.
        step = gap = chosen_gap = predicted = 0.0
        denied = float("inf") if may_be_as_fast(problem, 1e6) and not plan.is_close else 0.0
    return Held(
        seed=seed,
        stage=problem.stage,
        ranks=problem.cluster.num_ranks,
        batch=problem.batch,
        fits=isinstance(plan, Plan),
        step=step,
        gap=gap,
        chosen_gap=chosen_gap,
        predicted=predicted,
        denied=denied,
        seconds=planned - begin,
        oracle_seconds=time.process_time() - planned,
    )


def table(records: list[Held]) -> str:
    """Gaps and times by stage."""
    denied = [f"oracle: {part:.1%}" for part in _TIGHTER]
    heading = ("stage", "clusters", "plans", "own gap", "worst", *denied)
    rows = [(*heading, "predicted", "up to 2 %", "worst", "CPU s", "worst")]
    for stage in sorted({one.stage for one in records}):
        own = [one for one in records if one.stage == stage]
        fitting = [one for one in own if one.fits]
        gaps = [one.gap for one in fitting]
        predicted = [one.predicted_gap for one in fitting]
        rows.append(
            (
                str(stage),
                str(len(own)),
                str(len(fitting)),
                f"{statistics.median(gaps):.3%}",
                f"{max(gaps):.2%}",
                *(str(sum(one.denied <= part for one in fitting)) for part in _TIGHTER),
                f"{statistics.median(predicted):.2%}",
                str(sum(one <= GAP for one in predicted)),
                f"{max(predicted):.1%}",
                f"{statistics.median(one.seconds for one in own):.1f}",
                f"{max(one.seconds for one in own):.1f}",
            )
        )
    return "\n".join(align(rows))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    words = "files of JSON lines; all are read, the first is written to"
    parser.add_argument("--out", type=Path, required=True, nargs="+", help=words)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--end", type=int, default=200)
    arguments = parser.parse_args()
    records = {
        one.seed: one
        for path in arguments.out
        if path.exists()
        for one in (Held(**json.loads(line)) for line in path.read_text().splitlines())
    }
    arguments.out[0].parent.mkdir(parents=True, exist_ok=True)
    with arguments.out[0].open("a") as file:
        for seed in range(arguments.first, arguments.end):
            if seed not in records:
                records[seed] = hold(seed)
                file.write(json.dumps(asdict(records[seed])) + "\n")
                file.flush()
    found = [records[seed] for seed in sorted(records)]
    print(table(found))
    failed = [one.seed for one in found if not one.holds]
    longer = [one.seed for one in found if one.chosen_gap > GAP]
    print(f"chosen by the finer model although their limits are longer by more than 2 %: {longer}")
    print(f"did not hold: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
