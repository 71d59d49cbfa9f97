"""Run the Sailor artefact's planners and hytrain's on the artefact's clusters, side by side.

    python experiments/planners/run.py --sailor DIR --out OUT
    python experiments/planners/run.py --sailor DIR --out OUT --planners hytrain
    python experiments/planners/report.py OUT/result.json

DIR is a checkout of the artefact, made ready as README.md says. One search runs at a time. What is
in OUT/result.json already is kept and not run again; it is rewritten after every search.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.hardware import describe
from experiments.common.records import Json
from experiments.planners.artefact import MODELS, QUOTAS, Artefact, Case, our_plan, their_plan
from hytrain.errors import PlanError
from hytrain.tools.hybrid.pools.cost import fits, step_seconds
from hytrain.tools.hybrid.pools.problem import Problem
from hytrain.tools.hybrid.pools.schedule import schedule_seconds
from hytrain.tools.hybrid.pools.search import plan_pools

HYTRAIN = "hytrain"
QUICK = ("Sailor", "AMP", "Atlas", "FlashFlex", "Varuna", "Piper", "Galvatron")
SLOW = ("Metis", "DTFM", "Aceso")
"""They search until their time is used up, or for hours."""

THEIR_PLANNER = Path(__file__).with_name("their_planner.py")

GRACE_SECONDS = 120.0
"""Beside the limit: to start, compile and rank; Aceso's own budget is always 200 s."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sailor", required=True, type=Path, metavar="DIR", help="a checkout of the artefact")
    add("--out", required=True, type=Path, metavar="OUT", help="folder for result.json")
    add("--planners", default=",".join((HYTRAIN, *QUICK, *SLOW)), metavar="NAME,...")
    add("--models", default=",".join(MODELS), metavar="NAME,...")
    add("--only", default="", metavar="TEXT", help="cases whose name has this")
    add(
        "--limit-seconds",
        default=120.0,
        type=float,
        help="for each search (%(default)s): of CPU time for hytrain's, of elapsed time for others",
    )
    add("--their-python", default=sys.executable, help="that runs the artefact's planners")
    add("--libraries", default="", metavar="DIR", help="with the built libplanner (README.md)")
    add("--again", action="store_true", help="run also what the result has already")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Run what is asked for."""
    options = parse(arguments)
    artefact = Artefact(options.sailor.resolve())
    path = options.out / "result.json"
    result: Json = records.read_json(path) if path.exists() else {"cases": {}}
    result["hardware"] = describe("cpu")
    result["command"] = shlex.join(["python", "experiments/planners/run.py", *arguments])
    result["artefact"] = artefact.commit
    result["limit_seconds"] = options.limit_seconds
    cases = [
        case
        for case in artefact.cases()
        if case.model in options.models.split(",") and options.only in case.name
    ]
    result["memory_gib"] = memory = _asked(options, artefact, cases[0], task="memory")["memory_gib"]
    for name in options.planners.split(","):
        for case in cases:
            of_case = result["cases"].setdefault(case.name, {"pools": dict(case.pools), "runs": {}})
            if name in of_case["runs"] and not options.again:
                continue
            problem = artefact.problem(case, memory)
            run = _hytrain if name == HYTRAIN else _other
            found = run(options, artefact, case, problem, name)
            of_case["runs"][name] = found
            records.write_json(path, result)
            print(f"{case.name}: {name}: {_line(found)}", flush=True)


def _line(found: Json) -> str:
    if "error" in found:
        return str(found["error"])
    theirs = found.get("their_seconds")
    cost = "no plan" if theirs is None else f"{theirs:.4f} s a step"
    return f"{cost}, searched for {found['search_seconds']:.3f} s"


def _hytrain(
    options: argparse.Namespace, artefact: Artefact, case: Case, problem: Problem, name: str
) -> Json:
    began = time.perf_counter()
    # Other work on the machine shall not decide how far the search comes.
    found = plan_pools(problem, max_seconds=options.limit_seconds, clock=time.process_time)
    elapsed = time.perf_counter() - began
    plan = their_plan(problem, found.plan)
    verdict = _asked(options, artefact, case, task="simulate", plans=[plan])["verdicts"][0]
    return {
        "search_seconds": elapsed,
        "cpu_seconds": found.seconds,
        "best_after_cpu_seconds": found.best_after,
        "their_seconds": verdict["seconds"],
        "their_memory_fits": verdict["fits"],
        "our_seconds": found.cost,
        "schedule_seconds": schedule_seconds(problem, found.plan),
        "bound": found.bound,
        "optimal": found.optimal,
        "evaluations": found.evaluations,
        "labels": found.labels,
        "plan": plan,
    }


def _other(
    options: argparse.Namespace, artefact: Artefact, case: Case, problem: Problem, name: str
) -> Json:
    try:
        answer = _asked(options, artefact, case, task="plan", planner=name)
    except subprocess.TimeoutExpired:
        return {"error": f"no plan within {options.limit_seconds:g} s"}
    if "error" in answer:
        return {"error": answer["error"]}
    found: Json = {
        "search_seconds": answer["seconds"],
        "cpu_seconds": answer["cpu_seconds"],
        "ranked": answer["plans"],
        "over_memory": answer["oom"],
        "their_seconds": answer.get("iteration_seconds"),
        "plan": answer["plan"],
    }
    if answer["plan"] is None:
        found["note"] = f"none of its {answer['plans']} plans fits into memory"
    elif name == "Aceso":
        found["note"] = "stages of operators, not of layers: the layer simulator cannot cost it"
    else:
        found |= our_verdict(problem, answer["plan"])
    return found


def our_verdict(problem: Problem, plan: Json) -> Json:
    """What hytrain's cost model says of another's plan."""
    try:
        ours = our_plan(problem, plan)
        return {
            "our_seconds": step_seconds(problem, ours),
            "schedule_seconds": schedule_seconds(problem, ours),
            "our_memory_fits": fits(problem, ours),
        }
    except PlanError as error:
        return {"note": f"not in hytrain's model: {error}"}


def _asked(options: argparse.Namespace, artefact: Artefact, case: Case, **request: object) -> Json:
    """The answer of a process of :mod:`.their_planner`.

    Raises:
        subprocess.TimeoutExpired: it took too long, and is gone.
        PlanError: it ended without an answer.
    """
    with tempfile.TemporaryDirectory(prefix="hytrain-planners-") as folder:
        root = Path(folder)
        # Their code looks for itself in a folder called sailor below another.
        (root / "sailor").symlink_to(artefact.folder)
        whole = {
            "root": str(root),
            "model": case.model,
            "training_config": MODELS[case.model],
            "pools": dict(case.pools),
            "cluster": artefact.cluster,
            "budget_seconds": options.limit_seconds,
            "quotas": str(artefact.folder / QUOTAS),
            "library_folders": [options.libraries] if options.libraries else [],
            **request,
        }
        records.write_json(root / "request.json", whole)
        names = [str(root / "request.json"), str(root / "answer.json")]
        command = ["nice", "-n", "10", options.their_python, str(THEIR_PLANNER), *names]
        process = subprocess.Popen(
            command,
            cwd=root,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=options.limit_seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            # Some planners start processes of their own; the session is theirs alone.
            os.killpg(process.pid, 9)
            process.communicate()
            raise
        answer = root / "answer.json"
        if not answer.exists():
            raise PlanError(f"{request['task']}: ended with {process.returncode}: {errors[-500:]}")
        return records.read_json(answer)


if __name__ == "__main__":
    main(sys.argv[1:])
