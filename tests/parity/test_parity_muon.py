"""Muon: bit for bit a serial loop of the same step, and near one in double precision.

Whatever holds the state, and however it came to the update: so runs that differ in that alone have
the same bits.
"""

from __future__ import annotations

import pytest
from muon_cases import DELAYED, ONE_RANK
from support.comparisons import assert_same_bits
from support.engines import device, environment
from support.muon import MuonCase, check_muon
from support.streams import stream_delays

pytestmark = [pytest.mark.usefixtures("process_group"), pytest.mark.timeout(300)]
gpu = pytest.mark.gpu


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_parity(case: MuonCase) -> None:
    check_muon(case)


@pytest.mark.parametrize("case", DELAYED, ids=str)
def test_with_delays_at_every_hand_off(case: MuonCase) -> None:
    with environment("HYTRAIN_DELAYS", "1:400"):
        check_muon(case)


@gpu
@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_parity_on_a_gpu(case: MuonCase) -> None:
    assert device().type == "cuda"
    check_muon(case)


@gpu
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("case", [*DELAYED, *ONE_RANK[:4]], ids=str)
def test_with_delays_on_every_stream(case: MuonCase, seed: int) -> None:
    with environment("HYTRAIN_DELAYS", f"{seed}:300"):
        check_muon(case, stream_delays(seed))


def test_where_the_state_is_changes_no_bit() -> None:
    runs = [check_muon(MuonCase("llama", k, "sometimes", steps=6)) for k in (0.0, 0.4, 1.0)]
    for first, *others in zip(*(run.final for run in runs), strict=True):
        for other in others:
            assert_same_bits(first.name, other.p, first.p)
