"""Two ranks with placements of their own: bitwise the serial update, equal weights everywhere."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from rank_shadow import RankShadow, assert_equal_on_all_ranks, backward, config_for
from support.engines import built, environment, from_all_ranks
from support.models import make_batch, make_model

from hytrain.engine import build_optimizer as build
from hytrain.errors import MemoryBudgetError
from hytrain.hardware import host_share
from hytrain.placement import controller, memory_probe, moves, solve_schedule
from hytrain.placement.records import Decision

pytestmark = pytest.mark.timeout(240)

STEPS = 24


def _placements_differ(number: int) -> bool:
    """Whether the ranks have other numbers of GPU layers."""
    mine = torch.tensor([number])
    everywhere = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, mine)
    return len({int(one) for one in everywhere}) > 1


def _train(engine: Any, *, by_hand: bool, accumulation: int = 1) -> int:
    """Trains and compares; in how many steps the ranks' placements differed."""
    rng = random.Random(300 + dist.get_rank())
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


@pytest.mark.parametrize(
    ("fractions", "stage", "clipping", "accumulation"),
    [
        ((0.5, 0.5), 2, 0.02, 1),
        ((0.7, 0.3), 1, 100.0, 1),
        ((0.7, 0.3), 2, 0.02, 2),
    ],
    ids=str,
)
@on_ranks(2)
def test_each_rank_moves_other_layers(
    fractions: tuple[float, ...], stage: int, clipping: float, accumulation: int
) -> None:
    config = config_for(fractions, stage=stage, clipping=clipping, accumulation=accumulation)
    delays = environment("HYTRAIN_DELAYS", f"{3 + dist.get_rank()}:200")
    with delays, built(make_model("mlp"), config) as engine:
        assert _train(engine, by_hand=True, accumulation=accumulation) > STEPS // 2


@pytest.mark.parametrize(
    ("fractions", "stage", "clipping"),
    [((0.7, 0.3), 2, 0.02), ((0.5, 0.5), 1, 100.0)],
    ids=str,
)
@on_ranks(2)
def test_each_rank_solves_for_itself(
    fractions: tuple[float, ...], stage: int, clipping: float
) -> None:
    """Here at random."""
    solve, rng = controller.solve, random.Random(7 + dist.get_rank())

    def at_random(costs: Any, method: Any, bounds: Any, **rest: Any) -> Any:
        found = solve(costs, method, bounds, **rest)
        return replace(found, gpu_layers=rng.randint(bounds.min_gpu_layers, bounds.max_gpu_layers))

    gpu_fraction: Any = "solve"
    config = config_for(fractions, stage=stage, clipping=clipping, gpu_fraction=gpu_fraction)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "solve", at_random)
        patch.setattr(controller, "worth_moving", lambda *_rest, **_more: True)
        patch.setattr(moves, "SETTLED_STEPS", 0)
        patch.setattr(solve_schedule, "CONFIRMING", 1)
        with built(make_model("mlp"), config) as engine:
            assert _train(engine, by_hand=False) > STEPS // 4
            assert len(engine.placement_decisions()) > 3


@on_ranks(2)
def test_the_real_solver_knows_its_own_shard() -> None:
    gpu_fraction: Any = "solve"
    with built(make_model("mlp"), config_for((0.7, 0.3), gpu_fraction=gpu_fraction)) as engine:
        _train(engine, by_hand=False)
        sizes = [state.shard_size for state in engine.optimizer.layer_states]
        decisions: list[Decision] = engine.placement_decisions()
    for decision in decisions:
        assert [layer.parameters for layer in decision.layer_bytes] == sizes
    large, small = from_all_ranks((sum(sizes), decisions[0].limits.host))
    assert large[0] > 2 * small[0]
    assert large[1] > 0
    # Both had seen what the host has left before either took any of it.
    assert abs(large[1] - small[1]) < 2**30


@pytest.mark.parametrize("poor", [0, 1])
@on_ranks(2)
def test_a_rank_that_does_not_fit_is_refused_on_all(poor: int) -> None:
    """Together, before any of them has allocated."""
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
    is_poor = dist.get_rank() == poor
    own = "the optimizer state fits in no split between GPU and host"
    assert (own if is_poor else "another rank") in str(raised.value)


@pytest.mark.parametrize(("machines", "part"), [("ab", (1, 12)), ("aa", (2, 6))], ids=str)
@on_ranks(2)
def test_ranks_ask_each_other_where_they_run(
    machines: str, part: tuple[int, int], tmp_path: Path
) -> None:
    """``part``: ranks on this one's host, and its cores."""
    boot_id = tmp_path / str(dist.get_rank())
    boot_id.write_text(machines[dist.get_rank()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "1")  # each has a launcher of its own
        # Not machine_identity: a module that is first imported here would keep the false one.
        patch.setattr(host_share, "_BOOT_ID", boot_id)
        patch.setattr(host_share.os, "sched_getaffinity", lambda _pid: set(range(12)))
        patch.setattr(host_share.os, "cpu_count", lambda: 12)
        with built(make_model("mlp"), config_for([0.5, 0.5])) as engine:
            host = engine.optimizer.placement.host
            assert (host.ranks, host.cores) == part
