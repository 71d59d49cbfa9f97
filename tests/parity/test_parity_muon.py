"""Muon: bit for bit a serial loop of the same step, and near one in double precision.

Whatever holds the state, and however it came to the update: so runs that differ in that alone have
the same bits.
"""

from __future__ import annotations

import pytest
from harness import on_ranks
from muon_cases import DELAYED, HOST_WEIGHTS, ONE_RANK, THREE_RANKS, TWO_RANKS
from support.comparisons import assert_same_bits
from support.engines import device, environment
from support.muon import MuonCase, check_muon
from support.streams import stream_delays

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


@pytest.mark.usefixtures("process_group")
def test_where_the_state_is_changes_no_bit() -> None:
    runs = [check_muon(MuonCase("llama", k, "sometimes", steps=6)) for k in (0.0, 0.4, 1.0)]
    for first, *others in zip(*(run.final for run in runs), strict=True):
        for other in others:
            assert_same_bits(first.name, other.p, first.p)
