"""Runs with Muon, and their references: the same step, and an independent loop in plain torch.

As elsewhere, the references are fed the reduced gradients that a run recorded (support/parity.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hytrain.kernels.clipping import Outcome
from hytrain.kernels.cpu_adam import AdamHyper, Gradient, commit
from hytrain.kernels.muon import MuonValues, muon_step
from support.comparisons import assert_same_bits, assert_same_on_all_ranks
from support.engines import device
from support.models import make_model
from support.parity import BETAS, DECAYS, Case, Run, Shard, expected_outcomes, learning_rate, train
from support.rounded_moments import commit_by_definition, rounding_of

ADAM_LR = 3e-3
MOMENTUM = 0.9


@dataclass(frozen=True)
class MuonCase(Case):
    """A run with Muon: DeepSpeed makes three groups of the two that ``train`` gives it."""

    method: str = "gram"
    heads: int = 0

    def __str__(self) -> str:
        heads = f"-{self.heads}heads" if self.heads else ""
        return f"{super().__str__()}-{self.method}{heads}"

    def config(self) -> dict[str, Any]:
        parameters = {
            "lr": 1e-2,
            "adam_lr": ADAM_LR,
            "momentum": MOMENTUM,
            "ns_method": self.method,
            "eps": 1e-8,
        }
        return super().config() | {"optimizer": {"type": "Muon", "params": parameters}}

    def hyper(self, step: int, made: int, *, by_muon: bool, matrix: bool) -> MuonValues | AdamHyper:
        """Returns a parameter's hyper-parameters in a step, as the run's groups have them."""
        if by_muon:
            return MuonValues(learning_rate(step, 0), DECAYS[0], MOMENTUM, self.method)  # type: ignore[arg-type]
        # GPT-2 has no matrix for Adam, by DeepSpeed's rule: the second group is the vectors'.
        lr = learning_rate(step, 1) if matrix or self.model == "gpt2" else ADAM_LR
        old = 0 if matrix else 1
        beta1, beta2 = BETAS[old]
        return AdamHyper(
            lr=lr, beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=DECAYS[old], step=made
        )


Orthogonalize = Callable[[torch.Tensor], torch.Tensor]


def plain_newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """Runs the iteration in double precision, step by step: nearly exact."""
    x = matrix.double()
    x = x.T if matrix.size(0) > matrix.size(1) else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if matrix.size(0) > matrix.size(1) else x


def plain_muon(
    weight: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, values: MuonValues
) -> None:
    """Makes one step of one matrix, in place, as Muon's author describes it."""
    momentum.mul_(values.momentum).add_(gradient, alpha=1 - values.momentum)
    update = (1 - values.momentum) * gradient + values.momentum * momentum
    rows, columns = update.shape
    update = plain_newton_schulz(update) * max(1.0, rows / columns) ** 0.5
    weight.mul_(1 - values.lr * values.weight_decay)
    weight.sub_(values.lr * update.float())


def is_muons(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter is Muon's, by DeepSpeed's rule."""
    return parameter.dim() >= 2 and not any(word in name for word in ("embed", "lm_head"))


def serial_muon(
    run: Run, outcomes: list[Outcome], until: int | None = None, *, plainly: bool = False
) -> list[Shard]:
    """Returns this rank's state after ``until`` steps of a loop over the recorded gradients.

    ``plainly``: Muon's steps are :func:`plain_muon`; else the kernel's, on the run's device.
    """
    case = run.case
    assert isinstance(case, MuonCase)
    parameters = dict(make_model(case.model).named_parameters())
    where = torch.device("cpu") if plainly else device()
    shards = [shard.clone() for shard in run.initial]
    made = 0
    for step, (gradients, outcome) in enumerate(zip(run.gradients, outcomes, strict=True), 1):
        if (until is not None and step > until) or outcome.skip:
            continue
        made += 1
        for index, shard in enumerate(shards):
            assert isinstance(shard.m, torch.Tensor)
            assert isinstance(shard.v, torch.Tensor)
            for name, first, stop in shard.slots:
                low, high = max(first, shard.begin), min(stop, shard.end)
                part = slice(low - shard.begin, high - shard.begin)
                parameter = parameters[name]
                by_muon = is_muons(name, parameter)
                hyper = case.hyper(step, made, by_muon=by_muon, matrix=parameter.dim() >= 2)
                if low >= high:
                    continue
                if isinstance(hyper, AdamHyper):
                    own = Gradient(gradients[index][part], outcome.scale, hyper)
                    state = shard.p[part], shard.m[part], shard.v[part]
                    if case.moments == "fp32":
                        commit(*state, own)
                    else:
                        commit_by_definition(*state, own, rounding_of(name, low - first))
                    continue
                if low >= first + parameter.numel():
                    continue  # padding behind another rank's
                assert low == first, f"a matrix is cut: {name}"
                part = slice(part.start, part.start + parameter.numel())
                values = (shard.p[part], shard.m[part].float(), gradients[index][part].float())
                p, m, g = (value.view(parameter.shape).to(where) for value in values)
                g = g.mul(torch.tensor(outcome.scale, device=where))
                if plainly:
                    plain_muon(p, m, g, hyper)
                else:
                    stub = nn.Parameter(p)
                    if case.heads and "_proj" in name and parameter.size(0) % case.heads == 0:
                        stub.muon_num_heads = case.heads  # type: ignore[attr-defined]
                    muon_step(p, (m,), g, hyper, stub)
                shard.p[part], shard.m[part] = p.view(-1).cpu(), m.view(-1).cpu()
    return shards


def assert_serial_muon(run: Run, outcomes: list[Outcome]) -> None:
    """Compares Muon's layers bitwise, Adam's too if the same kernel runs, else within rounding."""
    for step, copies in run.copies.items():
        for shard, flat in zip(serial_muon(run, outcomes, step), copies, strict=True):
            if _is_bitwise(shard):
                own = flat[shard.begin : shard.end]
                name = f"copy of {shard.name} after step {step}"
                assert_same_bits(name, own, shard.training_copy())
    for actual, expected in zip(run.final, serial_muon(run, outcomes), strict=True):
        for name in ("p", "m", "v"):
            mine, theirs = getattr(actual, name), getattr(expected, name)
            if _is_bitwise(actual):
                assert_same_bits(f"{name} of {actual.name}", mine, theirs)
            else:
                torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-7)


def _is_bitwise(shard: Shard) -> bool:
    is_muons_own = shard.v.numel() == 0  # type: ignore[union-attr]
    return is_muons_own or shard.placement == "cpu" or device().type == "cpu"


def assert_near_plain_muon(run: Run, outcomes: list[Outcome], bound: float) -> None:
    """Asserts that no element is off the loop in double precision by more than ``bound`` of a step.

    A step changes no element by more than lr * sqrt(rows / columns), as rows of an orthogonal
    matrix are no longer than 1.
    """
    steps = run.case.steps
    most = steps * max(learning_rate(step, 0) for step in range(1, steps + 1))
    for actual, expected in zip(run.final, serial_muon(run, outcomes, plainly=True), strict=True):
        # A rank may own only padding.
        if actual.v.numel() == 0 and bool(actual.p.any()):  # type: ignore[union-attr]
            error = (actual.p - expected.p).abs().max().item()
            moved = (actual.p - run.initial[run.final.index(actual)].p).abs().max().item()
            assert moved > 0.01 * most
            assert error <= bound * most, f"{actual.name}: {error / most:.3g} of {most:.3g}"


def check_muon(case: MuonCase, disturb: Callable[[Any], None] | None = None) -> Run:
    """Trains a case and compares it with both references; on every rank of the group."""
    run = train(case, disturb)
    outcomes = [outcome for outcome in run.outcomes if outcome is not None]
    for mine, theirs in zip(outcomes, expected_outcomes(run), strict=True):
        assert math.isclose(mine.scale, theirs.scale, rel_tol=1e-6)
    assert_serial_muon(run, outcomes)
    if not case.heads and case.moments == "fp32":
        is_half = case.method == "standard" or device().type == "cuda"
        assert_near_plain_muon(run, outcomes, 0.05 if is_half else 1e-3)
    for step, copies in run.copies.items():
        assert_same_on_all_ranks(f"after step {step}", copies)
    return run
