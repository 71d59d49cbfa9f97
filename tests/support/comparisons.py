"""Elementwise comparisons of a run with its references."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from hytrain.kernels.clipping import Outcome
from hytrain.kernels.moments import Moment
from support.engines import from_all_ranks
from support.parity import (
    Case,
    Run,
    TorchReference,
    expected_outcomes,
    gathered,
    learning_rate,
    serial_states,
    torch_states,
    train,
)
from support.rounded_moments import tensors_of


def assert_clipping(run: Run, outcomes: list[Outcome]) -> None:
    """Asserts that clipping was active never, sometimes or always, as the case says."""
    active = [outcome.coefficient < 1.0 for outcome in outcomes]
    if run.case.clipping == "always":
        assert all(active)
    elif run.case.clipping == "sometimes":
        assert any(active)
        assert not all(active)
    else:
        assert not any(active)
    assert not any(outcome.skip for outcome in outcomes)


def assert_same_bits(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts bitwise equality; all NaNs count as equal, but zeros of different sign differ."""
    assert actual.dtype == expected.dtype, f"{name}: {actual.dtype} is not {expected.dtype}"
    as_integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[actual.element_size()]
    expected = expected.to(actual.device)
    differs = actual.view(as_integer) != expected.view(as_integer)
    differs &= ~(actual.isnan() & expected.isnan())
    if bool(differs.any()):
        worst = (actual.double() - expected.double()).abs().max().item()
        raise AssertionError(
            f"{name}: {int(differs.sum())} of {actual.numel()} elements differ, first at "
            f"{int(differs.flatten().nonzero()[0])}, by at most {worst:.3g}"
        )


States = Mapping[str, Mapping[str, torch.Tensor]]
"""State in the form of ``fp32_state_dict``."""


def assert_same_states(actual: States, expected: States) -> None:
    """Asserts that master weights and moments of all parameters are the same, bit for bit."""
    assert actual.keys() == expected.keys()
    for name, tensors in expected.items():
        for kind, tensor in tensors.items():
            assert_same_bits(f"{kind} of {name}", actual[name][kind], tensor)


def assert_close_states(actual: States, expected: States, *, rtol: float, atol: float) -> None:
    """Asserts the same within tolerances."""
    assert actual.keys() == expected.keys()
    for name, tensors in expected.items():
        for kind, tensor in tensors.items():
            torch.testing.assert_close(
                actual[name][kind],
                tensor,
                rtol=rtol,
                atol=atol,
                msg=lambda text, what=f"{kind} of {name}": f"{what}: {text}",
            )


def assert_same_moment(name: str, actual: Moment, expected: Moment) -> None:
    """Asserts that two moments are stored as the same bits."""
    for mine, theirs in zip(tensors_of(actual), tensors_of(expected), strict=True):
        assert_same_bits(name, mine, theirs)


def assert_bitwise_serial(run: Run, outcomes: list[Outcome], placements: str = "cpu gpu") -> None:
    """Asserts that this rank's state and training copies are bitwise those of the serial loop."""
    for step, copies in run.copies.items():
        for shard, flat in zip(serial_states(run, outcomes, step), copies, strict=True):
            if shard.placement in placements:
                own = flat[shard.begin : shard.end]
                expected = shard.training_copy()
                assert_same_bits(f"copy of {shard.name} after step {step}", own, expected)
    for actual, expected in zip(run.final, serial_states(run, outcomes), strict=True):
        if actual.placement in placements:
            assert_same_bits(f"p of {actual.name}", actual.p, expected.p)
            assert_same_moment(f"m of {actual.name}", actual.m, expected.m)
            assert_same_moment(f"v of {actual.name}", actual.v, expected.v)


def ulp(values: torch.Tensor) -> torch.Tensor:
    """Distance from |x| to the next fp32 number above, elementwise."""
    size = values.abs()
    return torch.nextafter(size, torch.full_like(size, math.inf)) - size


def assert_close_to_torch(run: Run, reference: TorchReference) -> None:
    """Asserts |dp| <= steps * (2 ulp(p) + 8 * 2^-23 * lr), and moments within a few roundings."""
    steps = run.case.steps
    rounding = 2.0**-23
    for actual, expected, g in zip(run.final, reference.states, reference.largest_g, strict=True):
        for group, begin, end in expected.segments:
            part = slice(begin, end)
            lr = max(learning_rate(step, group) for step in range(1, steps + 1))
            p, m, v = (getattr(expected, name)[part] for name in ("p", "m", "v"))
            size = g[part]
            bounds = {
                "p": steps * (2.0 * ulp(p) + 8.0 * rounding * lr),
                # The moments forget: errors do not add up over all steps. Gradients differ by
                # the roundings of the norm and of the multiplication with the coefficient.
                "m": 16.0 * rounding * size,
                "v": 32.0 * rounding * size * size + torch.finfo(torch.float32).tiny,
            }
            for name, value in (("p", p), ("m", m), ("v", v)):
                error = (getattr(actual, name)[part] - value).abs()
                excess = (error / bounds[name].clamp_min(1e-45)).max().item()
                assert bool((error <= bounds[name]).all()), (
                    f"{name} of {actual.name}: {excess:.3g} times the bound"
                )


def check_parity(case: Case) -> None:
    """Trains a case and compares it with both references.

    Runs on every rank of the group; all ranks raise or none needs to.
    """
    run = train(case)
    outcomes = expected_outcomes(run)
    assert_clipping(run, outcomes)
    for step, (expected, actual) in enumerate(zip(outcomes, run.outcomes, strict=True), 1):
        assert actual is not None
        assert expected.scale == actual.scale, f"scale of step {step}: {actual} {expected}"
    assert_bitwise_serial(run, outcomes)
    if case.moments == "fp32":
        whole = gathered(run)
        assert_close_to_torch(whole, torch_states(whole))
    for step, copies in run.copies.items():
        assert_same_on_all_ranks(f"after step {step}", copies)
    assert len(outcomes) == case.steps


def assert_same_on_all_ranks(where: str, copies: list[torch.Tensor]) -> None:
    """Asserts that every rank has the same tensors, bit for bit; a collective."""
    for other in from_all_ranks(copies):
        for index, (mine, theirs) in enumerate(zip(copies, other, strict=True)):
            assert_same_bits(f"layer {index} of another rank {where}", mine, theirs)
