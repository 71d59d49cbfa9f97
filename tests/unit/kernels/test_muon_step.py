"""Newton-Schulz beside exact numbers and DeepSpeed's functions; Muon's step beside DeepSpeed's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.muon import plain_muon, plain_newton_schulz
from torch import nn

from hytrain.errors import ConfigError
from hytrain.kernels.device_optimizer import DeviceOptimizer, register_optimizer
from hytrain.kernels.muon import (
    MUON,
    Method,
    MuonValues,
    iteration_dtype,
    muon_step,
    orthogonalize,
    read_group,
)

SHAPES = [(16, 40), (40, 16), (24, 24), (1, 7), (3, 12, 20), (3, 20, 12)]
TOLERANCE = {"gram": 2e-4, "standard": 0.1}


def random_matrices(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def original(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """DeepSpeed's module with its functions as they are written, not compiled."""
    pytest.importorskip("deepspeed", reason="DeepSpeed, to compare with, is not here (aarch64)")
    from deepspeed.runtime.zero.muon import original_muon

    names = "zeropower_via_newtonschulz5", "zeropower_via_gram_newtonschulz", "muon_update"
    for name in names:
        function = getattr(original_muon, name)
        monkeypatch.setattr(
            original_muon, name, getattr(function, "_torchdynamo_orig_callable", function)
        )
    cpu = torch.device("cpu")
    monkeypatch.setattr(original_muon, "ns_compute_dtype", lambda name: iteration_dtype(name, cpu))
    return original_muon


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_deepspeeds_iteration(original: Any, shape: tuple[int, ...], method: Method) -> None:
    matrices = random_matrices(shape)
    functions = {
        "gram": original.zeropower_via_gram_newtonschulz,
        "standard": original.zeropower_via_newtonschulz5,
    }
    found = orthogonalize(matrices, method)
    expected = functions[method](matrices, steps=5)
    assert found.dtype == expected.dtype
    error = (found - expected).abs().max().item()
    assert error <= TOLERANCE[method] * expected.abs().max().item()


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e8])
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_beside_double_precision(shape: tuple[int, int], scale: float) -> None:
    matrix = random_matrices(shape)
    found = orthogonalize(matrix * scale).double()
    assert (found - plain_newton_schulz(matrix * scale)).abs().max() < TOLERANCE["gram"]
    if scale == 1.0:
        singular = torch.linalg.svdvals(found)
        assert singular.min() > 0.6
        assert singular.max() < 1.25


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_zeros_stay(method: Method) -> None:
    assert not orthogonalize(torch.zeros(8, 12), method).any()


STEPS = [
    ((16, 40), None),
    ((40, 16), None),
    ((24, 24), None),
    ((24, 16), 4),
    ((3, 20, 12), None),
]


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize(("shape", "heads"), STEPS, ids=str)
def test_a_step_is_deepspeeds(
    original: Any, shape: tuple[int, ...], heads: int | None, method: Method
) -> None:
    parameter = nn.Parameter(random_matrices(shape))
    parameter.muon_num_heads = heads  # type: ignore[attr-defined]
    values = MuonValues(0.02, 0.1, 0.95, method)
    weight, momentum = parameter.detach().clone(), torch.zeros(shape)
    theirs, their_momentum = weight.clone(), momentum.clone()
    for step in range(4):
        gradient = random_matrices(shape, step + 1)
        update = original.muon_update(
            gradient.clone(), their_momentum, ns_method=method, num_heads=heads
        )
        theirs.mul_(1 - 0.02 * 0.1).add_(update.reshape(shape), alpha=-0.02)
        muon_step(weight, (momentum,), gradient, values, parameter)
    torch.testing.assert_close(momentum, their_momentum, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(weight, theirs, rtol=0, atol=4 * 0.02 * TOLERANCE[method])


def test_a_convolutions_kernel_has_a_row_for_each_output() -> None:
    """(DeepSpeed means the same, and fails on its shapes.)"""
    kernel, gradient = random_matrices((12, 3, 4, 2)), random_matrices((12, 3, 4, 2), 1)
    weight, matrix = kernel.clone(), kernel.clone()
    values, momentum = MuonValues(0.02, 0.1, 0.95, "gram"), torch.zeros(12, 3, 4, 2)
    muon_step(weight, (momentum,), gradient.clone(), values, nn.Parameter(kernel))
    nesterov = (0.05 + 0.95 * 0.05) * gradient
    update = plain_newton_schulz(nesterov.view(12, 24)).view(kernel.shape).float() * 2**0.5
    matrix.mul_(1 - 0.002).sub_(0.02 * update)
    torch.testing.assert_close(weight, matrix, rtol=0, atol=1e-5)


def test_a_run_is_a_plain_loop() -> None:
    values = MuonValues(0.02, 0.1, 0.9, "gram")
    weight, momentum = random_matrices((40, 16)), torch.zeros(40, 16)
    mine, my_momentum = weight.clone(), momentum.clone()
    for step in range(20):
        gradient = random_matrices((40, 16), step + 1)
        plain_muon(weight, momentum, gradient, values)
        muon_step(mine, (my_momentum,), gradient, values, nn.Parameter(weight))
    torch.testing.assert_close(my_momentum, momentum, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine, weight, rtol=0, atol=20 * 0.02 * 1e-4)


def test_what_a_group_says() -> None:
    group = {"lr": 0.1, "momentum": 0.5, "ns_method": "standard", "weight_decay": 0.2}
    assert read_group(group, 1) == MuonValues(0.1, 0.2, 0.5, "standard")
    assert read_group({"lr": 0.1}, 1) == MuonValues(0.1, 0.0, 0.95, "gram")
    with pytest.raises(ConfigError, match="momentum"):
        read_group({"lr": 0.1, "momentum": 1.0}, 1)
    with pytest.raises(ConfigError, match="gram or standard"):
        read_group({"lr": 0.1, "ns_method": "svd"}, 1)


def test_states_that_cannot_be_kept_are_refused() -> None:
    for states in ((), ("a", "b", "c"), ("fp32",)):
        with pytest.raises(ConfigError, match="one or two"):
            register_optimizer(torch.optim.SGD, DeviceOptimizer(states, read_group, MUON.update))
