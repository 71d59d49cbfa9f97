"""The solver on machines at random keeps what it promises on nearly all of them."""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from hytrain.formats.moment_kinds import state_bytes
from hytrain.placement.costs import MemoryLimits
from tests.support.machines import PARAMETERS, Machine, Training

# -- machines at random, and what a training on one of them must keep to -----------------------

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


# -- the solver on machines at random keeps what it promises on nearly all of them -------------

MOST_MISSING = 0.08
"""Share of machines. Noise of 5 %, drift and thresholds that keep a number against both leave some
that settle next to the best, mostly short by a point of the step."""
FAR = 0.12
"""Of a step; none may stay so far off: after SETTLING + STAYING steps, or FOLLOWING a change."""


def check(found: list[list[Miss]], most_missing: float = MOST_MISSING) -> None:
    missing = sum(bool(each) for each in found)
    text = [f"{m.seed} {m.what} {m.by:.3f} {m.machine}" for each in found for m in each]
    assert missing <= most_missing * len(found), "\n".join(text)
    passing = ("not at the best", LATE, "moves", "measures")  # if it stays: "left the best" as well
    steps = [m for each in found for m in each if m.what not in passing]
    assert all(miss.by < FAR for miss in steps), "\n".join(text)


def test_a_few() -> None:
    check([misses(seed) for seed in range(5000, 5008)], most_missing=0.15)  # one of them


@pytest.mark.experiment
@pytest.mark.timeout(1800)
def test_many() -> None:
    print(report(range(6000, 6050)))
    check([misses(seed) for seed in range(6050, 6300)])


@pytest.mark.parametrize("interference", [0.0, 0.3])
def test_a_miss_is_seen(interference: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself: a solver that never moves misses the best, and what changes."""
    monkeypatch.setattr(
        "hytrain.placement.controller.PlacementController.apply_moves", lambda *_: None
    )
    machine = Machine(8, compute=0.1, cpu=0.5, gpu=0.01, interference=interference)
    monkeypatch.setattr(sys.modules[__name__], "a_machine", lambda _: machine)
    found = [miss.what for miss in misses(1)]
    assert "not at the best" in found
    assert any("not followed" in what for what in found)


def test_machines_differ_and_changes_are_real() -> None:
    kinds = set[str]()
    for seed in range(40):
        chance = random.Random(seed)
        machine = a_machine(chance)
        assert machine == a_machine(random.Random(seed))
        training = Training(machine, seed)
        before: tuple[Machine, MemoryLimits] = training.machine, training.limits
        kinds.add(a_change(training, chance))
        assert (training.machine, training.limits) != before
    assert kinds == {"longer batch", "shorter batch", "fewer cores", "less memory"}


def test_what_is_settled_is_measured_at_times_only() -> None:
    training = Training(Machine(16, compute=0.3, cpu=0.4, gpu=0.02, noise=0.02), 1)
    training.run(100)
    before = training.num_measured
    training.run(STAYING)
    assert training.num_measured - before <= 0.35 * STAYING
