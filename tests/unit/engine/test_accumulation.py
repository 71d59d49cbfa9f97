"""Micro-batches and forwards, however the user's loop announces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.comparisons import assert_same_states
from support.engines import built, device, make_config
from support.models import Block, make_model
from support.shadow import Shadow, Twin
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import FRACTIONS, backward, followed, inputs, refused_step

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]


# -- micro-batches, however the user's loop announces them -------------------------------------


@pytest.mark.parametrize(("stage", "dtype"), [(1, "fp32"), (2, None), (2, "fp32")])
def test_sum_of_micro_batches_in_bf16_and_fp32(
    gpu_fraction: float, stage: int, dtype: str | None
) -> None:
    """data_types.grad_accum_dtype decides in which precision gradients add up."""
    model = make_model("mlp")
    plain = Twin(model).plain.bfloat16().to(device())
    types = {"grad_accum_dtype": dtype} if dtype else None
    config = make_config(
        gpu_fraction=gpu_fraction, accumulation=3, stage=stage, clipping=0.1, data_types=types
    )
    wanted = torch.float32 if dtype else torch.bfloat16
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for step in range(3):
            engine.synchronize()
            plain.load_state_dict(engine.module.state_dict())
            sums = {name: torch.zeros_like(p, dtype=wanted) for name, p in plain.named_parameters()}
            for micro in range(3):
                number = 3 * step + micro
                plain.zero_grad()
                (plain(**inputs(number)) / 3).backward()
                for name, p in plain.named_parameters():
                    assert p.grad is not None
                    sums[name] += p.grad
                backward(engine, number)
                shadow.step() if micro == 2 else engine.step()
            for state in shadow.states:
                assert shadow.last[state.index].dtype == wanted
                for slot in state.layout.slots:
                    got = shadow.last[state.index][slot.offset : slot.offset + slot.numel]
                    assert torch.equal(got, sums[slot.name].flatten()), slot.name
        shadow.check()


def test_boundaries_set_by_the_user(gpu_fraction: float) -> None:
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction) as run:
        for first, length in ((0, 1), (1, 3), (4, 2), (6, 1)):
            numbers = range(first, first + length)
            with run.step(*numbers):
                for number in numbers:
                    run.engine.set_gradient_accumulation_boundary(number == numbers[-1])
                    backward(run.engine, number)
                    if number != numbers[-1]:
                        run.engine.step()


def test_what_is_no_loss_leaves_the_step_as_it_is(gpu_fraction: float) -> None:
    """DeepSpeed refuses it before anything runs back."""
    config = {"gpu_fraction": gpu_fraction, "accumulation": 2}
    with followed(make_model("mlp"), **config) as run, run.step(0, 1, scale=0.5):
        backward(run.engine, 0)
        run.engine.step()
        with pytest.raises(AssertionError, match="must be a scalar"):
            run.engine.backward(run.engine(**inputs(1)).repeat(2))
        backward(run.engine, 1)


def test_accumulation_left_to_the_caller(gpu_fraction: float) -> None:
    """managed_gradient_accumulation=false: every step() is a step."""
    config = {"gpu_fraction": gpu_fraction, "managed_gradient_accumulation": False}
    with followed(make_model("mlp"), **config) as run:
        for numbers in ((0,), (1, 2, 3), (4, 5), (6,)):
            with run.step(*numbers):
                for number in numbers:
                    backward(run.engine, number)
        assert run.shadow.steps == 4


def test_accumulation_left_to_the_caller_goes_on_after_a_refused_step(gpu_fraction: float) -> None:
    """Updates that are committed directly begin in step() again."""
    config = make_config(
        gpu_fraction=gpu_fraction, direct=True, managed_gradient_accumulation=False
    )
    with built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        for numbers in ((0,), (1, 2)):
            for number in numbers:
                backward(engine, number)
            refused_step(engine)
            backward(engine, 10)
            backward(engine, 20)
            shadow.step()
            shadow.check()


def test_a_step_that_is_under_way_when_a_state_is_loaded(gpu_fraction: float) -> None:
    """Its micro-batches are forgotten, and the next one has all of its own."""
    with built(make_model("mlp"), make_config(gpu_fraction=gpu_fraction, accumulation=3)) as engine:
        for number in range(2):
            backward(engine, number)
            engine.step()
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())
        for number in range(3):
            assert engine.global_steps == 0
            backward(engine, number)
            engine.step()
        assert engine.global_steps == 1


@pytest.mark.parametrize("call", ["engine", "module"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_backward_without_the_engine(
    gpu_fraction: float, accumulation: int, call: str
) -> None:
    """loss.backward(); with engine.module(x) the engine sees neither forward nor backward."""
    # DeepSpeed scales by the accumulation steps where it sees the forward.
    scale = 1.0 / accumulation if call == "engine" else 1.0
    early: list[int] = []
    config = {"gpu_fraction": gpu_fraction, "accumulation": accumulation}
    with followed(make_model("mlp"), **config) as run:
        forward = run.engine if call == "engine" else run.engine.module
        for step in range(4):
            numbers = [10 * step + micro for micro in range(accumulation)]
            with run.step(*numbers, scale=scale) as batches:
                for batch in batches[:-1]:
                    forward(**batch).backward()
                    run.engine.step()
                forward(**batches[-1]).backward()
                early.append(run.sent())
    assert early[1:] == [6] * 3


class Segments(nn.Module):
    """All weights lie in reentrant segments: their gradients arrive in inner backward passes."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = inputs.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x.pow(2).mean()


def test_reentrant_segments_past_the_engine(gpu_fraction: float) -> None:
    with followed(Segments(), gpu_fraction=gpu_fraction) as run:
        for step in range(4):
            with run.step(step) as (batch,):
                run.engine.module(**batch).backward()


def test_no_sync(gpu_fraction: float) -> None:
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction, stage=1) as run:
        for step in range(4):
            numbers = [3 * step + micro for micro in range(3)]
            with run.step(*numbers):
                with run.engine.no_sync():
                    for number in numbers[:-1]:
                        backward(run.engine, number)
                backward(run.engine, numbers[-1])


def test_discarded_gradients_are_gone(gpu_fraction: float) -> None:
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction) as run:
        for step in range(4):
            backward(run.engine, 50 + step)
            run.engine.optimizer.passes.discard_gradients()
            run.shadow.assert_copy_is_current()
            run.good_step(step)


def test_create_graph_leaves_no_gradient_behind(gpu_fraction: float) -> None:
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction) as run:
        for step in range(3):
            with run.step(step) as (batch,):
                run.engine(**batch).backward(create_graph=True)


def test_without_overlap_of_the_forward_the_weights_are_there_after_step(
    gpu_fraction: float,
) -> None:
    offload = {"overlap_forward": False}
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction, offload=offload) as run:
        for step in range(3):
            run.good_step(step)
            run.shadow.assert_copy_is_current()


def test_a_first_backward_without_gradients_teaches_nothing(gpu_fraction: float) -> None:
    """torch.autograd.grad goes through the model and fires no hook; later steps overlap."""
    early: list[int] = []
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction) as run:
        given = inputs(0)["inputs"].requires_grad_()
        assert torch.autograd.grad(run.engine(inputs=given), given)[0].any()
        for number in range(3):
            with run.step(number):
                backward(run.engine, number)
                early.append(run.sent())
    assert early[1:] == [6, 6]


# -- several forwards before a backward, as preference and contrastive losses have them --------

STEPS = 4


def _one_loss(engine: Any, one: torch.Tensor, other: torch.Tensor) -> None:
    engine.backward(one + other)


def _one_loss_past_the_engine(engine: Any, one: torch.Tensor, other: torch.Tensor) -> None:
    del engine
    (one + other).backward()


def _two_backwards(*ways: str) -> Callable[[Any, torch.Tensor, torch.Tensor], None]:
    def backward(engine: Any, one: torch.Tensor, other: torch.Tensor) -> None:
        for way, loss, is_last in zip(ways, (one, other), (False, True), strict=True):
            engine.set_gradient_accumulation_boundary(is_last)
            engine.backward(loss) if way == "engine" else loss.backward()

    return backward


BACKWARDS = {
    "one loss": _one_loss,
    "one loss past the engine": _one_loss_past_the_engine,
    "two losses": _two_backwards("engine", "engine"),
    "two losses past the engine": _two_backwards("loss", "loss"),
    "the second past the engine": _two_backwards("engine", "loss"),
    "the first past the engine": _two_backwards("loss", "engine"),
}


@pytest.mark.parametrize("way", BACKWARDS)
def test_both_gradients_count(gpu_fraction: float, way: str) -> None:
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction) as run:
        for number in range(STEPS):
            with run.step(2 * number, 2 * number + 1) as batches:
                BACKWARDS[way](run.engine, *(run.engine(**batch) for batch in batches))


@pytest.mark.parametrize("way", BACKWARDS)
def test_weights_that_are_gathered(gpu_fraction: float, way: str) -> None:
    """ZeRO-3 with weights on the host makes the same steps, bit by bit."""
    states = []
    for zero in ({"stage": 2}, {"stage": 3, "offload_param": {"device": "cpu"}}):
        config = make_config(gpu_fraction=gpu_fraction, bf16=False, clipping=0.5)
        config["zero_optimization"].update(zero)
        with built(make_model("mlp"), config) as engine:
            for number in range(STEPS):
                batches = [inputs(2 * number), inputs(2 * number + 1)]
                BACKWARDS[way](engine, *(engine(**batch) for batch in batches))
                engine.step()
            states.append(engine.fp32_state_dict())
    assert_same_states(*states)


def test_a_micro_batch_of_two_forwards_before_the_last(gpu_fraction: float) -> None:
    """With step() at the boundary only, as accelerate calls it: nothing is dropped."""
    with followed(make_model("mlp"), gpu_fraction=gpu_fraction, accumulation=2) as run:
        engine = run.engine
        for number in range(STEPS):
            numbers = [3 * number + part for part in range(3)]
            with run.step(*numbers, scale=0.5) as batches:
                engine.set_gradient_accumulation_boundary(False)
                engine.backward(engine(**batches[0]) + engine(**batches[1]))
                engine.set_gradient_accumulation_boundary(True)
                engine.backward(engine(**batches[2]))
