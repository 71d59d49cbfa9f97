"""Machines at random, and what a training on one of them must keep to."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hytrain.formats.moment_kinds import state_bytes
from tests.support.machines import PARAMETERS, Machine, Training

SETTLING, STAYING, FOLLOWING = 60, 300, 60
"""Steps until the best is found, in which it is kept, and until a change has been followed."""
ENDING = 10
"""Steps after SETTLING in which a number that is still being tried is left again."""
LATE = "late at the best"
"""A promise that was kept within ENDING more steps."""
MOST_MOVES = 2
_SHORT = 0.06
MOST_MEASURED = 0.4
"""Share of the first 500 steps; all that a measured one takes is its marks."""


def a_machine(chance: random.Random) -> Machine:
    """Launch-bound or not; noise of 1 to 5 %."""

    def between(low: float, high: float) -> float:
        return math.exp(chance.uniform(math.log(low), math.log(high)))

    common = {
        "layers": chance.randint(8, 48),
        "noise": chance.uniform(0.01, 0.05),
        "drift": chance.choice([0.0, 0.0, 0.02, 0.05]),
        "outliers": chance.choice([0.0, 0.0, 0.02]),
    }
    if chance.random() < 0.4:
        compute = between(0.02, 0.12)
        cpu = compute * between(0.3, 4.0)
        return Machine(
            **common,
            compute=compute,
            cpu=cpu,
            gpu=cpu * chance.uniform(0.02, 0.08),
            interference=chance.uniform(0.05, 0.9),
            launches=compute * chance.uniform(0.0, 0.15),
            waits_hide=chance.random() < 0.3,
        )
    compute = between(0.06, 1.5)
    cpu = compute * between(0.1, 4.0)
    return Machine(
        **common,
        compute=compute,
        cpu=cpu,
        gpu=cpu * chance.uniform(0.02, 0.08),
        launches=compute * chance.uniform(0.0, 0.02),
        late=chance.choice([0.0, 0.0, chance.uniform(0.0, 0.12)]),
    )


def a_change(training: Training, chance: random.Random) -> str:
    """Something real changes; returns what, in words."""
    machine = training.machine
    kind = chance.choice(["longer batch", "shorter batch", "fewer cores", "less memory"])
    if kind == "longer batch":
        # The GPU is the slower one then.
        longer = {"compute": 4 * machine.compute, "interference": 0.0, "waits_hide": False}
        training.machine = replace(machine, **longer)
    elif kind == "shorter batch":
        training.machine = replace(machine, compute=machine.compute / 2)
    elif kind == "fewer cores":
        more = min(0.9, 1.5 * machine.interference)
        training.machine = replace(machine, cpu=2 * machine.cpu, interference=more)
    else:
        fits = chance.randint(1, machine.layers)
        limit = fits * (state_bytes("fp32", PARAMETERS) + 2 * PARAMETERS)
        training.limits = replace(training.limits, gpu=limit)
    return kind


@dataclass(frozen=True)
class Miss:
    """A promise that was not kept.

    Attributes:
        what: in words.
        machine: of which.
        seed: of the run.
        by: how far: a share of the step, moves, or a share of the steps.
    """

    what: str
    machine: Machine
    seed: int
    by: float

    @property
    def regime(self) -> str:
        kind = "launch-bound" if self.machine.interference > 0.0 else "GPU-bound"
        return (
            f"{kind}{', late' if self.machine.late else ''}{', drift' * (self.machine.drift > 0)}"
        )


def _most(training: Training) -> float:
    """Share of the step by which it may be longer than the best."""
    return 0.05 if training.best < _SHORT else 0.03


def misses(seed: int) -> list[Miss]:
    """What a training on the machine of this seed does not keep to."""
    chance = random.Random(seed)
    first = a_machine(chance)
    training = Training(first, seed)
    found: list[Miss] = []

    def check(what: str) -> None:
        if training.regret > _most(training):
            found.append(Miss(what, training.machine, seed, training.regret))

    training.run(SETTLING)
    check("not at the best")
    moves = 0
    if found:
        moves = training.run(ENDING)
        if training.regret <= _most(training):
            found[0] = replace(found[0], what=LATE)
    moves += training.run(SETTLING + STAYING - training.step)
    if moves > MOST_MOVES:
        found.append(Miss("moves", first, seed, moves))
    check("left the best")
    training.run(500 - training.step)
    if training.num_measured > MOST_MEASURED * training.step:
        found.append(Miss("measures", first, seed, training.num_measured / training.step))
    kind = a_change(training, chance)
    training.run(FOLLOWING)
    check(f"{kind} not followed")
    return found


def report(seeds: Iterable[int]) -> str:
    """Shares of machines that miss, by what and by regime."""
    counts: Counter[str] = Counter()
    regimes: Counter[str] = Counter()
    number = missed = 0
    lines: list[str] = []
    for seed in seeds:
        number += 1
        found = misses(seed)
        missed += bool(found)
        for miss in found:
            counts[miss.what] += 1
            regimes[f"{miss.what}: {miss.regime}"] += 1
            lines.append(f"{seed} {miss.what} {miss.by:.3f} {miss.machine}")
    text = [f"{missed} of {number} machines miss something"]
    text += [f"{count / number:6.3f} {what}" for what, count in counts.most_common()]
    text += [f"{count:4d} {what}" for what, count in regimes.most_common()]
    return "\n".join([*lines, *text])
