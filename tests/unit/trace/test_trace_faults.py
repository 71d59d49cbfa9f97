"""A fault in a simulated run is named as what the GPU waits for; parts sum to steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.trace_schedule import (
    BACKWARD,
    CPU,
    D2H,
    DATA,
    FORWARD,
    GATHER,
    H2D,
    LATE_D2H,
    LATE_H2D,
    LAUNCH,
    NORM,
    REDUCE,
    STARVED,
    SYNC,
    UPDATE,
    USER,
    Schedule,
    rewrite,
    write,
)

from hytrain.tools.trace import causes
from hytrain.tools.trace.analysis import Analysis, analyse
from hytrain.tools.trace.load import load

FAULT = 4000
"""Microseconds: more than anything else takes."""
# All of it hides: layers are many, and the first ones are updated on the GPU.
HIDDEN = Schedule(layers=8, steps=5, gpu_layers=(0, 1, 2))
ONE = Schedule(layers=6, steps=5)
SHORT = Schedule(layers=6, steps=5, room=1)
TWO = Schedule(layers=6, steps=5, ranks=2, gpu_layers=(0, 1, 2))
SYNCED = Schedule(layers=4, steps=5, sync_line="train.py:31", gpu_layers=(0, 1, 2, 3))
LATE = {"rank": -1, "step": 3}


def run(folder: Path, schedule: Schedule, first: int = 2) -> Analysis:
    analysis = analyse(load(write(folder, schedule, first=first)))
    for steps in analysis.steps.values():
        for one in steps:
            assert sum(one.parts.values()) == one.step.length
            assert sum(blame.length for blame in one.idle) == one.step.length - one.busy
    return analysis


FAULTS = {
    "a late copy to the host": (ONE.fault(LATE_D2H, FAULT, step=3, layer=0), "late gradients", 0),
    "a slow copy to the host": (ONE.fault(D2H, FAULT, step=3, layer=0), "gradients to host", 0),
    "all copies to the host": (ONE.taking(**{D2H: FAULT}), "gradients to host", None),
    "a late copy to the GPU": (ONE.fault(LATE_H2D, FAULT, step=3, layer=0), "late weights", 0),
    "a slow copy to the GPU": (ONE.fault(H2D, FAULT, step=3, layer=0), "weights to GPU", 0),
    "all copies to the GPU": (ONE.taking(**{H2D: FAULT}), "weights to GPU", None),
    "a copy of a middle layer": (ONE.fault(H2D, 3 * FAULT, step=3, layer=2), "weights to GPU", 2),
    "a slow update": (ONE.fault(CPU, FAULT, step=3, layer=0), "CPU Adam", 0),
    "an update of a middle layer": (ONE.fault(CPU, 4 * FAULT, step=3, layer=3), "CPU Adam", 3),
    "too few cores": (ONE.taking(**{CPU: FAULT}), "CPU Adam", None),
    "no room beside slow updates": (SHORT.taking(**{CPU: FAULT}), "CPU Adam", None),
    "no room beside slow copies": (SHORT.taking(**{D2H: FAULT}), "gradients to host", None),
    "a starved thread": (ONE.fault(STARVED, FAULT, step=3, layer=0), "starved CPU Adam", 0),
    "a data loader": (ONE.fault(DATA, 5 * FAULT, step=3), "data loading", None),
    "an .item()": (SYNCED.fault(SYNC, FAULT, step=3), "synchronization", None),
    "launches of one layer": (ONE.fault(LAUNCH, 5 * FAULT, step=3, layer=4), "launch-bound", 4),
    "all launches": (HIDDEN.taking(**{LAUNCH: FAULT}), "launch-bound", None),
    "clipping": (
        Schedule(layers=6, steps=5, gpu_layers=(0,), clipped=(2, 3, 4)).taking(**{CPU: 1500}),
        *("clipping", None),
    ),
    "the norm's collective": (
        Schedule(layers=6, steps=5, ranks=2, clipped=(3,)).fault(NORM, FAULT, step=3),
        *("communication", None),
    ),
    "a slow gather": (TWO.fault(GATHER, FAULT, step=3, layer=2), "communication", 2),
    "a slow reduction": (
        Schedule(layers=6, steps=5, ranks=2).fault(REDUCE, FAULT, step=3, layer=0),
        *("communication", 0),
    ),
    "a slow rank": (TWO.fault(FORWARD, FAULT, rank=1, step=3, layer=3), "slow rank", None),
    "a rank whose loader is slow": (TWO.fault(DATA, 9 * FAULT, rank=1, step=3), "slow rank", None),
    "a rank whose CPU is slow": (
        Schedule(layers=6, steps=5, ranks=2).fault(CPU, FAULT, rank=1, step=3, layer=0),
        *("slow rank", 0),
    ),
    "code between steps": (SYNCED.fault(USER, FAULT, step=3), "host code", None),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, tmp_path: Path) -> None:
    schedule, cause, layer = FAULTS[name]
    # On the others of a slow rank it is the rank, on itself what made it slow.
    first = next(one for one in run(tmp_path, schedule).causes if one.rank == 0)
    assert first.cause == cause
    if layer is not None:
        assert first.layer == layer
    if cause == causes.SLOW_RANK:
        assert (first.rank, first.late_rank) == (0, 1)


def test_the_line_and_the_function_are_named(tmp_path: Path) -> None:
    schedule, *_ = FAULTS["an .item()"]
    assert run(tmp_path, schedule).causes[0].detail == "train.py:31"
    schedule, *_ = FAULTS["code between steps"]
    detail = run(tmp_path, schedule).causes[0].detail
    assert detail == "log (train.py:12), after the synchronization of train.py:31"


def test_what_a_late_rank_did_is_named(tmp_path: Path) -> None:
    schedule, *_ = FAULTS["a rank whose CPU is slow"]
    causes_of_others = [one for one in run(tmp_path, schedule).causes if one.rank == 0]
    assert causes_of_others[0].detail == "CPU Adam layer 0"
    schedule, *_ = FAULTS["the norm's collective"]
    assert run(tmp_path, schedule).causes[0].detail == "all_reduce"


@pytest.mark.parametrize(("what", "activity"), [(FORWARD, "forward"), (BACKWARD, "backward")])
def test_a_layer_that_computes_slowly_is_named(what: str, activity: str, tmp_path: Path) -> None:
    (slow,) = run(tmp_path, ONE.fault(what, FAULT, layer=4)).slow_layers
    usual = ONE.times[what] * 1e-6
    assert (slow.layer, slow.activity) == (4, activity)
    assert (slow.usual, slow.seconds) == pytest.approx((usual, usual + FAULT * 1e-6))
    assert not slow.is_beside_ranks


def test_a_slow_update_on_the_gpu_is_a_part_of_the_step(tmp_path: Path) -> None:
    """The GPU does not idle: nothing else is blamed."""
    analysis = run(tmp_path, HIDDEN.fault(UPDATE, FAULT))
    parts = analysis.mean_parts(0)
    assert parts["update on the GPU"] == pytest.approx(3 * 4100e-6, rel=0.3)
    assert analysis.slow_layers == ()


def test_without_launches_a_mid_phase_gap_is_unresolved(tmp_path: Path) -> None:
    """Nothing proves that the host was late: no time of a launch, no change of what it did."""
    schedule = Schedule(layers=6, steps=5, gpu_layers=tuple(range(6)), with_launches=False).fault(
        LAUNCH, 9 * FAULT, step=3, layer=4
    )
    assert run(tmp_path, schedule).causes[0].cause == causes.UNRESOLVED


def test_a_chain_that_was_not_recorded_is_unresolved(tmp_path: Path) -> None:
    """Updates missing from the file: the copy's begin proves nothing."""
    (path,) = write(tmp_path, ONE.fault(CPU, FAULT, step=3, layer=0), first=2)
    path = rewrite(path, lambda event: [event] if event.get("cat") != "cpu_update" else [])
    (first, *_) = analyse(load([path])).causes
    assert first.cause == causes.UNRESOLVED
