"""Cases of precision on several ranks: fp16's loss scale, and what gradients are reduced in."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from rank_training import config_for
from support.engines import built
from support.models import loss_of, make_batch, make_model
from support.precision import fp16_on_a_cpu, scale_moves_after_the_step

_LR = 1e-3


def _config(stage: int, fractions: tuple[float, ...] = (0.7, 0.3), **more: Any) -> dict[str, Any]:
    return config_for(fractions, stage=stage, gpu_fraction=0.5, **{"bf16": False, **more})


def _loss(engine: Any, number: int, factor: float = 1.0) -> torch.Tensor:
    return loss_of(engine(**make_batch("llama", number))).float() * factor


def _train(engine: Any) -> tuple[list[tuple[float, int]], list[float]]:
    """(scale, skipped steps) after each step, and its loss; one rank alone overflows, in turns."""
    moves: list[tuple[float, int]] = []
    losses: list[float] = []
    for step in range(14):
        overflows = step % 5 == 3 and step % 2 == dist.get_rank()
        loss = _loss(engine, 2 * step + dist.get_rank(), 1e9 if overflows else 1.0)
        engine.backward(loss)
        engine.step()
        moves.append((float(engine.optimizer.cur_scale), engine.skipped_steps))
        losses.append(loss.item())
    return moves, losses


def scale_moves_as_deepspeeds(stage: int) -> None:
    """The same steps are skipped, with the same scale, as in DeepSpeed's ZeRO-2 of its own."""
    fp16 = {"enabled": True, "initial_scale_power": 17, "loss_scale_window": 2, "hysteresis": 1}
    config = _config(stage, fp16=fp16, optimizer={"type": "AdamW", "params": {"lr": _LR}})
    plain = {key: value for key, value in config.items() if key not in ("hytrain", "optimizer")}
    plain["zero_optimization"] = {"stage": 2}
    with fp16_on_a_cpu(), scale_moves_after_the_step():
        model = make_model("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
        theirs, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=plain)
        expected, expected_losses = _train(theirs)
        theirs.destroy()
        with built(make_model("llama"), config) as engine:
            found, losses = _train(engine)
    assert found == expected
    assert found[-1][1] >= 3
    differences = [abs(a / b - 1) for a, b in zip(losses, expected_losses, strict=True)]
    assert max(differences) < 5e-5, differences


def _largest_gradient(config: dict[str, Any]) -> float:
    """Of any parameter, without a scale; all ranks have the same batch."""
    with built(make_model("llama"), config) as engine:
        engine.backward(_loss(engine, 0))
        found = [deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()]
        return max(float(gradient.abs().max()) for gradient in found if gradient is not None)


def sum_would_overflow(stage: int) -> None:
    """A gradient above half of fp16's range on each rank: its mean is in range, its sum is not."""
    largest = _largest_gradient(_config(stage))
    fp16 = {"enabled": True, "loss_scale": 45000.0 / largest}
    with fp16_on_a_cpu(), built(make_model("llama"), _config(stage, fp16=fp16)) as engine:
        engine.backward(_loss(engine, 0))
        found = [deepspeed.utils.safe_get_full_grad(p) for p in engine.module.parameters()]
        seen = max(float(gradient.abs().max()) for gradient in found if gradient is not None)
        assert seen == pytest.approx(largest, rel=0.02)
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
            engine.backward(_loss(engine, 2 * number + dist.get_rank()))
            engine.step()
    return [shards[index] for index in sorted(shards)], sent


def communication_dtype(stage: int, accumulated: str, communicated: str) -> None:
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
