"""A rank's list of stages, one after another, in step with the other ranks. No torch at import."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.common import records
from experiments.common.group import CONTINUED, REFUSED
from experiments.common.records import Json

if TYPE_CHECKING:
    from experiments.common.ranks import Ranks

Known = dict[str, list[Json]]
"""Results of earlier stages, one a rank."""

RunStage = Callable[[Json, Known], Json]
"""From a stage and what is known to a result; raises what the stage raises."""

Clean = Callable[[], None]
"""Gives back what a stage has left."""

Prepare = Callable[[Json, "Ranks", Path], tuple[RunStage, Clean]]
"""From the job, this rank among the others and the folder of results."""

FAILED_WAITS = 5.0
"""Seconds that a rank which failed gives the others to fail as well."""


def pin(cores: str) -> None:
    """Leaves this process some cores; before torch, which sizes its thread pools by them."""
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])


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


def empty_caches() -> None:
    """Gives back what a system has left."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rank_process(arguments: list[str], prepare: Prepare) -> int:
    """A rank's process, started with JOB.json FOLDER; FOLDER/rank<i>.json has its results.

    Returns:
        The exit status; the result file says more.
    """
    job, folder = records.read_json(Path(arguments[0])), Path(arguments[1])
    from experiments.common.ranks import Ranks

    try:
        ranks = Ranks(job["device"])
        ranks.connect()
        run, clean = prepare(job, ranks, folder)
        return run_stages(job, folder / f"rank{ranks.rank}.json", ranks, run, clean)
    except Exception:
        # The process boundary: the log has it, the parent sees that it ended.
        traceback.print_exc()
        return 1


def run_stages(job: Json, path: Path, ranks: Ranks, run: RunStage, clean: Clean) -> int:
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
