"""fp16's loss scale, and what gradients are reduced in, on 2 ranks."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from harness import on_ranks
from rank_shadow import config_for
from support.engines import built
from support.models import make_model
from support.precision import (
    LR,
    fp16_on_a_cpu,
    plain_zero2,
    scale_moves_after_the_step,
    scaled_loss,
)

pytestmark = pytest.mark.timeout(240)

ADAMW = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1}}


def _config(stage: int, fractions: tuple[float, ...] = (0.7, 0.3), **more: Any) -> dict[str, Any]:
    return config_for(fractions, stage=stage, gpu_fraction=0.5, **{"bf16": False, **more})


def _train(engine: Any) -> tuple[list[tuple[float, int]], list[float]]:
    """(scale, skipped steps) after each step, and its loss; one rank alone overflows, in turns."""
    moves: list[tuple[float, int]] = []
    losses: list[float] = []
    for step in range(14):
        overflows = step % 5 == 3 and step % 2 == dist.get_rank()
        loss = scaled_loss(engine, 2 * step + dist.get_rank(), 1e9 if overflows else 1.0)
        engine.backward(loss)
        engine.step()
        moves.append((float(engine.optimizer.cur_scale), engine.skipped_steps))
        losses.append(loss.item())
    return moves, losses


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_scale_moves_as_deepspeeds(stage: int) -> None:
    """The same steps are skipped, with the same scale, as in DeepSpeed's ZeRO-2 of its own."""
    fp16 = {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}
    config = _config(stage, fp16=fp16, optimizer=ADAMW)
    with fp16_on_a_cpu(), scale_moves_after_the_step():
        with plain_zero2(config) as theirs:
            expected, expected_losses = _train(theirs)
        with built(make_model("llama"), config) as engine:
            found, losses = _train(engine)
    assert found == expected
    assert found[-1][1] >= 3
    differences = [abs(a / b - 1) for a, b in zip(losses, expected_losses, strict=True)]
    assert max(differences) < 5e-5, differences


def _largest_gradient(engine: Any) -> float:
    """Of any parameter, without a scale; all ranks have the same batch."""
    engine.backward(scaled_loss(engine, 0))
    found = [deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()]
    return max(float(gradient.abs().max()) for gradient in found if gradient is not None)


@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_sum_would_overflow(stage: int) -> None:
    """A gradient above half of fp16's range on each rank: its mean is in range, its sum is not."""
    with built(make_model("llama"), _config(stage)) as engine:
        largest = _largest_gradient(engine)
    fp16 = {"enabled": True, "loss_scale": 45000.0 / largest}
    with fp16_on_a_cpu(), built(make_model("llama"), _config(stage, fp16=fp16)) as engine:
        assert _largest_gradient(engine) == pytest.approx(largest, rel=0.02)
        engine.step()
        assert not engine.optimizer.overflow


def _reduced(config: dict[str, Any]) -> tuple[list[torch.Tensor], set[torch.dtype]]:
    """This rank's reduced gradients of a step of two micro-batches, and what was communicated."""
    shards: dict[int, torch.Tensor] = {}
    sent: set[torch.dtype] = set()
    with built(make_model("llama"), config) as engine:
        collectives = engine.optimizer.collectives
        reduce_scatter = collectives.reduce_scatter

        def watch(flat: torch.Tensor, *rest: Any) -> None:
            sent.add(flat.dtype)
            reduce_scatter(flat, *rest)

        collectives.reduce_scatter = watch
        engine.optimizer.passes.reducer.on_reduced_gradient = lambda state, gradient: shards.update(
            {state.index: gradient.clone()}
        )
        for number in range(2):
            engine.backward(scaled_loss(engine, 2 * number + dist.get_rank()))
            engine.step()
    return [shards[index] for index in sorted(shards)], sent


@pytest.mark.parametrize(
    ("stage", "accumulated", "communicated"),
    [(2, "fp32", "bf16"), (3, "fp32", "fp16"), (1, "bf16", "fp32"), (2, "bf16", "bf16")],
)
@on_ranks(2)
def test_communication_dtype(stage: int, accumulated: str, communicated: str) -> None:
    """Gradients are reduced in the one dtype, accumulated in the other."""
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    types = {"grad_accum_dtype": accumulated}
    config = _config(stage, bf16=True, accumulation=2, data_types=types)
    expected, sent = _reduced(config)
    assert sent == {kinds[accumulated]}, "without the key: what they are accumulated in"
    found, sent = _reduced({**config, "communication_data_type": communicated})
    assert sent == {kinds[communicated]}
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype == kinds[accumulated]
        # fp16's is a mean (DeepSpeed's, too), and the others' are sums until the update.
        whole = ours.float() * (dist.get_world_size() if communicated == "fp16" else 1)
        largest = theirs.float().abs().max()
        error = float(((whole - theirs.float()).abs() / largest).max())
        assert error < 0.02
        worst = max(worst, error)
    # Two bf16 numbers have the same sum either way.
    assert (worst > 0) is (accumulated == "fp32")
