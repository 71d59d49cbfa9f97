"""A process of regimes.py: measures cells of one number of cores, one after the other.

What a process has taken once, imports, the driver's context, compiled kernels, the caller's cells
share; model and engine are a cell's own. Each prints its result when it is measured, with the
seconds that its parts took.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common.item_processes import print_result
from experiments.common.records import Json
from experiments.solve_k.regime_cells import Cell, Contest
from hytrain.placement.costs import StepCosts

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
_FAR = 1.4
"""Ratio to the best number from which on those beyond it are left out."""
_AFTER_MOVE = 10
"""Steps behind a move, which are not compared."""
_DUEL_STEPS = 10
_DUEL_TURNS = 9
_DUEL_SECONDS = 40.0
"""After which no more turns begin, but for three."""
_WINDOW_SECONDS = 1.2
"""Of a window of steps of which only the last is waited for."""
_CONTENDS = 1.15
"""A number that takes at most so much of the best one's steps is measured in the later rounds."""


def _median_cost(values: Sequence[Any]) -> Any:
    return statistics.median(values) if isinstance(values[0], float) else values[0]


def costs_record(costs: StepCosts | None) -> Json | None:
    """For a file: the first and the last layer, the median of those between, four digits."""
    if costs is None:
        return None

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(v) for key, v in value.items()}
        return float(f"{value:.4g}") if isinstance(value, float) else value

    record = costs.to_json()
    first, *blocks, last = record.pop("layers")
    block = {key: _median_cost([each[key] for each in blocks]) for key in first}
    record |= {"first": first, "block": block | {"name": "block"}, "blocks": len(blocks)}
    return rounded(record | {"last": last})


class _Watch:
    """Seconds of a cell's parts."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: Json = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = round(now - self._last, 2), now


def measure(cell: Cell, arguments: argparse.Namespace) -> Json:
    """A cell: k solved, then fixed fractions in turns with it, then the rival."""
    watch = _Watch()
    contest = Contest(cell, arguments.device)
    has_rival = arguments.turns > 0 and contest.rival_fits
    compute = [] if has_rival else contest.compute(9)[4:]
    if has_rival:
        contest.start_rival()
    watch.lap("model")
    contest.start_engine()
    watch.lap("engine")
    placement = contest.engine.optimizer.placement
    contest.train(arguments.steps)
    watch.lap("solve")
    stayed = contest.train(arguments.stay, seconds=arguments.stay_seconds)
    watch.lap("stay")
    layers = placement.decisions[0].num_layers
    solved = placement.controller.num_gpu_layers
    reasons = list(placement.decisions)
    early, late = _moves(contest.engine, 0), _moves(contest.engine, arguments.steps)
    sweep = _Sweep(contest, layers, solved)
    fixed = sweep.run(arguments.rounds)
    watch.lap("sweep")
    best = min(fixed, key=lambda number: fixed[number])
    duel = sweep.duel(best)
    watch.lap("duel")
    rival: Json = {}
    if has_rival:
        contest.engine.set_gpu_fraction(solved / layers)
        rival = _beside_rival(contest, arguments.turns)
        watch.lap("beside")
    contest.close()
    watch.lap("end")
    return {
        "layers": layers,
        "compute": statistics.median(compute) if compute else rival["compute"],
        "all_gpu": rival.get("all_gpu"),
        "beside": rival,
        "fixed": {str(number): seconds for number, seconds in fixed.items()},
        "solved": solved,
        "settled_seconds": statistics.median(stayed or [0.0]),
        "stayed": len(stayed),
        "best": best,
        "sweep_over_best": fixed[solved] / fixed[best],
        "solved_over_best": statistics.median(duel) if duel else 1.0,
        "duel": duel,
        "costs": sweep.costs,
        "launch_bound": any("launch-bound" in d.reason for d in reasons),
        "moves": early,
        "late_moves": len(late),
        "seconds": watch.seconds,
    }


def _moves(engine: Any, after: int) -> list[Json]:
    return [
        {"step": d.step, "from": d.gpu_layers_before, "to": d.gpu_layers_target, "why": d.reason}
        for d in engine.optimizer.placement.decisions
        if d.step > after and d.gpu_layers_before != d.gpu_layers_target
    ]


class _Sweep:
    """Steps at fixed numbers of layers, the solved one among them.

    It goes from that one to both sides, until a number takes so much longer than the best that
    none beyond it can be the best. Those that may be are then measured in turns: steps of one host
    differ by 10 to 30 % within a minute.
    """

    def __init__(self, contest: Contest, layers: int, solved: int) -> None:
        self._contest = contest
        self._layers = layers
        self._solved = solved
        self._seen: dict[int, list[float]] = {}
        self.costs: Json = {}

    def run(self, rounds: int) -> dict[int, float]:
        """Median seconds by number of layers."""
        # Other numbers of threads would be tried while these steps are compared.
        placement = self._contest.engine.optimizer.placement
        if placement.tuned_threads is not None:
            placement.tuned_threads.end()
        beside = max(2, self._layers // 10)
        numbers = {round(f * self._layers) for f in FRACTIONS}
        numbers |= {self._solved - beside, self._solved + beside} & set(range(self._layers + 1))
        self._visit(self._solved)
        below = sorted((n for n in numbers if n < self._solved), reverse=True)
        for side in (below, sorted(n for n in numbers if n > self._solved)):
            for number in side:
                if not self._visit(number) or self._median(number) > _FAR * self._best():
                    break
        for turn in range(1, rounds):
            near = [n for n in sorted(self._seen) if self._median(n) <= _CONTENDS * self._best()]
            near = sorted({*near, self._solved}, reverse=bool(turn % 2))
            for number in near:
                self._visit(number)
        return {number: self._median(number) for number in sorted(self._seen)}

    def duel(self, best: int) -> list[float]:
        """Ratios of the solved number's steps to another's, measured in turns.

        The least of a sweep may be what was measured while the host was fastest. So that number is
        measured again, in steps that are queued as in training.

        Args:
            best: the number; no turns where it is the solved one.
        """
        ratios: list[float] = []
        begin = time.perf_counter()
        while best != self._solved and len(ratios) < _DUEL_TURNS:
            seconds: dict[int, float] = {}
            for number in (best, self._solved)[:: 1 if len(ratios) % 2 else -1]:
                self._contest.engine.set_gpu_fraction(number / self._layers)
                self._contest.train(_AFTER_MOVE)
                seconds[number] = self._contest.queued_steps(_DUEL_STEPS)
            ratios.append(seconds[self._solved] / seconds[best])
            if len(ratios) >= 3 and time.perf_counter() - begin > _DUEL_SECONDS:
                break
        return ratios

    def _visit(self, number: int) -> bool:
        """Whether memory has room for so many."""
        from hytrain.errors import ConfigError

        try:
            self._contest.engine.set_gpu_fraction(number / self._layers)
        except ConfigError:
            return False
        # Moves end beside the first of them.
        self._seen.setdefault(number, []).extend(self._contest.train(9)[4:])
        costs = self._contest.engine.optimizer.placement.costs()
        if number in (0, self._layers // 2, self._layers, self._solved):
            self.costs[str(number)] = costs_record(costs)
        return True

    def _median(self, number: int) -> float:
        return statistics.median(self._seen[number])

    def _best(self) -> float:
        return min(map(self._median, self._seen))


def _beside_rival(contest: Contest, turns: int) -> Json:
    """The engine, the rival and bare passes in turns: medians, and medians of the turns' ratios.

    Of steps that are each waited for, and ("queued") of windows whose end alone is, as in training.
    """
    runs = {"hytrain": contest.train, "all_gpu": contest.all_gpu, "compute": contest.compute}
    for run in runs.values():
        run(4)  # the rival's first steps allocate, and compile
    waited: dict[str, list[float]] = {name: [] for name in runs}
    queued: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            waited[name].append(statistics.median(runs[name](7)[2:]))
            steps = _steps_of_window(waited["hytrain"])
            seconds = contest.queued(lambda name=name, steps=steps: runs[name](steps))
            queued[name].append(seconds / steps)
    found: Json = {}
    for prefix, seen in (("", waited), ("queued_", queued)):
        found |= {f"{prefix}{name}": statistics.median(times) for name, times in seen.items()}
        for name in ("all_gpu", "compute"):
            pairs = zip(seen["hytrain"], seen[name], strict=True)
            found[f"{prefix}hytrain_over_{name}"] = statistics.median(a / b for a, b in pairs)
    return found


def _steps_of_window(waited: Sequence[float]) -> int:
    """So many that what the last one leaves the GPU to do counts for little."""
    return max(9, min(27, round(_WINDOW_SECONDS / statistics.median(waited))))


def add_options(parser: argparse.ArgumentParser) -> None:
    """What regimes.py passes on to its processes."""
    add = parser.add_argument
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--steps", type=int, default=60, help="in which k is solved")
    add("--stay", type=int, default=60, help="more, in which it should not change")
    add("--stay-seconds", type=float, default=60.0, help="which these take at most")
    add("--rounds", type=int, default=3, help="of the fixed numbers, the near ones")
    add("--turns", type=int, default=5, help="with the rival; 0: without it")


def main() -> None:
    """A process: its results on standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="+")
    add_options(parser)
    arguments = parser.parse_args()
    cells = {text: Cell.of(text) for text in arguments.cells}
    (cores,) = {cell.cores for cell in cells.values()}
    if hasattr(os, "sched_setaffinity"):  # before torch makes its threads
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    begin = time.perf_counter()
    torch = importlib.import_module("torch")
    for name in ("transformers", "hytrain.engine"):
        importlib.import_module(name)
    started = round(time.perf_counter() - begin, 2)
    for text, cell in cells.items():
        result = measure(cell, arguments)
        result["seconds"]["imports"], started = started, 0.0
        print_result(text, result)
        torch.compiler.reset()
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
