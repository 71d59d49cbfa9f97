"""Micro-batches, however the user's loop announces them."""

from __future__ import annotations

import pytest
import torch
from support.engines import built, make_config
from support.models import Block, make_model
from support.shadow import Shadow, Twin
from torch import nn
from torch.utils.checkpoint import checkpoint
from training import FRACTIONS, backward, inputs

pytestmark = [pytest.mark.timeout(60), pytest.mark.parametrize("gpu_fraction", FRACTIONS)]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [None, "fp32"])
def test_sum_of_micro_batches_in_bf16_and_fp32(
    gpu_fraction: float, stage: int, dtype: str | None
) -> None:
    """data_types.grad_accum_dtype decides in which precision gradients add up."""
    model = make_model("mlp")
    plain = Twin(model).plain.bfloat16()
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
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(gpu_fraction=gpu_fraction, bf16=False)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for first, length in ((0, 1), (1, 3), (4, 2), (6, 1)):
            numbers = range(first, first + length)
            expected = twin.gradients(engine, [inputs(n) for n in numbers])
            for number in numbers:
                is_last = number == numbers[-1]
                engine.set_gradient_accumulation_boundary(is_last)
                backward(engine, number)
                if is_last:
                    shadow.step()
                else:
                    engine.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


def test_accumulation_left_to_the_caller(gpu_fraction: float) -> None:
    """managed_gradient_accumulation=false: every step() is a step."""
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(gpu_fraction=gpu_fraction, bf16=False, managed_gradient_accumulation=False)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        number = 0
        for length in (1, 3, 2, 1):
            batches = [inputs(number + i) for i in range(length)]
            expected = twin.gradients(engine, batches)
            for batch in batches:
                engine.backward(engine(**batch))
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
            number += length
        shadow.check()
        assert shadow.steps == 4


@pytest.mark.parametrize("call", ["engine", "module"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_loss_backward_without_the_engine(
    gpu_fraction: float, accumulation: int, call: str
) -> None:
    """loss.backward(); with engine.module(x) the engine sees neither forward nor backward."""
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(gpu_fraction=gpu_fraction, bf16=False, accumulation=accumulation)
    # DeepSpeed scales by the accumulation steps where it sees the forward.
    scale = 1.0 / accumulation if call == "engine" else 1.0
    with built(model, config) as engine:
        shadow = Shadow(engine)
        forward = engine if call == "engine" else engine.module
        early = []
        for step in range(4):
            batches = [inputs(10 * step + micro) for micro in range(accumulation)]
            expected = twin.gradients(engine, batches, scale)
            for batch in batches[:-1]:
                forward(**batch).backward()
                engine.step()
            forward(**batches[-1]).backward()
            early.append(sum(state.update.sent for state in shadow.states))
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()
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
    model = Segments()
    twin = Twin(model)
    config = make_config(gpu_fraction=gpu_fraction, bf16=False)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for step in range(4):
            expected = twin.gradients(engine, [inputs(step)])
            engine.module(**inputs(step)).backward()
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


def test_no_sync(gpu_fraction: float) -> None:
    model = make_model("mlp")
    twin = Twin(model)
    config = make_config(gpu_fraction=gpu_fraction, bf16=False, stage=1)
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for step in range(4):
            batches = [inputs(3 * step + micro) for micro in range(3)]
            expected = twin.gradients(engine, batches)
            with engine.no_sync():
                for batch in batches[:-1]:
                    engine.backward(engine(**batch))
            engine.backward(engine(**batches[-1]))
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


def test_discarded_gradients_are_gone(gpu_fraction: float) -> None:
    model = make_model("mlp")
    twin = Twin(model)
    with built(model, make_config(gpu_fraction=gpu_fraction, bf16=False)) as engine:
        shadow = Shadow(engine)
        for step in range(4):
            backward(engine, 50 + step)
            engine.optimizer.passes.discard_gradients()
            shadow.assert_copy_is_current()
            expected = twin.gradients(engine, [inputs(step)])
            backward(engine, step)
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


def test_create_graph_leaves_no_gradient_behind(gpu_fraction: float) -> None:
    model = make_model("mlp")
    twin = Twin(model)
    with built(model, make_config(gpu_fraction=gpu_fraction, bf16=False)) as engine:
        shadow = Shadow(engine)
        for step in range(3):
            expected = twin.gradients(engine, [inputs(step)])
            engine(**inputs(step)).backward(create_graph=True)
            shadow.step()
            twin.assert_were_reduced(shadow, expected)
        shadow.check()


def test_without_overlap_of_the_forward_the_weights_are_there_after_step(
    gpu_fraction: float,
) -> None:
    config = make_config(gpu_fraction=gpu_fraction, offload={"overlap_forward": False})
    with built(make_model("mlp"), config) as engine:
        shadow = Shadow(engine)
        for step in range(3):
            backward(engine, step)
            shadow.step()
            shadow.assert_copy_is_current()
        shadow.check()


def test_a_first_backward_without_gradients_teaches_nothing(gpu_fraction: float) -> None:
    """torch.autograd.grad goes through the model and fires no hook; later steps overlap."""
    with built(make_model("mlp"), make_config(gpu_fraction=gpu_fraction, bf16=False)) as engine:
        shadow = Shadow(engine)
        given = inputs(0)["inputs"].requires_grad_()
        assert torch.autograd.grad(engine(inputs=given), given)[0].any()
        early = []
        for number in range(3):
            backward(engine, number)
            early.append(sum(state.update.sent for state in shadow.states))
            shadow.step()
        assert early[1:] == [6, 6]
        shadow.check()
