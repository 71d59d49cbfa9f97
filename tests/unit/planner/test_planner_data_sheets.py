"""Clusters estimated from data sheets: what moments in fewer bytes change."""

from __future__ import annotations

import pytest
from planner_clusters import planned

from hytrain.formats.moment_kinds import MomentsName, state_bytes_each
from hytrain.formats.profile_file import ProfiledModel
from hytrain.tools.planner.device_sheets import ModelShape
from hytrain.tools.planner.named_gpus import HostWishes, estimated_cluster
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from

BLOCK, OUTSIDE = 202_000_000, 131_000_000


def shape(moments: MomentsName) -> ModelShape:
    """A Llama of 7 B, about."""
    model = ProfiledModel(
        name="seven",
        num_layers=32,
        layer_parameters=BLOCK,
        outside_parameters=(OUTSIDE, OUTSIDE),
        seq_len=1024,
        dtype="bf16",
        boundary_bytes=2 * 1024 * 4096,
        moments=moments,
    )
    return ModelShape(model, hidden=4096, vocabulary=32000)


@pytest.mark.parametrize("moments", ["fp32", "bf16", "8bit"])
def test_state_has_as_many_bytes_as_the_moments_take(moments: MomentsName) -> None:
    wishes = HostWishes(memory_bytes=256 << 30)
    profile = estimated_cluster([["l4", "l4"]], shape(moments), wishes)
    base = estimated_cluster([["l4", "l4"]], shape("fp32"), wishes)
    options = PlanOptions(
        batch=8,
        gpu_reserve=lambda total: 0,
        host_reserve=lambda total: 0,
        stage=3,
        interconnect=1e10,
    )
    problem = problem_from(profile, options)
    assert problem.gpu_state_bytes == state_bytes_each(moments)
    plan = planned(problem)
    on_gpu = problem.model.gpu_parts
    on_host = sum(rank.shard_fraction * (1.0 - on_gpu[rank.gpu_layers]) for rank in plan.ranks) * (
        32 * BLOCK + 2 * OUTSIDE
    )
    each = sum(rank.host_bytes for rank in plan.ranks) / on_host
    assert each == pytest.approx(problem.host_state_bytes, rel=0.01)
    # Hardly faster than by the bytes that are swept, and faster than with fp32.
    most = (2 * 12 + 6) / (2 * state_bytes_each(moments) + 6)
    rates = [
        (profile.devices[0].update_rate, base.devices[0].update_rate),
        *[
            (own.rate, plain.rate)
            for own, plain in zip(profile.hosts[0].updates, base.hosts[0].updates, strict=True)
        ],
    ]
    for own, plain in rates:
        assert (own > plain) is (moments != "fp32")
        assert own / plain <= 1.05 * most
