"""The judge sees small changes: each thing that a case has shown is changed a little."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fuzz import between, cases
from fuzz.cases import Case, Event, Step
from fuzz.drawing import draw
from fuzz.judge import Judge
from fuzz.player import SINGLE, Player, Trace
from fuzz.refusals import REFUSALS
from fuzz.shrink import shrink

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("process_group")]

EVENTS = ("fp32", "copies", "module_state", "safe_get", "eval", "save", "load", "round_trip")


def _case() -> Case:
    """Two steps of one rank with a bit of everything that is noted."""
    case = next(
        case
        for case in (draw(seed, 1) for seed in range(1000))
        if case.mode == "hand" and case.refusal is None and not case.is_direct
        and case.model.frozen == "none" and case.clipping == 0.3 and not case.bf16
        and case.build.stage == 2 and not case.precision
    )  # fmt: skip
    own = (tuple(() for _ in case.micro_samples[0]),)
    steps = [Step(1.0, own, inside=((0, Event("gradient", 1)),)) for _ in range(2)]
    steps[-1] = replace(steps[-1], after=tuple(Event(kind) for kind in EVENTS))
    return replace(case, steps=tuple(steps))


@pytest.fixture(scope="module")
def played(process_group: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Trace]:
    case = _case()
    trace = Player(case, Path(tmp_path_factory.mktemp("fuzz"))).play()
    Judge(case, [trace]).check()
    return case, trace


def _nudge(tensor: torch.Tensor) -> None:
    """Changes the last bit of the last element."""
    flat = tensor.view(-1)
    flat[-1] = torch.nextafter(flat[-1], torch.tensor(torch.inf))


def _seen(trace: Trace, what: str) -> Any:
    return next(value for kind, value in reversed(trace.seen) if kind == what)


def _last(values: dict[str, Any]) -> Any:
    return list(values.values())[-1]


def _change_gradient(trace: Trace) -> None:
    trace.steps[0].gradients[0] *= 1.001


def _leave_out(trace: Trace) -> None:
    del trace.steps[1].gradients[0]


def _change_loss(trace: Trace) -> None:
    trace.steps[1].losses[0] *= 1.0001


def _change_norm(trace: Trace) -> None:
    scale, norm, coefficient = trace.steps[1].outcome or (0.0, 0.0, 0.0)
    trace.steps[1].outcome = (scale, norm * 1.0001, coefficient)


def _change_scale(trace: Trace) -> None:
    scale, norm, coefficient = trace.steps[1].outcome or (0.0, 0.0, 0.0)
    trace.steps[1].outcome = (scale * 1.0001, norm, coefficient)


def _change_loss_scale(trace: Trace) -> None:
    trace.steps[1].loss_scale *= 2


def _change_rate(trace: Trace) -> None:
    trace.steps[1].groups[0]["weight_decay"] += 0.1


def _change_skip(trace: Trace) -> None:
    trace.steps[1].skipped = True


def _change_evaluation(trace: Trace) -> None:
    at = next(i for i, (kind, _) in enumerate(trace.seen) if kind == "eval")
    number, loss = trace.seen[at][1]
    trace.seen[at] = ("eval", (number, loss * 1.0001))


CHANGES: dict[str, Callable[[Trace], None]] = {
    "gradient": _change_gradient,
    "a layer left out": _leave_out,
    "loss": _change_loss,
    "norm": _change_norm,
    "scale": _change_scale,
    "loss scale": _change_loss_scale,
    "hyper-parameter": _change_rate,
    "skip": _change_skip,
    "evaluation": _change_evaluation,
    "master weight": lambda trace: _nudge(_last(_seen(trace, "fp32"))["fp32"]),
    "moment": lambda trace: _nudge(_last(_seen(trace, "fp32"))["exp_avg_sq"]),
    "training copy": lambda trace: _nudge(_last(_seen(trace, "copies"))),
    "state dict": lambda trace: _nudge(_last(_seen(trace, "module_state"))),
    "one parameter": lambda trace: _nudge(_seen(trace, "safe_get")[1][1]),
    "gradient of one": lambda trace: _seen(trace, "gradient")[1].mul_(1.001),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_small_change_is_seen(played: tuple[Case, Trace], change: str) -> None:
    case, trace = played
    changed = copy.deepcopy(trace)
    CHANGES[change](changed)
    with pytest.raises(AssertionError):
        Judge(case, [changed]).check()


def test_where_two_kernels_round_a_wrong_update_is_seen(played: tuple[Case, Trace]) -> None:
    """As if a GPU has had the state: a last bit may differ, a missing step may not."""
    case, trace = played
    changed = copy.deepcopy(trace)
    master = _last(_seen(changed, "fp32"))["fp32"]
    _nudge(master)
    judge = Judge(case, [changed])
    judge.is_bitwise = False
    judge.check()
    master += 1e-5
    judge = Judge(case, [changed])
    judge.is_bitwise = False
    with pytest.raises(AssertionError, match="off by"):
        judge.check()


def test_an_unknown_refusal_and_one_that_did_not_come_are_seen(played: tuple[Case, Trace]) -> None:
    case, trace = played
    refused = replace(case, refusal=("hytrain.alpha", 1, "alpha"))
    with pytest.raises(AssertionError, match="was accepted"):
        Judge(refused, [trace]).check()
    with pytest.raises(AssertionError):
        Judge(refused, [Trace(refused="ConfigError: something else")]).check()


def test_a_failing_case_is_made_smaller() -> None:
    """Only what the failure needs is left."""
    found = next(c for c in map(draw, range(500)) if c.bf16 and c.model.scalar and len(c.steps) > 2)
    least = shrink(found, lambda case: case.bf16 and case.model.scalar)
    assert least.bf16
    assert least.model.scalar
    assert len(least.steps) == 1
    assert not least.steps[0].after
    assert least.build.zero == least.build.section == ()
    assert not least.model.bias


def test_a_seed_is_a_case() -> None:
    """Always the same one, and its text is enough to have it again."""
    for seed in range(50):
        case = draw(seed)
        assert case == draw(seed) or "nan" in repr(case)
        again = eval(repr(case), {**vars(cases), "inf": float("inf"), "nan": float("nan")})
        assert repr(again) == repr(case)


def test_everything_is_drawn() -> None:
    drawn = [draw(seed) for seed in range(6000)]
    assert {case.ranks for case in drawn} == {1, 2, 3}
    assert {case.build.stage for case in drawn} == {1, 2, 3}
    assert {case.mode for case in drawn} == {"hand", "train_batch"}
    steps = [step for case in drawn for step in case.steps]
    assert {step.style for step in steps} == {
        *SINGLE,
        "two",
        "sum",
        "no_sync",
        "no_sync_last",
        "dropped",
    }
    assert any(case.then is not None for case in drawn)
    assert any(event.build.zero_init for step in steps for event in step.after if event.build)
    assert {fault[0] for step in steps if (fault := step.fault)} == {"forward", "backward"}
    kinds = {event.kind for step in steps for event in step.after}
    kinds |= {event.kind for step in steps for _, event in step.inside}
    methods = {name.removeprefix("_do_") for name in vars(Player) if name.startswith("_do_")}
    assert kinds == methods | set(between.PLAYED)
    assert {event.kind for case in drawn for event in case.hooked} == {"hook"}
    assert {event.kind for case in drawn for event in case.before} >= set(between.PLAYED)
    counts = {(step.forwards, len(step.tower), step.pieces > 1, step.micros) for step in steps}
    assert {found[0] for found in counts} == {2, 3}
    assert {found[1] for found in counts} == {0, 1, 2, 3}
    assert {found[2] for found in counts} == {False, True}
    assert {found[3] for found in counts} == {0, 1, 2, 3}
    assert any(step.cut is not None for step in steps)
    refused = {case.refusal[0] for case in drawn if case.refusal is not None}
    assert refused == {refusal.path for refusal in REFUSALS}
    for name in ("stack", "embed", "head", "norm", "unused", "frozen", "recompute", "tiled"):
        assert len({getattr(case.model, name) for case in drawn}) >= 3, name
