"""Draws what a case does beside and between its steps: saves, traces, states off the device.

Also what its user does between steps and from step to step, see `between.py`. All are drawn from
random streams of their own: the rest of a seed's case is what it was before.
"""

from __future__ import annotations

import random
from dataclasses import replace

from fuzz.cases import Case, Event, ModelSpec, Step

INPUTS = ("input_gradient", "frozen_backward")
"""Kinds of events that compute the gradients of inputs."""

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""The states that can leave the device."""


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
    case = replace(case, async_saves=is_async, traced=traced, steps=tuple(steps))
    case = _with_changes(random.Random(f"changes {case.seed} {case.follows}"), case)
    if case.then is None:
        return case
    return replace(case, then=with_phases(replace(case.then, model=case.model)))


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


# -- from step to step -----------------------------------------------------------------------------


def _with_changes(rng: random.Random, case: Case) -> Case:
    """Makes steps differ and adds what a user does between them, in two of three cases."""
    if not case.follows:
        case = replace(case, model=_model(rng, case.model))
    if rng.random() < 0.3:
        before, steps, is_fresh = list[Step](), list[Step](), True
        for step in case.steps:
            is_sum = step.style == "sum" and not _may_sum(case, before)
            step = _with_most_uses(case, step, is_fresh)
            steps.append(replace(step, style="two") if is_sum else step)
            before.append(step)
            is_fresh = any(event.build is not None for event in step.after)
        return replace(case, steps=tuple(steps))
    if case.batch_keys == "deepspeed" and rng.random() < 0.6:
        case = replace(case, accumulation=rng.randint(1, case.num_micro_batches))
    build, is_fresh = case.build, True
    steps: list[Step] = []
    for step in case.steps:
        now = replace(case, build=build)
        steps.append(_changed(rng, now, step, is_fresh, steps))
        is_fresh = False
        for event in step.after:
            if event.build is not None:
                build, is_fresh = event.build, True
    hooked = tuple(_event(rng, "hook") for _ in range(2) if rng.random() < 0.15)
    before = tuple(_between(rng, case)) if rng.random() < 0.5 else ()
    case = replace(case, steps=tuple(steps), hooked=hooked, before=before)
    return _with_grounds(_with_reach(_with_the_same_layers(case)))


def _with_the_same_layers(case: Case) -> Case:
    """Removes the freezing of weights if all steps must use the same layers, in backward too.

    Documented: layer-major under ZeRO-3.
    """
    builds = [case.build, *(e.build for step in case.steps for e in step.after if e.build)]
    sections = [dict(build.section) for build in builds if build.stage == 3]
    is_by_layer = any(section.get("accumulation") == "layer_major" for section in sections)
    if case.mode != "train_batch" or not is_by_layer:
        return case
    steps = [replace(step, after=_without_toggles(step.after)) for step in case.steps]
    return replace(case, steps=tuple(steps), before=_without_toggles(case.before))


def _without_toggles(events: tuple[Event, ...]) -> tuple[Event, ...]:
    return tuple(event for event in events if event.kind != "toggle")


def _with_reach(case: Case) -> Case:
    """Makes all ranks alike in the first backward that goes further than a cut one.

    Documented: under ZeRO-3 the first backward must reach all that later ones reach, or all ranks
    the same the first time.
    """
    if case.ranks == 1:
        return case
    steps: list[Step] = []
    build = case.build
    is_whole, lowest = False, -1  # of the engine's backwards: whether one was whole, lowest cut
    for step in case.steps:
        cut = -1 if step.cut is None else step.cut
        if build.stage == 3 and cut < lowest:
            step = replace(step, skip=tuple(((), *own[1:]) if own else () for own in step.skip))
        is_whole = is_whole or (cut < 0 and not any(own[0] for own in step.skip if own))
        lowest = -1 if is_whole else cut if lowest < 0 else min(cut, lowest)
        steps.append(step)
        for event in step.after:
            if event.build is not None:
                build, is_whole, lowest = event.build, False, -1
    return replace(case, steps=tuple(steps))


def _with_grounds(case: Case) -> Case:
    """Removes faults in backward, which frozen weights may keep from occurring."""
    events = [*case.before, *(event for step in case.steps for event in step.after)]
    if all(event.kind != "toggle" for event in events):
        return case
    steps = [
        replace(step, fault=None)
        if step.fault is not None and step.fault[0] == "backward"
        else step
        for step in case.steps
    ]
    return replace(case, steps=tuple(steps))


def _model(rng: random.Random, model: ModelSpec) -> ModelSpec:
    tiled = rng.choice(("reentrant", "not_reentrant")) if rng.random() < 0.2 else "none"
    if model.recompute != "none":
        tiled = "none"
    if tiled == "reentrant" and (model.embed == "none" or model.frozen not in ("none", "head")):
        tiled = "not_reentrant"  # nothing before a block asks for a gradient
    return replace(model, tiled=tiled, tower=rng.random() < 0.2)


def _with_most_uses(case: Case, step: Step, is_fresh: bool) -> Step:
    # Documented: on several ranks the first backward must be the one with the most uses.
    if is_fresh and case.ranks > 1 and case.model.tiled == "reentrant":
        return replace(step, skip=tuple(tuple(() for _ in own) for own in case.micro_samples))
    return step


def _changed(
    rng: random.Random, case: Case, step: Step, is_fresh: bool, before: list[Step]
) -> Step:
    model = case.model
    is_by_layer = dict(case.build.section).get("accumulation") == "layer_major"
    is_sharded = case.ranks > 1 and case.build.stage == 3
    # Documented: layer by layer under ZeRO-3 all steps use the same layers.
    must_agree = case.build.stage == 3 and is_by_layer and case.mode == "train_batch"
    step = _with_most_uses(case, step, is_fresh)
    if case.batch_keys == "deepspeed" and case.num_micro_batches > 1:
        step = _with_micros(step, rng.choice((0, rng.randint(1, case.num_micro_batches))))
    tower: tuple[int, ...] = ()
    if model.tower and (must_agree or rng.random() < 0.5):
        everyone = tuple(range(case.ranks))
        some = tuple(rank for rank in everyone if rng.random() < 0.5)
        tower = everyone if must_agree or rng.random() < 0.4 else some
    pieces = rng.choice((0, 1, 2, 3, 4)) if model.tiled != "none" else 1
    cut = None
    must_be_most = case.ranks > 1 and (model.tiled == "reentrant" or is_by_layer)
    # Documented: updates that are committed as gradients arrive cannot be taken back.
    must_be_most |= case.is_direct and model.tiled == "reentrant"
    if must_be_most and model.tiled != "none":
        # Blocks that are left out may end layer-major steps: what comes then is a first one again.
        is_first = is_fresh or (is_by_layer and any(any(rank) for rank in step.skip))
        pieces = 2 if is_first else min(pieces, 2)
    # Documented: under ZeRO-3 the first must reach all that later ones reach, layer by layer on one
    # rank as well; and where updates follow gradients, none may get more of them later.
    must_reach_all = is_by_layer and (case.build.stage == 3 or case.is_direct)
    can_cut = (
        not (is_fresh and (must_be_most or is_sharded or must_reach_all)) and model.frozen != "head"
    )
    if can_cut and model.head != "none" and rng.random() < 0.1:
        cut = rng.randrange(len(model.inner))
    if step.style == "sum" and not _may_sum(case, before):
        step = replace(step, style="two")
    if step.style in ("two", "sum"):
        step = replace(step, forwards=rng.choice((2, 2, 3)))
    is_alone = (step.micros or case.num_micro_batches) == 1 and not step.idle and not step.inside
    if case.mode == "hand" and step.style == "plain" and is_alone and rng.random() < 0.3:
        style = _style(rng, case, before)
        step = replace(step, style=style, forwards=rng.choice((2, 3)))
        cut = None if style == "penalty" else cut  # the input has no gradient then
    inside = step.inside
    may_look = case.mode == "hand" and step.style == "plain" and not step.idle
    if may_look and not case.is_direct and rng.random() < 0.1:
        micro = rng.randrange(step.micros or case.num_micro_batches)
        inside = (*inside, (micro, _event(rng, _input_gradient(rng, case))))
    after = list(step.after)
    if rng.random() < 0.5:
        at = rng.randint(0, len(after))
        after[at:at] = _between(rng, case)
    return replace(step, tower=tower, pieces=pieces, cut=cut, inside=inside, after=tuple(after))


def _with_micros(step: Step, micros: int) -> Step:
    if not micros:
        return step
    poison = step.poison
    if poison is not None:
        poison = (poison[0], min(poison[1], micros - 1), poison[2])
    inside = tuple((micro, event) for micro, event in step.inside if micro < micros)
    return replace(step, micros=micros, poison=poison, inside=inside)


def _style(rng: random.Random, case: Case, before: list[Step]) -> str:
    styles = ["dropped", "two"]
    if "reentrant" not in (case.model.recompute, case.model.tiled):
        styles.append("penalty")
        if _may_sum(case, before):
            styles.append("sum")
    return rng.choice(styles)


def _may_sum(case: Case, before: list[Step]) -> bool:
    # Documented: on several ranks the first backward must be the one with the most uses, and parts
    # that run a graph of their own count for each forward.
    is_reentrant = "reentrant" in (case.model.recompute, case.model.tiled)
    return case.ranks == 1 or not is_reentrant or not before


def _input_gradient(rng: random.Random, case: Case) -> str:
    # Reentrant recomputation knows no torch.autograd.grad.
    is_reentrant = "reentrant" in (case.model.recompute, case.model.tiled)
    return "frozen_backward" if is_reentrant else rng.choice(INPUTS)


def _between(rng: random.Random, case: Case) -> list[Event]:
    kinds = [_input_gradient(rng, case), "toggle", "hook", "unhook", "copy", "load_module"]
    found = [_event(rng, rng.choice(kinds)) for _ in range(rng.choice((1, 1, 2)))]
    # Of two writes between which the engine does not look, it sees what the last one has left.
    is_twice = all(event.kind in ("copy", "load_module") for event in found)
    return found[:1] if is_twice else found


def _event(rng: random.Random, kind: str) -> Event:
    return Event(kind, rng.randrange(1000), round(rng.random(), 3))
