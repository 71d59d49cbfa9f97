"""The comparisons of support/comparisons.py fail when they should."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parity_cases import ROUNDED
from support import parity
from support.comparisons import (
    assert_bitwise_serial,
    assert_clipping,
    assert_close_to_torch,
    assert_same_bits,
    ulp,
)
from support.engines import device
from support.parity import Case, Run, expected_outcomes, torch_states, train

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def run(process_group: None) -> Run:
    return train(Case("llama", 0.3, "sometimes", steps=20, observe=(7,)))


def _changed(run: Run, index: int, **tensors: torch.Tensor) -> Run:
    final = list(run.final)
    final[index] = replace(final[index], **tensors)
    return replace(run, final=final)


def test_undisturbed_run_passes(run: Run) -> None:
    assert_close_to_torch(run, torch_states(run))
    if device().type == "cpu":
        assert_bitwise_serial(run, expected_outcomes(run))


@pytest.mark.parametrize("name", ["p", "m", "v"])
@pytest.mark.parametrize("index", [0, -1])
def test_one_changed_element_is_seen(run: Run, name: str, index: int) -> None:
    values = getattr(run.final[index], name).clone()
    values[5] = torch.nextafter(values[5], torch.tensor(1e9))
    changed = _changed(run, index, **{name: values})
    with pytest.raises(AssertionError, match=f"{name} of .*1 of"):
        assert_bitwise_serial(changed, expected_outcomes(run))


def test_a_changed_training_copy_is_seen(run: Run) -> None:
    copies = [flat.clone() for flat in run.copies[7]]
    copies[2][3] = torch.nextafter(copies[2][3], torch.tensor(9.0, dtype=copies[2].dtype))
    changed = replace(run, copies={7: copies})
    with pytest.raises(AssertionError, match="after step 7"):
        assert_bitwise_serial(changed, expected_outcomes(run))


def test_an_element_beyond_the_bound_is_seen(run: Run) -> None:
    values = run.final[1].p.clone()
    values[0] += run.case.steps * (2 * ulp(values[0]) + 8 * 2.0**-23 * 4e-3)
    with pytest.raises(AssertionError, match="p of"):
        assert_close_to_torch(_changed(run, 1, p=values), torch_states(run))


def test_a_step_without_its_clipping_is_seen(run: Run) -> None:
    clipped = [o.coefficient < 1.0 for o in expected_outcomes(run)]
    with pytest.raises(AssertionError, match="times the bound"):
        assert_close_to_torch(run, torch_states(run, forget_clipping_in=clipped.index(True) + 1))


@pytest.mark.parametrize("claimed", ["never", "always"])
def test_clipping_that_is_not_as_claimed_is_seen(run: Run, claimed: str) -> None:
    outcomes = expected_outcomes(run)
    with pytest.raises(AssertionError):
        assert_clipping(replace(run, case=replace(run.case, clipping=claimed)), outcomes)


def test_bits_tell_minus_zero_and_accept_the_same_nan() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_same_bits("nan", nan, nan.clone())
    with pytest.raises(AssertionError):
        assert_same_bits("zero", torch.tensor([0.0]), torch.tensor([-0.0]))


@pytest.mark.skipif(device().type != "cpu", reason="bitwise on a CPU")
def test_random_bits_of_another_element_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(name: str, first_index: int, seed: int = 0) -> object:
        return original(name, first_index + 64, seed)

    original = parity.rounding_of
    monkeypatch.setattr(parity, "rounding_of", shifted)
    run = train(replace(ROUNDED[0], steps=3, observe=()))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_serial(run, expected_outcomes(run))
