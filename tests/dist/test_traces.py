"""A file a rank: collectives of each layer, and one clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from support.engines import from_all_ranks, make_config
from support.traces import Trace, traced_config, train

from hytrain.comm.collectives import ShardCollectives
from hytrain.formats import trace_file as names
from hytrain.hardware.rank_clocks import clock_offset_ns


@on_ranks(2)
def test_training_is_the_same(tmp_path: Path) -> None:
    """Bit for bit, with all that can be recorded."""

    def wait(_step: int, loss: torch.Tensor) -> None:
        loss.item()

    rank = dist.get_rank()
    plain = train(make_config(gpu_fraction=0.5), 5, rank=rank, after_step=wait)
    config = traced_config(tmp_path, (2, 4), gpu_fraction=0.5, trace={"threads": True})
    traced = train(config, 5, rank=rank, after_step=wait)
    assert plain.keys() == traced.keys()
    assert all(torch.equal(plain[name], traced[name]) for name in plain)


@pytest.mark.parametrize("shift_seconds", [5.0, -3.25])
@on_ranks(2)
def test_clocks_of_two_hosts(shift_seconds: float) -> None:
    """Rank 1 has a clock of its own."""
    rank = dist.get_rank()
    collectives = ShardCollectives(None)
    shift = round(shift_seconds * 1e9) if rank == 1 else 0
    trips: list[int] = []

    def now() -> int:
        trips.append(time.monotonic_ns())
        return trips[-1] + shift

    offset = clock_offset_ns(collectives, is_wanted=rank == 0, now=now, machine=f"host {rank}")
    if rank == 0:
        assert offset == 0
        return
    round_trip = min(b - a for a, b in zip(trips[::2], trips[1::2], strict=False)) / 1e9
    assert round_trip < 1.0
    assert offset / 1e9 == pytest.approx(-shift_seconds, abs=round_trip)


@on_ranks(2)
def test_clocks_of_one_host() -> None:
    """Nothing is measured."""

    def now() -> int:
        raise AssertionError("the clock was asked")

    assert clock_offset_ns(ShardCollectives(None), is_wanted=True, now=now) == 0


LAYERS = range(6)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_collectives_of_each_layer(tmp_path: Path, stage: int) -> None:
    """Of two steps; ranks of one host meet in them at the same time, on one clock."""
    rank = dist.get_rank()
    train(traced_config(tmp_path, (3, 5), stage=stage), 6, rank=rank)
    trace = Trace.read(tmp_path / f"trace_rank{rank}.json")
    header = trace.header
    assert (header.rank, header.world_size, header.steps) == (rank, 2, (3, 4))
    for step, (begin, end) in trace.steps(rank).items():
        spans = trace.spans(names.GPU_COMMUNICATION, rank, step=step)
        assert all(begin <= e["ts"] and e["ts"] + e["dur"] <= end + 0.5 for e in spans)
        by_layer = {
            kind: {e["args"].get("layer") for e in spans if e["args"]["collective"] == kind}
            for kind in ("reduce_scatter", "all_gather", "all_reduce")
        }
        assert by_layer["reduce_scatter"] == by_layer["all_gather"] == set(LAYERS)
        assert by_layer["all_reduce"] == {None}
        reduced = [e for e in spans if e["name"] == "reduce scatter layer 1"]
        # The parameters of a block in bf16, aligned.
        assert 2 * 4192 <= reduced[0]["args"]["bytes"] <= 2 * 4300
        on_cpu = trace.spans(names.CPU_ADAM, rank, step=step)
        assert {e["args"]["layer"] for e in on_cpu} == set(LAYERS)
    spans = trace.spans(names.GPU_COMMUNICATION, rank)
    first, second = from_all_ranks(
        [(e["ts"], e["ts"] + e["dur"]) for e in spans if "reduce" in e["name"]]
    )
    assert len(first) == len(second) > 0
    for mine, theirs in zip(first, second, strict=True):
        assert mine[0] < theirs[1]
        assert theirs[0] < mine[1]
