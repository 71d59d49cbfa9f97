"""How far the launches of a profile are from those of steps a while later, on this host.

    python experiments/solve_k/launch_drift.py --workloads 0.37B/4x512 0.95B/2x512 --seconds 300

A plan of a launch-bound model is no better than its profile's launches, and hosts drift. So three
blocks of each workload are launched in turns of 0.1 s for some minutes, with nothing beside them.
Each window of the length of a profile is then compared with the seconds of steps that begin a while
after it: the root mean square of the differences is what no profile of this length can know.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records, report, runner
from experiments.common.records import Json
from experiments.common.worker import Recorder
from experiments.solve_k.regime_cells import Cell

PROFILES = (5.0, 10.0, 20.0, 30.0, 60.0, 90.0, 120.0)
"""Seconds of a window that is compared with what follows."""
GAP, STEPS = 20.0, 36.0
"""Seconds from its end to the steps, and of these."""
FEWEST_WINDOWS = 8
START_SECONDS = 30.0

Turn = Sequence[float]
"""Seconds since the first turn, then those of a pass of each workload."""


def ratios(turns: Sequence[Turn], profile: float) -> list[float]:
    """Of every window of a profile's seconds, its mean over that of the steps after the gap.

    Args:
        turns: ascending. A turn counts as the mean over the workloads of what each took as a share
            of its own mean.
        profile: seconds of a window.
    """
    means = [statistics.mean(each) for each in zip(*(turn[1:] for turn in turns), strict=True)]
    values = [
        (turn[0], statistics.mean(t / mean for t, mean in zip(turn[1:], means, strict=True)))
        for turn in turns
    ]

    def mean(begin: float, seconds: float) -> float:
        return statistics.mean(value for at, value in values if begin <= at < begin + seconds)

    last = values[-1][0]
    return [
        mean(at, profile) / mean(at + profile + GAP, STEPS)
        for at, _ in values
        if at + profile + GAP + STEPS <= last
    ]


def rows(result: Json) -> list[Json]:
    """A row for each length of a profile that leaves some windows."""
    (record,) = result["jobs"]
    if record["status"] != records.OK:
        return [report.failure(record)]
    found: list[Json] = []
    for profile in PROFILES:
        each = ratios(record["ranks"][0]["turns"], profile)
        if len(each) < FEWEST_WINDOWS:
            break
        off = math.sqrt(statistics.mean((ratio - 1.0) ** 2 for ratio in each))
        row: Json = {"profile_s": profile, "windows": len(each), "off_by_rms": f"{off:.1%}"}
        found.append(row | {"least": report.short(min(each)), "largest": report.short(max(each))})
    return found


def run(job: Json, recorder: Recorder) -> None:
    """The worker: turns for so many seconds."""
    import torch

    from experiments.solve_k.planned_steps import subject_of
    from hytrain.tools.profiler.layer_bench import LayerBench
    from hytrain.tools.profiler.layer_samples import DEPTH

    device = torch.device("cuda", 0) if job["device"] == "cuda" else torch.device("cpu")
    turns: list[list[float]] = []
    with contextlib.ExitStack() as stack:
        benches: list[tuple[int, LayerBench]] = []
        for text in job["workloads"]:
            cell = Cell.of(f"{text}/1")
            subject = subject_of(cell)
            bench = LayerBench(subject, subject.copy(DEPTH, device), device)
            stack.callback(bench.close)
            stack.enter_context(bench.recomputing())
            bench.measure(cell.batch, 0.2)  # libraries choose and compile their kernels
            benches.append((cell.batch, bench))
        start = time.perf_counter()
        while (begin := time.perf_counter() - start) < job["launching_seconds"]:
            turns.append([begin, *(bench.launch_seconds(batch) for batch, bench in benches)])
    recorder.put(turns=turns)


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = runner.parser(__doc__, model=None, budget=3000.0)
    parser.add_argument("--workloads", nargs="+", required=True, help="MODEL/BATCHxTOKENS")
    parser.add_argument("--seconds", type=float, default=300.0, help="of launching")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        parser.error("launch_drift.py needs a GPU: a CPU computes, nothing is launched")
    job = {
        **{"label": "launches", "worker": "experiments.solve_k.launch_drift"},
        **{"device": options.device, "workloads": options.workloads},
        **{"launching_seconds": options.seconds, "seconds": options.seconds + START_SECONDS},
    }
    return runner.main(options, [job], report.of_result(rows))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
