"""Makes a failing case smaller, as long as it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from fuzz.cases import Case, ModelSpec, Step


def _usual(kind: type, without: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
    """Values of fields that are not drawn: their defaults, and ``more`` for those without one."""
    defaults = {one.name: one.default for one in fields(kind) if one.default is not MISSING}
    return {name: value for name, value in defaults.items() if name not in without} | more


MODEL = _usual(
    ModelSpec,
    **{"embed": "linear", "norm": "none", "unused": "none", "frozen": "none", "stack": "list"},
    **{"recompute": "none", "outside": "none", "twice": (), "bias": False},
    **{"root": False, "scalar": False, "single": False},
)
CASE = _usual(
    Case,
    ("refusal", "follows", "accumulation"),
    **{"delays": "", "clipping": 1e6, "check_overflow": None, "op": None, "accum_dtype": None},
    bf16=False,
)
OPTIMIZER = {"schedule": "constant", "client": False, "share": 1.0, "kind": "AdamW"}
STEP = _usual(Step, ("inside", "after"), factor=1.0)


def smaller(case: Case) -> Iterator[Case]:
    """Yields cases with one thing less."""
    for name, value in CASE.items():
        yield replace(case, **{name: value})
    if case.then is not None:
        for less in smaller(case.then):
            yield replace(case, then=less)
    for number in range(len(case.before)):
        yield replace(case, before=case.before[:number] + case.before[number + 1 :])
    for number in range(len(case.steps)):
        if len(case.steps) > 1:
            yield replace(case, steps=case.steps[:number] + case.steps[number + 1 :])
    for number, step in enumerate(case.steps):
        for less in _steps(step):
            yield replace(case, steps=(*case.steps[:number], less, *case.steps[number + 1 :]))
    for name, value in MODEL.items():
        yield replace(case, model=replace(case.model, **{name: value}))
    for name, value in OPTIMIZER.items():
        yield replace(case, optimizer=replace(case.optimizer, **{name: value}))
    yield replace(case, optimizer=replace(case.optimizer, groups=case.optimizer.groups[:1]))
    build = case.build
    for name in ("zero", "section", "offload", "top"):
        pairs = getattr(build, name)
        for number in range(len(pairs)):
            less = pairs[:number] + pairs[number + 1 :]
            yield replace(case, build=replace(build, **{name: less}))
    yield replace(case, build=replace(build, fractions=None))
    yield replace(case, build=replace(build, gpu=(0.0,) * case.ranks))


def _steps(step: Step) -> Iterator[Step]:
    for name, value in STEP.items():
        yield replace(step, **{name: value})
    yield replace(step, skip=tuple(tuple(() for _ in own) for own in step.skip))
    for name in ("inside", "after"):
        events: tuple[Any, ...] = getattr(step, name)
        for number in range(len(events)):
            yield replace(step, **{name: events[:number] + events[number + 1 :]})


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Returns the smallest case on the way down that still ``fails``."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for less in smaller(case):
            if repr(less) != repr(case) and fails(less):
                case, is_smaller = less, True
                break
    return case
