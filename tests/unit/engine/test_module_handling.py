"""What users do to ``engine.module`` beside training it: copies, averages, other memory."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, make_config
from support.models import make_batch, make_model
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from training import FRACTIONS, backward

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]

State = dict[str, dict[str, torch.Tensor]]


def _other_dtype_and_back(model: nn.Module) -> None:
    model.to(torch.float64).to(torch.float32)


def _by_a_vector(model: nn.Module) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()).clone(), model.parameters())


def _other_weights_for_an_evaluation(model: nn.Module) -> None:
    """As averaged weights are evaluated; afterwards a copy is put back."""
    kept = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter)
    with torch.no_grad():
        assert float(model(**make_batch("mlp", 9))) == 0.0, "other weights are evaluated"
    for parameter, data in zip(model.parameters(), kept, strict=True):
        parameter.data = data


def _train(gpu_fraction: float, between: Callable[[nn.Module], None] | None) -> State:
    config = make_config(gpu_fraction=gpu_fraction, bf16=False, clipping=0.5, accumulation=2)
    with built(make_model("mlp"), config) as engine:
        for number in range(8):
            backward(engine, number)
            engine.step()
            if between is not None and number in (1, 2, 5):  # one of them within a step
                engine.synchronize()
                between(engine.module)
        engine.synchronize()
        state = engine.fp32_state_dict()
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter, state[name]["fp32"].view_as(parameter)), name
    return state


@pytest.mark.parametrize(
    "between", [_other_dtype_and_back, _by_a_vector, _other_weights_for_an_evaluation]
)
def test_parameters_with_other_memory_are_trained_on(
    gpu_fraction: float, between: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hytrain"):
        found = _train(gpu_fraction, between)
    assert sum("given other memory" in line for line in caplog.messages) == 1
    assert_same_states(found, _train(gpu_fraction, None))


def test_a_copy_of_the_module_lives_by_itself(gpu_fraction: float) -> None:
    """For averages and as a reference; also when the engine is gone."""
    config = make_config(gpu_fraction=gpu_fraction, bf16=False)
    batch = make_batch("mlp", 9)
    with built(make_model("mlp"), config) as engine:
        backward(engine, 0)
        engine.step()
        engine.synchronize()
        taken = copy.deepcopy(engine.module)
        expected = float(engine.module(**batch).detach())
        average = torch.optim.swa_utils.AveragedModel(engine.module)
        for number in range(1, 4):
            backward(engine, number)
            taken(**batch).backward()  # between two of the engine's own calls
            engine.step()
            engine.synchronize()
            average.update_parameters(engine.module)
        assert float(engine.module(**batch).detach()) != expected
        with torch.no_grad():
            assert float(taken(**batch)) == expected
    with torch.no_grad():
        assert float(taken(**batch)) == expected
    assert all(value.isfinite().all() for value in average.state_dict().values())
