"""How far the launches of a profile are from those of steps a while later, on this host.

    python experiments/solve_k/launch_drift.py --workloads 0.37B/4x512 0.95B/2x512 --seconds 300

A plan of a launch-bound model is no better than its profile's launches, and hosts drift. So three
blocks of each workload are launched in turns of 0.1 s for some minutes, with nothing beside them.
Each window of the length of a profile is then compared with the seconds of steps that begin a while
after it: the root mean square of the differences is what no profile of this length can know. At the
end DIR/launch_drift.json has all turns, and the table is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from experiments.common.hardware import describe
from experiments.common.records import write_json
from experiments.common.tables import markdown
from experiments.solve_k.planned_steps import subject_of
from experiments.solve_k.regime_cells import Cell
from hytrain.tools.profiler.layer_bench import LayerBench
from hytrain.tools.profiler.layer_samples import DEPTH

_PROFILES = (5.0, 10.0, 20.0, 30.0, 60.0, 90.0, 120.0)
"""Seconds of a window that is compared with what follows."""
_GAP = 20.0
"""Seconds from its end to the steps."""
_STEPS = 36.0
"""Seconds of these."""
_FEWEST_WINDOWS = 8
_LEAST_SECONDS = 75.0
"""Of launching: less leaves no row of the table."""
HEADER = ("profile s", "windows", "off by (rms)", "least", "largest")


@dataclass(frozen=True)
class Turn:
    """Launches of all workloads, one after the other.

    Attributes:
        begin: seconds since the first.
        seconds: of a pass of each workload.
    """

    begin: float
    seconds: tuple[float, ...]


def relative(turns: Sequence[Turn]) -> list[float]:
    """Of each turn, the mean over the workloads of what each took as a share of its own mean."""
    means = [statistics.mean(each) for each in zip(*(turn.seconds for turn in turns), strict=True)]
    return [
        statistics.mean(took / mean for took, mean in zip(turn.seconds, means, strict=True))
        for turn in turns
    ]


def ratios(turns: Sequence[Turn], profile: float) -> list[float]:
    """Of every window of a profile's seconds, its mean over that of the steps after the gap.

    Args:
        turns: ascending.
        profile: seconds of a window.
    """
    values = relative(turns)
    found: list[float] = []
    last = turns[-1].begin
    for turn in turns:
        begin = turn.begin + profile + _GAP
        if begin + _STEPS > last:
            break
        means: list[float] = []
        for start, seconds in ((turn.begin, profile), (begin, _STEPS)):
            inside = [
                value
                for value, each in zip(values, turns, strict=True)
                if start <= each.begin < start + seconds
            ]
            means.append(statistics.mean(inside))
        found.append(means[0] / means[1])
    return found


def rows(turns: Sequence[Turn]) -> list[list[str]]:
    """Under HEADER: one for each length of a profile that leaves some windows."""
    found: list[list[str]] = []
    for profile in _PROFILES:
        each = ratios(turns, profile)
        if len(each) < _FEWEST_WINDOWS:
            break
        off = math.sqrt(statistics.mean((ratio - 1.0) ** 2 for ratio in each))
        found.append([f"{profile:g}", str(len(each)), f"{off:.1%}"])
        found[-1] += [f"{ratio:.3f}" for ratio in (min(each), max(each))]
    return found


def measure(workloads: Sequence[str], device: torch.device, seconds: float) -> list[Turn]:
    """Turns for so many seconds."""
    turns: list[Turn] = []
    with contextlib.ExitStack() as stack:
        benches: list[tuple[int, LayerBench]] = []
        for text in workloads:
            cell = Cell.of(f"{text}/1")
            subject = subject_of(cell)
            bench = LayerBench(subject, subject.copy(DEPTH, device), device)
            stack.callback(bench.close)
            stack.enter_context(bench.recomputing())
            bench.measure(cell.batch, 0.2)  # libraries choose and compile their kernels
            benches.append((cell.batch, bench))
        start = time.perf_counter()
        while (begin := time.perf_counter() - start) < seconds:
            taken = tuple(bench.launch_seconds(batch) for batch, bench in benches)
            turns.append(Turn(begin, taken))
    return turns


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--workloads", nargs="+", required=True, help="MODEL/BATCHxTOKENS")
    add("--seconds", type=float, default=300.0, help="of launching")
    add("--out", type=Path, default=Path(), help="folder for launch_drift.json")
    arguments = parser.parse_args()
    if arguments.seconds < _LEAST_SECONDS:
        raise SystemExit(f"--seconds {arguments.seconds:g}: give {_LEAST_SECONDS:g} or more")
    if not torch.cuda.is_available():
        raise SystemExit("launch_drift.py needs a GPU: a CPU computes, nothing is launched")
    arguments.out.mkdir(parents=True, exist_ok=True)
    turns = measure(arguments.workloads, torch.device("cuda", 0), arguments.seconds)
    record = {"command": sys.argv, "hardware": describe("cuda")}
    record["turns"] = [[turn.begin, *turn.seconds] for turn in turns]
    write_json(arguments.out / "launch_drift.json", record)
    print(markdown(HEADER, rows(turns)))


if __name__ == "__main__":
    main()
