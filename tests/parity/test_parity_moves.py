"""Parity while layers move between host and device at random, with delays at every hand-off.

A move changes no number: on a CPU, where both sides update with the same kernel, every layer is
bitwise the serial loop's, whatever moved when. On a GPU the two kernels may differ in the last
bit, so there the bound of torch.optim.AdamW holds; with moments in fewer bytes they do not differ.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from support.comparisons import assert_bitwise_serial, assert_clipping, assert_close_to_torch
from support.engines import device, environment, split_on_cpu
from support.parity import Case, expected_outcomes, torch_states, train

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(300)]
full = pytest.mark.parity_full

CASES = [
    Case("llama", 0.5, "never", 1, "bf16", steps=20),
    Case("llama", 0.0, "sometimes", 4, "fp32", steps=20),
    Case("gpt2", 1.0, "sometimes", 1, "bf16", steps=20),
    Case("vit", 0.5, "always", 1, "fp32", steps=20),
    Case("llama", 0.5, "sometimes", 1, "bf16", steps=20, moments="bf16"),
    Case("llama", 0.5, "sometimes", 1, "bf16", steps=20, moments="8bit"),
    Case("llama", 0.5, "sometimes", 1, "bf16", steps=20, master="split"),
    Case("vit", 0.0, "always", 4, "bf16", 3, steps=20, master="split", offload_param=True),
    Case("gpt2", 0.5, "sometimes", 1, "bf16", steps=20, moments="8bit", master="split"),
    Case("llama", 0.5, "sometimes", 1, "bf16", steps=20, master="split", late=1.0),
]
DAILY = CASES[1], CASES[3], *CASES[5:]
DELAYED = [
    *(pytest.param(case, marks=full) for case in CASES[:2]),
    Case("gpt2", 0.5, "always", 1, "fp32", steps=20, moments="8bit"),
    Case("gpt2", 0.5, "sometimes", 1, "bf16", 2, steps=20, moments="8bit", master="split"),
    Case("llama", 0.5, "always", 1, "bf16", 3, steps=20, master="split"),
]


def random_moves(seed: int, share: float, moved: list[int]) -> Callable[[Any], None]:
    """Moves layers at a share of the points where that is allowed; ``moved`` gets how many."""
    rng = random.Random(seed)

    def disturb(engine: Any) -> None:
        optimizer = engine.optimizer
        between = not optimizer.passes.open_step.begun and not any(
            s.update.sent for s in optimizer.layer_states
        )
        if between and not optimizer.passes.open_step.in_backward and rng.random() < share:
            before = optimizer.pipeline.num_gpu_layers
            # On the CPU, master weights become whole or split by moves of their own.
            with split_on_cpu(rng.choice((0.0, 0.5, 1.0))):
                engine.set_gpu_fraction(rng.random())
            moved.append(optimizer.pipeline.num_gpu_layers - before)

    return disturb


def check_moves(
    case: Case, seed: int, share: float, delays: Callable[[Any], None] = lambda _engine: None
) -> None:
    moved: list[int] = []
    moves = random_moves(seed, share, moved)

    def disturb(engine: Any) -> None:
        delays(engine)
        moves(engine)

    run = train(case, disturb)
    assert sum(abs(number) for number in moved) > case.steps / 4, "hardly any layer has moved"
    found = [outcome for outcome in run.outcomes if outcome is not None]
    assert_clipping(run, found)
    for ours, theirs in zip(found, expected_outcomes(run), strict=True):
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-12)
    if device().type == "cpu" or case.moments != "fp32":
        assert_bitwise_serial(run, found)
    if case.moments == "fp32":
        assert_close_to_torch(run, torch_states(run))


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=full)])
@pytest.mark.parametrize(
    "case", [case if case in DAILY else pytest.param(case, marks=full) for case in CASES], ids=str
)
def test_layers_that_move(case: Case, seed: int) -> None:
    check_moves(case, seed, 0.4)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=full) for seed in (2, 3))])
@pytest.mark.parametrize("case", DELAYED, ids=str)
def test_layers_that_move_with_delays(case: Case, seed: int) -> None:
    with environment("HYTRAIN_DELAYS", f"{seed}:200"):
        check_moves(case, seed, 0.7)


@pytest.mark.gpu
@pytest.mark.skipif(device().type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_layers_that_move_on_a_gpu(case: Case, seed: int) -> None:
    from support.streams import stream_delays

    with environment("HYTRAIN_DELAYS", f"{seed}:300"):
        check_moves(case, seed, 0.5, stream_delays(seed))
