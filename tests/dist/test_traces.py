"""A file a rank: collectives of each layer, and one clock."""

from __future__ import annotations

from pathlib import Path

import pytest
import rank_traces as cases
from harness import RankPools
from support.traces import Trace

from hytrain.formats import trace_file as names

LAYERS = range(6)


@pytest.mark.parametrize("stage", [2, 3])
def test_collectives_of_each_layer(ranks: RankPools, tmp_path: Path, stage: int) -> None:
    ranks(2).run(cases.record, str(tmp_path), stage)
    for rank in range(2):
        trace = Trace.read(tmp_path / f"trace_rank{rank}.json")
        header = trace.header
        assert (header.rank, header.world_size) == (rank, 2)
        assert header.steps == (3, 4)
        for step, (begin, end) in trace.steps(rank).items():
            spans = trace.spans(names.GPU_COMMUNICATION, rank, step=step)
            assert all(begin <= e["ts"] and e["ts"] + e["dur"] <= end + 0.5 for e in spans)
            by_layer = {
                kind: {e["args"].get("layer") for e in spans if e["args"]["collective"] == kind}
                for kind in ("reduce_scatter", "all_gather", "all_reduce")
            }
            assert by_layer["reduce_scatter"] == set(LAYERS)
            assert by_layer["all_gather"] == set(LAYERS)
            assert by_layer["all_reduce"] == {None}
            reduced = [e for e in spans if e["name"] == "reduce scatter layer 1"]
            # The parameters of a block in bf16, aligned.
            assert 2 * 4192 <= reduced[0]["args"]["bytes"] <= 2 * 4300
            on_cpu = trace.spans(names.CPU_ADAM, rank, step=step)
            assert {e["args"]["layer"] for e in on_cpu} == set(LAYERS)


def test_training_is_the_same(ranks: RankPools, tmp_path: Path) -> None:
    assert ranks(2).run(cases.results_with_and_without, str(tmp_path)) == [True, True]


def test_ranks_of_one_host_are_on_one_clock(ranks: RankPools, tmp_path: Path) -> None:
    """They meet in their collectives at the same time."""
    ranks(2).run(cases.record, str(tmp_path), 2)
    first, second = (
        [
            e
            for e in Trace.read(tmp_path / f"trace_rank{rank}.json").spans(
                names.GPU_COMMUNICATION, rank
            )
            if "reduce" in e["name"]
        ]
        for rank in range(2)
    )
    assert len(first) == len(second) > 0
    for mine, theirs in zip(first, second, strict=True):
        assert mine["ts"] < theirs["ts"] + theirs["dur"]
        assert theirs["ts"] < mine["ts"] + mine["dur"]


@pytest.mark.parametrize("shift", [5.0, -3.25])
def test_clocks_of_two_hosts(ranks: RankPools, shift: float) -> None:
    (at_first, _), (offset, round_trip) = ranks(2).run(cases.offset_of_another_host, shift)
    assert at_first == 0.0
    assert offset == pytest.approx(-shift, abs=round_trip)
    assert round_trip < 1.0


def test_clocks_of_one_host(ranks: RankPools) -> None:
    assert ranks(2).run(cases.offset_of_the_same_host) == [0.0, 0.0]
