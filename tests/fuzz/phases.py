"""Draws what a case does beside and between its steps: saves, traces, states off the device.

From a stream of random numbers of its own: the rest of a seed's case is what it was before.
"""

from __future__ import annotations

import random
from dataclasses import replace

from fuzz.cases import Case, Event, Step

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""What can leave the device."""


def with_phases(case: Case) -> Case:
    """The case, perhaps with asynchronous saves, a trace, and states that leave the device."""
    rng = random.Random(f"phases {case.seed} {case.follows}")
    is_async = rng.random() < 0.4
    first = rng.randint(1, len(case.steps) + 1)
    traced = (first, first + rng.randint(1, 3)) if rng.random() < 0.2 else None
    steps: list[Step] = []
    for step in case.steps:
        saved = any(event.kind == "save" for each in steps for event in each.after)
        steps.append(_step(rng, case, step, saved=saved))
    then = None if case.then is None else with_phases(case.then)
    return replace(case, async_saves=is_async, traced=traced, steps=tuple(steps), then=then)


def _step(rng: random.Random, case: Case, step: Step, *, saved: bool) -> Step:
    after = list(step.after)
    if rng.random() < 0.12:
        after.insert(rng.randint(0, len(after)), _away(rng))
    if rng.random() < 0.1:
        after.insert(rng.randint(0, len(after)), Event("save"))
    if saved and rng.random() < 0.25:
        after.insert(rng.randint(0, len(after)), Event("load"))
    inside = step.inside
    # As for other looks: a rank that makes no backward has nothing to wait with.
    may_look = case.mode == "hand" and step.style == "plain" and not step.idle
    if may_look and not case.is_direct and rng.random() < 0.12:
        inside = (*inside, (rng.randrange(case.num_micro_batches), _away(rng)))
    return replace(step, after=tuple(after), inside=inside)


def _away(rng: random.Random) -> Event:
    chosen = tuple(name for name in STATES if rng.random() < 0.5)
    return Event("away", rng.randrange(1000), states=chosen if rng.random() < 0.5 else None)
