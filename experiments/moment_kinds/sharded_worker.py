"""One rank of sharded.py: the models, one after another.

    python -m experiments.moment_kinds.sharded_worker JOB.json FOLDER

FOLDER/rank<i>.json is written after every model, FOLDER/rank<i>_<model>.json within each.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
from pathlib import Path

from experiments.common import records
from experiments.common.processes import end
from experiments.common.records import GIB, Job, Json
from experiments.common.stages import Known, pin, run_stages


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


def clean() -> None:
    """Gives back what a model has left."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: list[str]) -> int:
    """Returns the exit status; the result file says more."""
    job = records.read_json(Path(arguments[0]))
    folder = Path(arguments[1])
    from experiments.common.ranks import Ranks

    try:
        ranks = Ranks(job["device"])
        ranks.connect()

        def run(stage: Json, known: Known) -> Json:
            del known
            return run_stage(stage, folder, ranks.rank)

        return run_stages(job, folder / f"rank{ranks.rank}.json", ranks, run, clean)
    except Exception:
        # The process boundary: the log has it, the parent sees that it ended.
        traceback.print_exc()
        return 1


if __name__ == "__main__":
    pin(os.environ["STAGES_CORES"])
    end(main(sys.argv[1:]))
