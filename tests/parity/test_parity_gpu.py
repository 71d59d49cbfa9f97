"""Parity on a GPU: every stream and every hand-off delayed at random.

The references run on the CPU, on copies of the recorded gradients, with the clip coefficient that
the GPU found (its norm is summed in another order). Layers placed on the CPU are bitwise the
serial loop; those on the GPU are within torch.optim.AdamW's bound, like the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parity_cases import DIRECT, ONE_RANK, ROUNDED, SPLIT
from support.comparisons import assert_bitwise_serial, assert_clipping, assert_close_to_torch
from support.engines import device, environment
from support.parity import Case, expected_outcomes, torch_states, train
from support.streams import stream_delays

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("process_group"),
    pytest.mark.timeout(300),
]


def check_on_gpu(case: Case, disturb: Callable[[Any], None] | None) -> None:
    assert device().type == "cuda"
    run = train(case, disturb)
    found = [outcome for outcome in run.outcomes if outcome is not None]
    assert_clipping(run, found)
    for step, (ours, theirs) in enumerate(zip(found, expected_outcomes(run), strict=True), 1):
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-12), f"norm of step {step}"
    if case.moments != "fp32":  # Triton's update is bitwise the CPU kernel's
        assert_bitwise_serial(run, found)
        return
    assert_bitwise_serial(run, found, placements="cpu")
    assert_close_to_torch(run, torch_states(run))


@pytest.mark.parametrize("case", [*ONE_RANK, *ROUNDED, *SPLIT, *DIRECT], ids=str)
def test_covering_selection(case: Case) -> None:
    check_on_gpu(case, None)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", [*ONE_RANK[:6], *DIRECT], ids=str)
def test_with_delays_on_every_stream_and_at_every_hand_off(case: Case, seed: int) -> None:
    with environment("HYTRAIN_DELAYS", f"{seed}:300"):
        check_on_gpu(case, stream_delays(seed))


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """More threads than the one for toy tensors: the reference updates 100 million parameters."""
    usual = torch.get_num_threads()
    torch.set_num_threads(min(8, os.cpu_count() or 1))
    yield
    torch.set_num_threads(usual)


@pytest.mark.parametrize("clipping", ["never", "sometimes", "always"])
@pytest.mark.parametrize("gpu_fraction", [0.0, 0.5, 1.0])
@pytest.mark.usefixtures("torch_threads")
def test_100m_parameters(gpu_fraction: float, clipping: str) -> None:
    case = Case("llama-100m", gpu_fraction, clipping, dtype="bf16", steps=20, observe=(1, 10))
    check_on_gpu(case, None)
