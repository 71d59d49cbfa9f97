"""Cases for two ranks whose layers move: each rank places its own shards."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_training import RankShadow, assert_equal_on_all_ranks, backward, config_for
from support.engines import built, environment
from support.models import make_batch, make_model

from hytrain.engine import build_optimizer as build
from hytrain.errors import MemoryBudgetError
from hytrain.hardware import host_share
from hytrain.placement import manager, memory_probe, move
from hytrain.placement.records import Decision

STEPS = 24


def _placements_differ(number: int) -> bool:
    """Whether the ranks have other numbers of GPU layers."""
    mine = torch.tensor([number])
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    return len({int(one) for one in everywhere}) > 1


def _train(engine: Any, by_hand: bool, seed: int, accumulation: int = 1) -> int:
    """Trains and compares; in how many steps the ranks' placements differed."""
    rng = random.Random(100 * seed + dist.get_rank())
    shadow = RankShadow(engine)
    differed = 0
    for number in range(STEPS):
        for micro in range(accumulation):
            backward(engine, 10 * number + micro)
            if micro + 1 < accumulation:
                engine.step()
                if by_hand and rng.random() < 0.3:
                    engine.set_gpu_fraction(rng.random())
        if number % 6 == 3 and dist.get_rank() == number // 6 % 2:
            with torch.no_grad():
                engine(**make_batch("mlp", 99))  # withdraws on one rank only
        shadow.step()
        if by_hand and rng.random() < 0.6:
            engine.set_gpu_fraction(rng.random())
        differed += _placements_differ(engine.optimizer.pipeline.num_gpu_layers)
        if number % 8 == 7:
            shadow.check()
            assert_equal_on_all_ranks(shadow.states)
    shadow.check()
    assert_equal_on_all_ranks(shadow.states)
    return differed


def moves_by_hand(
    fractions: Sequence[float], stage: int, clipping: float, accumulation: int, seed: int
) -> int:
    config = config_for(fractions, stage=stage, clipping=clipping, accumulation=accumulation)
    delays = environment("HYTRAIN_DELAYS", f"{seed + dist.get_rank()}:200")
    with delays, built(make_model("mlp"), config) as engine:
        return _train(engine, True, seed, accumulation)


def moves_by_a_solver(fractions: Sequence[float], stage: int, clipping: float) -> tuple[int, int]:
    """Each rank solves for its own shard, here at random; (steps that differed, decisions)."""
    solve, rng = move.solve, random.Random(7 + dist.get_rank())

    def at_random(costs: Any, method: Any, bounds: Any, **rest: Any) -> Any:
        found = solve(costs, method, bounds, **rest)
        return replace(found, gpu_layers=rng.randint(bounds.min_gpu_layers, bounds.max_gpu_layers))

    gpu_fraction: Any = "solve"
    config = config_for(fractions, stage=stage, clipping=clipping, gpu_fraction=gpu_fraction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move, "solve", at_random)
        patch.setattr(move, "worth_moving", lambda *_rest, **_more: True)
        patch.setattr(move, "SETTLED_STEPS", 0)
        patch.setattr(manager, "CONFIRMING", 1)
        with built(make_model("mlp"), config) as engine:
            differed = _train(engine, False, 0)
            return differed, len(engine.placement_decisions())


def solves(fractions: Sequence[float]) -> list[Decision]:
    """The solver as it is, for each rank's own sizes."""
    gpu_fraction: Any = "solve"
    with built(make_model("mlp"), config_for(fractions, gpu_fraction=gpu_fraction)) as engine:
        _train(engine, False, 0)
        sizes = [state.shard_size for state in engine.optimizer.layer_states]
        decisions: list[Decision] = engine.placement_decisions()
        for decision in decisions:
            assert [layer.parameters for layer in decision.layer_bytes] == sizes
        return decisions


def one_rank_without_memory(poor: int) -> str:
    """The ranks are told together, before any of them has allocated."""
    gpu_fraction: Any = "solve"

    def refuse(*_arguments: Any, **_keywords: Any) -> None:
        raise AssertionError("memory was taken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_allocate_state", refuse)
        if dist.get_rank() == poor:
            patch.setattr(memory_probe, "host_memory_pools", lambda: {"machine": 0})
        with (
            pytest.raises(MemoryBudgetError) as raised,
            built(make_model("mlp"), config_for([0.5, 0.5], gpu_fraction=gpu_fraction)),
        ):
            pass
    dist.barrier()  # nobody is left in another collective
    return str(raised.value)


def parts_of_hosts(machines: Sequence[str]) -> tuple[int, int]:
    """This rank's (ranks on its host, cores) where each runs on the machine of that name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")  # each has a launcher of its own
        patch.setattr(host_share, "machine_identity", lambda: machines[dist.get_rank()])
        patch.setattr(host_share.os, "sched_getaffinity", lambda _pid: set(range(12)))
        patch.setattr(host_share.os, "cpu_count", lambda: 12)
        with built(make_model("mlp"), config_for([0.5, 0.5])) as engine:
            host = engine.optimizer.placement.host
            return host.ranks, host.cores
