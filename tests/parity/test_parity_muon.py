"""Muon: bit for bit a serial loop of the same step, and near one in double precision.

That is so whatever holds the state and however it came to the update: runs that differ only in that
have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from harness import on_ranks
from muon_cases import DELAYED, HOST_WEIGHTS, ONE_RANK, THREE_RANKS, TWO_RANKS
from support.comparisons import assert_same_bits
from support.engines import device, environment
from support.muon import MuonCase, assert_serial_muon, check_muon
from support.parity import train
from support.streams import stream_delays
from test_parity_moves import random_moves

pytestmark = pytest.mark.timeout(300)
gpu = pytest.mark.gpu


@pytest.mark.parametrize("case", [*ONE_RANK, *TWO_RANKS, *THREE_RANKS, *HOST_WEIGHTS], ids=str)
@on_ranks(lambda case: case.num_ranks)
def test_parity(case: MuonCase) -> None:
    check_muon(case)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("case", DELAYED, ids=str)
def test_with_delays_at_every_hand_off(case: MuonCase) -> None:
    with environment("HYTRAIN_DELAYS", "1:400"):
        check_muon(case)


MOVED = [
    MuonCase("llama", 0.5, "sometimes", steps=16),
    MuonCase("gpt2", 0.0, "always", 4, stage=1, moments="bf16", steps=16),
    MuonCase("llama", 1.0, "off", steps=16),
]


def check_moves(case: MuonCase, seed: int, delays: Callable[[Any], None]) -> None:
    moved: list[int] = []
    moves = random_moves(seed, 0.5, moved)

    def disturb(engine: Any) -> None:
        delays(engine)
        moves(engine)

    check_muon(case, disturb)
    assert sum(map(abs, moved)) > case.steps / 4


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("case", MOVED, ids=str)
def test_layers_that_move(case: MuonCase) -> None:
    check_moves(case, 1, lambda _engine: None)


@gpu
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", MOVED, ids=str)
def test_layers_that_move_on_a_gpu(case: MuonCase, seed: int) -> None:
    check_moves(case, seed, stream_delays(seed))


@gpu
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("case", [*ONE_RANK, HOST_WEIGHTS[0]], ids=str)
def test_parity_on_a_gpu(case: MuonCase) -> None:
    assert device().type == "cuda"
    check_muon(case)


@gpu
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", [*DELAYED, *ONE_RANK[:4]], ids=str)
def test_with_delays_on_every_stream(case: MuonCase, seed: int) -> None:
    with environment("HYTRAIN_DELAYS", f"{seed}:300"):
        check_muon(case, stream_delays(seed))


@pytest.mark.skipif(device().type == "cuda", reason="Adam's two kernels differ in the last bit")
@pytest.mark.usefixtures("process_group")
def test_where_the_state_is_changes_no_bit() -> None:
    runs = [check_muon(MuonCase("llama", k, "sometimes", steps=6)) for k in (0.0, 0.4, 1.0)]
    for first, *others in zip(*(run.final for run in runs), strict=True):
        for other in others:
            assert_same_bits(first.name, other.p, first.p)


@pytest.mark.usefixtures("process_group")
def test_the_comparison_can_fail() -> None:
    """It notices a clip factor that one step forgets, and another momentum."""
    run = train(MuonCase("llama", 0.4, "always", steps=4))
    outcomes = [outcome for outcome in run.outcomes if outcome is not None]
    assert_serial_muon(run, outcomes)
    forgotten = [replace(outcomes[0], scale=outcomes[0].scale / outcomes[0].coefficient)]
    with pytest.raises(AssertionError):
        assert_serial_muon(run, [*forgotten, *outcomes[1:]])
    with patch("support.muon.MOMENTUM", 0.8), pytest.raises(AssertionError):
        assert_serial_muon(run, outcomes)
