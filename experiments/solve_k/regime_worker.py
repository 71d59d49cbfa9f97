"""A process of regimes.py: k solved, then fixed fractions in turns with it, then the rival."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

from experiments.common.records import Json
from experiments.common.worker import Recorder
from experiments.solve_k.regime_cells import Cell, Contest
from hytrain.cost.step import StepCosts
from hytrain.errors import ConfigError

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)
_FAR = 1.4
"""If a number's step takes more than this times the best, the numbers beyond it are left out."""
_AFTER_MOVE = 10
"""Steps after a move, which are not compared."""
_DUEL_STEPS = 10
_DUEL_TURNS = 9
_DUEL_SECONDS = 40.0
"""Seconds after which no more turns begin, except for the first three."""
_WINDOW_SECONDS = 1.2
"""Length of a window of steps of which only the last is waited for."""
_CONTENDS = 1.15
"""Numbers whose step takes at most this times the best are measured again in later rounds."""


def costs_record(costs: StepCosts | None) -> Json | None:
    """Costs for a file: first and last layer, the median of those between, with four digits."""
    if costs is None:
        return None

    def median(values: Sequence[Any]) -> Any:
        return statistics.median(values) if isinstance(values[0], float) else values[0]

    def rounded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rounded(v) for key, v in value.items()}
        return float(f"{value:.4g}") if isinstance(value, float) else value

    record = dataclasses.asdict(costs)
    first, *blocks, last = record.pop("layers")
    block = {key: median([each[key] for each in blocks]) for key in first}
    record |= {"first": first, "block": block | {"name": "block"}, "blocks": len(blocks)}
    return rounded(record | {"last": last})


def run(job: Json, recorder: Recorder) -> None:
    """Measures a cell."""
    contest = Contest(Cell.of(job["cell"]), job["device"])
    has_rival = job["turns"] > 0 and contest.rival_fits
    compute = [] if has_rival else contest.compute(9)[4:]
    if has_rival:
        contest.start_rival()
    contest.start_engine()
    recorder.reached("engine")
    contest.train(job["steps"])
    recorder.reached("solved")
    stayed = contest.train(job["stay"], seconds=job["stay_seconds"])
    recorder.reached("stayed")
    decisions = contest.system.decisions()
    solved, layers = decisions[-1].gpu_layers_target, contest.system.num_layers
    moves = [d for d in decisions if d.gpu_layers_before != d.gpu_layers_target]
    sweep = _Sweep(contest, layers, solved)
    fixed = sweep.run(job["rounds"])
    best = min(fixed, key=lambda number: fixed[number])
    recorder.reached("swept")
    duel = sweep.duel(best)
    rival: Json = {}
    if has_rival:
        contest.engine.set_gpu_fraction(solved / layers)
        rival = _beside_rival(contest, job["turns"])
    recorder.put(
        layers=layers,
        compute=statistics.median(compute) if compute else rival["compute"],
        beside=rival,
        fixed={str(number): seconds for number, seconds in fixed.items()},
        solved=solved,
        stayed=len(stayed),
        best=best,
        sweep_over_best=fixed[solved] / fixed[best],
        solved_over_best=statistics.median(duel) if duel else 1.0,
        costs=sweep.costs,
        launch_bound=any("launch-bound" in d.reason for d in decisions),
        late_moves=sum(d.step > job["steps"] for d in moves),
    )
    contest.close()


class _Sweep:
    """Steps at fixed numbers of GPU layers, the solved one among them.

    The sweep goes from the solved number to both sides, until a number takes so much longer than
    the best that none beyond it can be the best. Those that can be are then measured in turns:
    steps of one host differ by 10 to 30 % within a minute.
    """

    def __init__(self, contest: Contest, layers: int, solved: int) -> None:
        self._contest = contest
        self._layers = layers
        self._solved = solved
        self._seen: dict[int, list[float]] = {}
        self.costs: Json = {}

    def run(self, rounds: int) -> dict[int, float]:
        """Measures, and returns median seconds by number of GPU layers."""
        # Else other numbers of threads would be tried while these steps are compared.
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

        The best of a sweep may be the number that was measured while the host was fastest. So it is
        measured again, in steps that are queued as in training.

        Args:
            best: the other number; no turns if it is the solved one.
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
        """Measures steps with this number of GPU layers; False if memory has no room for them."""
        try:
            self._contest.engine.set_gpu_fraction(number / self._layers)
        except ConfigError:
            return False
        # Moves end during the first of these steps.
        self._seen.setdefault(number, []).extend(self._contest.train(9)[4:])
        if number in (0, self._layers // 2, self._layers, self._solved):
            self.costs[str(number)] = costs_record(self._contest.system.costs())
        return True

    def _median(self, number: int) -> float:
        return statistics.median(self._seen[number])

    def _best(self) -> float:
        return min(map(self._median, self._seen))


def _beside_rival(contest: Contest, turns: int) -> Json:
    """The engine, the rival and bare passes in turns: medians, and medians of the turns' ratios.

    Of steps that are each waited for, and ("queued") of windows of which only the end is waited
    for, as in training.
    """
    runs = {"hytrain": contest.train, "all_gpu": contest.all_gpu, "compute": contest.compute}
    for train in runs.values():
        train(4)  # the rival's first steps allocate, and compile
    waited: dict[str, list[float]] = {name: [] for name in runs}
    queued: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name in list(runs) if turn % 2 == 0 else reversed(list(runs)):
            waited[name].append(statistics.median(runs[name](7)[2:]))
            # Enough steps that the work which the last one leaves to the GPU counts little.
            own = statistics.median(waited.get("hytrain") or waited[name])
            steps = max(9, min(27, round(_WINDOW_SECONDS / own)))
            seconds = contest.queued(lambda name=name, steps=steps: runs[name](steps))
            queued[name].append(seconds / steps)
    found: Json = {}
    for prefix, seen in (("", waited), ("queued_", queued)):
        found |= {f"{prefix}{name}": statistics.median(times) for name, times in seen.items()}
        for name in ("all_gpu", "compute"):
            pairs = zip(seen["hytrain"], seen[name], strict=True)
            found[f"{prefix}hytrain_over_{name}"] = statistics.median(a / b for a, b in pairs)
    return found
