"""One rank of sharded.py: the models, one after another.

    python -m experiments.moment_kinds.sharded_worker JOB.json FOLDER

FOLDER/rank<i>.json is written after every model, FOLDER/rank<i>_<model>.json within each.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common.processes import end
from experiments.common.records import GIB, Job, Json
from experiments.common.stages import (
    Clean,
    Known,
    RunStage,
    empty_caches,
    pin,
    rank_process,
)

if TYPE_CHECKING:
    from experiments.common.ranks import Ranks


def run_stage(stage: Json, folder: Path, rank: int) -> Json:
    """A model's step, timed on this rank.

    Ranks step together, so all make the same number of steps, however long these take: the parent
    ends them.
    """
    from experiments.moment_kinds.worker import Kind
    from experiments.solve_k.bench import brief_decision
    from experiments.solve_k.recorder import HostMemoryGuard, Recorder

    job = Job.from_json(stage["job"])
    options = job.entry.options
    recorder = Recorder(folder / f"rank{rank}_{stage['name'].replace(' ', '_')}.json")
    guard = HostMemoryGuard(recorder, options["host_floor_gib"] * GIB)
    guard.start()
    try:
        bench = Kind(job, recorder, time.monotonic())
        bench.build()
        bench.batches = [*bench.batches[rank:], *bench.batches[:rank]]
        bench.reached("model")
        bench.choose(stage["kind"])
        bench.start()
        bench.reached("engine")
        for number in range(options["settle_steps"]):
            row = bench.step()
            layers = bench.placed.gpu_layers()
            print(f"step {number}: {row['step_seconds']} s, {layers} layers", flush=True)
        bench.reached("settled")
        timed = bench.timed(windows=2, steps=options["timed_steps"])
        bench.reached("timed")
        result = {
            **timed,
            "num_parameters": bench.num_parameters,
            "decisions": [brief_decision(each) for each in bench.placed.decisions()],
        }
        bench.close()
    finally:
        guard.stop()
    return {**result, "host_available_least_bytes": guard.least_bytes}


def prepare(job: Json, ranks: Ranks, folder: Path) -> tuple[RunStage, Clean]:
    """What a stage is run by."""
    del job

    def run(stage: Json, known: Known) -> Json:
        del known
        return run_stage(stage, folder, ranks.rank)

    return run, empty_caches


if __name__ == "__main__":
    pin(os.environ["STAGES_CORES"])
    end(rank_process(sys.argv[1:], prepare))
