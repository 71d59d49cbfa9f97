"""Recorded trainings on two ranks; every function here runs on each of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from support.engines import make_config
from support.traces import traced_config, train

from hytrain.comm.collectives import ShardCollectives
from hytrain.hardware.rank_clocks import clock_offset_ns


def record(folder: str, stage: int, **keywords: Any) -> None:
    """Steps 3 and 4 of 6."""
    config = traced_config(Path(folder), (3, 5), stage=stage, **keywords)
    train(config, 6, rank=dist.get_rank())


def results_with_and_without(folder: str) -> bool:
    """Whether recording changes nothing, bit for bit, with all that can be recorded."""

    def wait(_step: int, loss: torch.Tensor) -> None:
        loss.item()

    rank = dist.get_rank()
    plain = train(make_config(gpu_fraction=0.5), 5, rank=rank, after_step=wait)
    config = traced_config(Path(folder), (2, 4), gpu_fraction=0.5, trace={"threads": True})
    traced = train(config, 5, rank=rank, after_step=wait)
    return plain.keys() == traced.keys() and all(
        torch.equal(plain[name], traced[name]) for name in plain
    )


def offset_of_another_host(shift_seconds: float) -> tuple[float, float]:
    """Rank 1 has a clock of its own: (offset found, error that is possible), seconds."""
    rank = dist.get_rank()
    collectives = ShardCollectives(None)
    shift = round(shift_seconds * 1e9) if rank == 1 else 0
    trips: list[int] = []

    def now() -> int:
        trips.append(time.monotonic_ns())
        return trips[-1] + shift

    offset = clock_offset_ns(collectives, is_wanted=rank == 0, now=now, machine=f"host {rank}")
    shortest = min((b - a for a, b in zip(trips[::2], trips[1::2], strict=False)), default=0)
    return offset / 1e9, shortest / 1e9


def offset_of_the_same_host() -> float:
    """Nothing is measured."""

    def now() -> int:
        raise AssertionError("the clock was asked")

    return clock_offset_ns(ShardCollectives(None), is_wanted=True, now=now)
