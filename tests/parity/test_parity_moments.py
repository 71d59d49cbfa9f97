"""Training with moments in bf16 and 8 bits is bitwise a serial loop with the defined rounding.

Whatever holds a layer's state, however it is cut, and wherever it moves. The loop's random bits are
made from parameters' names and indices (``support/rounded_moments.py``), so that all layouts agree
with each other as well.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dist.harness import RankPools
from support.comparisons import assert_bitwise_serial, assert_clipping, check_parity
from support.engines import device, environment
from support.parity import Case, expected_outcomes, train
from test_parity_moves import random_moves

pytestmark = [pytest.mark.timeout(300)]
on_cpu = pytest.mark.skipif(device().type != "cpu", reason="on a GPU: the last tests")
on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(device().type != "cuda", reason="needs a CUDA device"),
]

STEPS = {"steps": 14, "observe": (1, 9)}
ONE_RANK = [
    Case("llama", 0.0, "sometimes", 1, "bf16", 2, **STEPS, moments="8bit"),
    Case("llama", 0.3, "never", 4, "fp32", 1, **STEPS, moments="8bit"),
    Case("gpt2", 1.0, "always", 1, "bf16", 2, **STEPS, moments="8bit"),
    Case("vit", 0.3, "off", 1, "fp32", 3, **STEPS, moments="8bit"),
    Case("llama", 0.3, "sometimes", 1, "fp32", 2, **STEPS, moments="bf16"),
    Case("gpt2", 0.0, "never", 1, "bf16", 1, **STEPS, moments="bf16"),
    Case("vit", 1.0, "always", 4, "bf16", 2, **STEPS, moments="bf16"),
]
HALVES, UNEQUAL = (0.5, 0.5), (0.7, 0.3)
TWO_RANKS = [
    Case("llama", 0.3, "sometimes", 1, "bf16", 2, UNEQUAL, **STEPS, moments="8bit"),
    Case("gpt2", 0.0, "always", 4, "bf16", 3, UNEQUAL, **STEPS, moments="8bit"),
    Case("llama", 0.3, "sometimes", 1, "bf16", 3, HALVES, **STEPS, moments="8bit",
         offload_param=True),
    Case("vit", 1.0, "never", 1, "fp32", 1, HALVES, **STEPS, moments="bf16"),
    Case("llama", 0.3, "sometimes", 1, "fp32", 3, UNEQUAL, **STEPS, moments="bf16"),
]  # fmt: skip


@on_cpu
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_one_rank(case: Case) -> None:
    assert check_parity(case)["steps"] == 14


@on_cpu
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("moments", ["bf16", "8bit"])
def test_while_layers_move(moments: str) -> None:
    _check_moves(Case("llama", 0.5, "sometimes", 1, "bf16", steps=30, moments=moments))


@on_cpu
@pytest.mark.usefixtures("process_group")
def test_while_layers_move_with_delays() -> None:
    with environment("HYTRAIN_DELAYS", "3:400"):
        _check_moves(Case("gpt2", 0.5, "always", 1, "fp32", steps=20, moments="8bit"))


def _check_moves(case: Case) -> None:
    moved: list[int] = []
    run = train(case, random_moves(5, 0.5, moved))
    assert sum(abs(number) for number in moved) > case.steps / 4, "hardly any layer has moved"
    outcomes = expected_outcomes(run)
    assert_clipping(run, outcomes)
    assert_bitwise_serial(run, outcomes)


@on_cpu
@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_two_ranks(case: Case, ranks: RankPools) -> None:
    for figures in ranks(2).run(check_parity, case):
        assert figures["steps"] == 14


@on_cpu
@pytest.mark.usefixtures("process_group")
def test_a_wrong_index_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison tells whether random bits are those of the right element."""
    import support.parity as parity

    def shifted(name: str, first_index: int, seed: int = 0) -> object:
        return original(name, first_index + 64, seed)

    original = parity.rounding_of
    monkeypatch.setattr(parity, "rounding_of", shifted)
    case = replace(ONE_RANK[0], steps=3, observe=())
    run = train(case)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_bitwise_serial(run, expected_outcomes(run))


class TestOnAGpu:
    """Both sides: Triton's update is bitwise the CPU kernel's, and so is what has moved."""

    pytestmark = on_gpu

    @pytest.mark.usefixtures("process_group")
    @pytest.mark.parametrize("case", ONE_RANK, ids=str)
    def test_state_is_bitwise_the_serial_loops(self, case: Case) -> None:
        run = train(case)
        assert_bitwise_serial(run, [o for o in run.outcomes if o is not None])

    @pytest.mark.usefixtures("process_group")
    @pytest.mark.parametrize("moments", ["bf16", "8bit"])
    @pytest.mark.parametrize("seed", [1, 2])
    def test_while_layers_move(self, moments: str, seed: int) -> None:
        from support.streams import stream_delays

        moved: list[int] = []
        delays, moves = stream_delays(seed), random_moves(seed, 0.5, moved)

        def disturb(engine: object) -> None:
            delays(engine)
            moves(engine)

        case = Case("llama", 0.5, "sometimes", 1, "bf16", steps=30, moments=moments)
        with environment("HYTRAIN_DELAYS", f"{seed}:300"):
            run = train(case, disturb)
        torch.cuda.synchronize()
        assert sum(abs(number) for number in moved) > case.steps / 4, "hardly any layer has moved"
        assert_bitwise_serial(run, [o for o in run.outcomes if o is not None])
