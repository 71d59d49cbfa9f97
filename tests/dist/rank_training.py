"""Cases for two ranks; every function here runs on each of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comparisons import assert_same_bits
from support.engines import built, make_config
from support.models import Recomputed, loss_of, make_batch, make_model
from support.parity import copies_of
from support.shadow import Shadow
from torch import nn

from hytrain.errors import GradientOrderError
from hytrain.model.layer_state import LayerState


class RankShadow(Shadow):
    """Follows an engine whose state is shared: the norm is that of all ranks."""

    def step(self) -> bool:
        groups = [dict(group) for group in self.engine.optimizer.param_groups]
        self.engine.step()
        self.last, self.gradients = self.gradients, {}
        sums = [float(self.last[i].double().pow(2).sum()) for i in range(len(self.states))]
        total = torch.tensor(sums, dtype=torch.float64).sum().reshape(1)
        dist.all_reduce(total)
        skip = not bool(torch.isfinite(total))
        assert self.engine.optimizer.overflow is skip
        if not skip:
            # The clip coefficient comes from the engine: its sum has another order than this one.
            outcome = self.engine.optimizer.pipeline.norm.read_decision()
            norm = float(total.sqrt()) * self.unscale
            assert abs(outcome.norm - norm) <= 1e-9 * norm
            self._scale = outcome.scale
            self._commit(groups, outcome.norm)
        return skip

    @property
    def unscale(self) -> float:
        return 1.0 / dist.get_world_size() if self.engine.gradient_average else 1.0

    def _gradient_scale(self) -> float:
        return self._scale


def assert_equal_on_all_ranks(states: Sequence[LayerState]) -> None:
    """Every rank has the same training copy, bit for bit."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, copies_of(list(states)))
    for other in everywhere:
        for state, mine, theirs in zip(states, everywhere[dist.get_rank()], other, strict=True):
            assert_same_bits(f"copy of {state.name}", mine, theirs)


def config_for(fractions: Sequence[float], **values: Any) -> dict[str, Any]:
    return make_config(hytrain={"shard_fractions": list(fractions)}, **values)


def backward(engine: Any, number: int, **batch: Any) -> None:
    """This rank's forward and backward; the ranks have different batches."""
    data = make_batch("mlp", 2 * number + dist.get_rank())
    engine.backward(loss_of(engine(**data, **batch)))


def reduced_gradients_are_the_mean(fractions: Sequence[float], stage: int) -> None:
    """What the ranks' hooks saw, summed as the collective does, is what each shard gets."""
    model = make_model("mlp")
    local: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: local.__setitem__(name, g.clone()))
    config = config_for(fractions, stage=stage, gpu_fraction=0.5)
    with built(model, config) as engine:
        shadow = RankShadow(engine)
        for number in range(4):
            local.clear()
            backward(engine, number)
            shadow.step()
            for state in shadow.states:
                _assert_is_sum(state, local, shadow.last[state.index])
            engine.synchronize()
            assert_equal_on_all_ranks(shadow.states)
        shadow.check()
        sizes = [state.shard_size for state in shadow.states]
        share = sum(sizes) / sum(state.layout.size for state in shadow.states)
        assert abs(share - fractions[dist.get_rank()]) < 0.02


def _assert_is_sum(state: LayerState, local: dict[str, torch.Tensor], got: torch.Tensor) -> None:
    flat = torch.zeros(state.layout.size, dtype=got.dtype)
    for slot in state.layout.slots:
        flat[slot.offset : slot.offset + slot.numel] = local[slot.name].flatten()
    everywhere = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, flat)
    # Of two numbers the sum does not depend on the order; the mean is taken in the update's scale.
    assert_same_bits(
        f"gradient of {state.name}",
        got,
        sum(everywhere[1:], everywhere[0])[state.begin : state.end],
    )


def overflow_on_one_rank(fractions: Sequence[float], gpu_fraction: float, poisoned: int) -> None:
    model = make_model("mlp")
    armed = [False]

    def strike(gradient: torch.Tensor) -> torch.Tensor:
        if not armed[0]:
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[0] = float("inf")
        return gradient

    next(model.parameters()).register_hook(strike)
    config = config_for(fractions, gpu_fraction=gpu_fraction, clipping=0.1)
    with built(model, config) as engine:
        shadow = RankShadow(engine)
        for number, strikes in enumerate([False, True, False, True, True, False]):
            armed[0] = strikes and dist.get_rank() == poisoned
            backward(engine, number)
            assert shadow.step() is strikes
        shadow.check()
        assert engine.skipped_steps == 3
        assert_equal_on_all_ranks(shadow.states)


class Choosing(nn.Module):
    """An MLP whose forward may leave a block out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model("mlp")

    def forward(self, inputs: torch.Tensor, leave_out: int | None = None) -> torch.Tensor:
        x = self.inner.embed(inputs.to(self.inner.embed.weight.dtype))
        for index, block in enumerate(self.inner.blocks):
            if index != leave_out:
                x = block(x)
        return self.inner.head(x).float().pow(2).mean()


def layer_unused_on_one_rank(fractions: Sequence[float], first_step: bool, stage: int) -> None:
    with built(Choosing(), config_for(fractions, stage=stage, gpu_fraction=0.3)) as engine:
        shadow = RankShadow(engine)
        for number in range(6):
            leaves_out = dist.get_rank() == 1 and (number % 2 == 0) is first_step
            backward(engine, number, leave_out=2 if leaves_out else None)
            shadow.step()
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def no_backward_on_one_rank(fractions: Sequence[float], stage: int, idle_steps: list[int]) -> None:
    """The rank without a batch takes part with zeros, with or without a forward."""
    with built(make_model("mlp"), config_for(fractions, stage=stage)) as engine:
        shadow = RankShadow(engine)
        for number in range(7):
            if dist.get_rank() == 0 or number not in idle_steps:
                backward(engine, number)
            elif number % 2:
                engine(**make_batch("mlp", number))
            shadow.step()
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def withdraw_on_one_rank(fractions: Sequence[float], gpu_fraction: float) -> None:
    """One rank evaluates between backward and step, the other does not."""
    with built(make_model("mlp"), config_for(fractions, gpu_fraction=gpu_fraction)) as engine:
        shadow = RankShadow(engine)
        for number in range(5):
            backward(engine, number)
            if dist.get_rank() == number % 2:
                with torch.no_grad():
                    engine(**make_batch("mlp", 99))
                shadow.assert_copy_is_current()
            shadow.step()
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def late_gradient(fractions: Sequence[float]) -> None:
    """The counts are not learned anew: a rank that did not fail would not join in."""
    model = Recomputed()
    with built(model, config_for(fractions)) as engine:
        shadow = RankShadow(engine)
        for number in range(2):
            backward(engine, number)
            shadow.step()
        collector = engine.optimizer.collector
        learned = collector.record
        assert learned is not None
        model.times = 2
        with pytest.raises(GradientOrderError, match="start the job again from a checkpoint"):
            backward(engine, 2)
        assert collector.record is learned
        shadow.check()


def two_backward_passes(fractions: Sequence[float], stage: int, accumulation: int) -> None:
    config = config_for(fractions, stage=stage, accumulation=accumulation, gpu_fraction=0.5)
    with built(make_model("mlp"), config) as engine:
        shadow = RankShadow(engine)
        for step in range(4):
            for micro in range(accumulation - 1):
                backward(engine, 10 * step + micro)
                engine.step()
            backward(engine, 10 * step + 8)
            backward(engine, 10 * step + 9)
            shadow.step()
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def no_sync(fractions: Sequence[float]) -> None:
    with built(make_model("mlp"), config_for(fractions, stage=1, gpu_fraction=0.3)) as engine:
        shadow = RankShadow(engine)
        for step in range(4):
            with engine.no_sync():
                backward(engine, 10 * step)
                backward(engine, 10 * step + 1)
            backward(engine, 10 * step + 2)
            shadow.step()
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def gradients_are_summed(fractions: Sequence[float], clipping: float) -> None:
    config = config_for(fractions, clipping=clipping, gpu_fraction=0.5)
    config["gradient_allreduce_op"] = "sum"
    with built(make_model("mlp"), config) as engine:
        shadow = RankShadow(engine)
        for number in range(4):
            backward(engine, number)
            shadow.step()
            outcome = engine.optimizer.pipeline.norm.read_decision()
            expected = min(1.0, clipping / (outcome.norm + 1e-6))
            assert outcome.scale == float(torch.tensor(expected, dtype=torch.float32))
        shadow.check()
        assert_equal_on_all_ranks(shadow.states)


def number_of_fractions_is_wrong() -> str:
    model = make_model("mlp")
    before = [p.data_ptr() for p in model.parameters()]
    try:
        with built(model, config_for([0.2, 0.3, 0.5])):
            pass
    except ValueError as error:
        assert [p.data_ptr() for p in model.parameters()] == before
        return str(error)
    raise AssertionError("three fractions were accepted for two ranks")


def train_until_killed(victim: int, report: str) -> None:
    """The rank ``victim`` dies in the middle of training; the other one reports how it ended."""
    with built(make_model("mlp"), config_for([0.5, 0.5])) as engine:
        for number in range(3):
            backward(engine, number)
            engine.step()
        if dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        begin = time.monotonic()
        try:
            for number in range(100):
                backward(engine, number)
                engine.step()
        except RuntimeError:
            engine.destroy()
            Path(report).write_text(str(time.monotonic() - begin))
            raise
