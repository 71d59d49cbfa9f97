"""One rank of a case: its stages, one after another.

    python -m experiments.unequal_gpus.worker JOB.json FOLDER

FOLDER/rank<i>.json is written after every stage.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.processes import end
from experiments.common.records import Json
from experiments.common.stages import Clean, Known, RunStage, pin, rank_process

if TYPE_CHECKING:
    from experiments.common.ranks import Ranks
    from experiments.unequal_gpus.bench import Bench


def run_stage(bench: Bench, stage: Json, known: Known, folder: Path) -> Json:
    """One stage's result; raises what it raises."""
    from experiments.unequal_gpus import planning

    kind = stage["kind"]
    rank = bench.ranks.rank
    if kind == "slowdown":
        return bench.slowdown()
    if kind == "profile":
        return bench.profile(folder)
    profile = planning.file_of(known["profile"])
    if kind == "plan":
        return bench.plan(profile, folder)
    if kind == "alone":
        plan = known.get("plan")
        share = bench.case.batch // bench.ranks.size
        if plan is not None:
            share = plan[0]["planned"]["batch_sizes"][rank] or share
        return bench.alone(share, profile)
    return bench.together(kind, known["plan"][rank])


def prepare(job: Json, ranks: Ranks, folder: Path) -> tuple[RunStage, Clean]:
    """What a stage is run by."""
    from experiments.unequal_gpus.bench import Bench
    from experiments.unequal_gpus.cases import Case

    first = job["stages"][0]
    bench = Bench(Case(**first["case"]), first["settings"], ranks)

    def run(stage: Json, known: Known) -> Json:
        with bench.slowed():
            return run_stage(bench, stage, known, folder)

    return run, bench.clean


if __name__ == "__main__":
    pin(os.environ["STAGES_CORES"])
    end(rank_process(sys.argv[1:], prepare))
