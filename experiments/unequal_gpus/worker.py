"""One rank of a case: its stages, one after another.

    python -m experiments.unequal_gpus.worker JOB.json FOLDER

FOLDER/rank<i>.json is written after every stage.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from experiments.offload_step import records
from experiments.offload_step.records import Json
from experiments.unequal_gpus.group import CONTINUED, REFUSED

if TYPE_CHECKING:
    from experiments.unequal_gpus.bench import Bench
    from experiments.unequal_gpus.ranks import Ranks

Known = dict[str, list[Json]]
"""Results of earlier stages, one a rank."""

RunStage = Callable[[Json, Known], Json]
"""From a stage and what is known to a result; raises what the stage raises."""

FAILED_WAITS = 5.0
"""Seconds that a rank which failed gives the others to fail as well."""


def pin(cores: str) -> None:
    """Leaves this process some cores; before torch, which sizes its thread pools by them."""
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])


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


def attempt(run: RunStage, stage: Json, known: Known) -> Json:
    """A stage's result with its status; never raises."""
    import torch

    from hytrain.errors import HyTrainError

    try:
        return {**run(stage, known), "status": records.OK}
    except torch.OutOfMemoryError as error:
        print(f"{stage['name']}: {error}", flush=True)
        return {"status": records.OUT_OF_MEMORY, "error": str(error)[:600]}
    except Exception as error:
        if isinstance(error, HyTrainError) and isinstance(error, ValueError):
            # What the user can mend; found out on all ranks, before anything was touched.
            print(f"{stage['name']}: {error}", flush=True)
            return {"status": REFUSED, "error": str(error)[:2000]}
        # The stage's boundary: the parent needs the status, whatever went wrong.
        traceback.print_exc()
        return {"status": records.FAILED, "error": f"{type(error).__name__}: {error}"[:2000]}


def run_stages(
    job: Json, path: Path, ranks: Ranks, run: RunStage, clean: Callable[[], None]
) -> int:
    """All stages whose needs are met; returns the exit status.

    Args:
        job: what the parent says.
        path: of this rank's results, written after every stage.
        ranks: this one among the others.
        run: runs a stage.
        clean: called after each.
    """
    results: Json = {}
    known: Known = {
        name: found["ranks"]
        for name, found in job["known"].items()
        if found["status"] == records.OK
    }
    for stage in job["stages"]:
        name = stage["name"]
        if set(stage.get("needs", ())) - set(known):
            continue
        result = attempt(run, stage, known)
        clean()
        results[name] = result
        records.write_json(path, results)
        print(f"{name}: {result['status']}", flush=True)
        is_good = result["status"] == records.OK
        everyone = ranks.gather(name, result, 600.0 if is_good else FAILED_WAITS)
        if any(each["status"] not in CONTINUED for each in everyone):
            return 3
        if all(each["status"] == records.OK for each in everyone):
            known[name] = everyone
    return 0


def main(arguments: list[str]) -> int:
    """Returns the exit status; the result file says more."""
    job = records.read_json(Path(arguments[0]))
    path = Path(arguments[1]) / f"rank{os.environ['RANK']}.json"
    from experiments.unequal_gpus.bench import Bench
    from experiments.unequal_gpus.cases import Case
    from experiments.unequal_gpus.ranks import Ranks

    try:
        ranks = Ranks(job["device"])
        ranks.connect()
        first = job["stages"][0]
        bench = Bench(Case(**first["case"]), first["settings"], ranks)

        def run(stage: Json, known: Known) -> Json:
            with bench.slowed():
                return run_stage(bench, stage, known, path.parent)

        return run_stages(job, path, ranks, run, bench.clean)
    except Exception:
        # The process boundary: the log has it, the parent sees that it ended.
        traceback.print_exc()
        return 1


def end(code: int) -> NoReturn:
    """Ends the process as it is."""
    sys.stdout.flush()
    sys.stderr.flush()
    # Process groups that others have left cannot be closed, and pinned memory takes long to free.
    os._exit(code)


if __name__ == "__main__":
    pin(os.environ["STAGES_CORES"])
    end(main(sys.argv[1:]))
