"""What cannot be computed layer by layer is noticed, said once, and computed as ever."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import layer_major_models as models
import pytest
import torch
from layer_major_runs import assert_same, mlp_batch, rows, train
from support.engines import built, make_config
from support.models import Block, Mlp, make_batch, make_model
from support.shadow import Shadow
from torch import nn

from hytrain.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.timeout(120)

REASONS = {
    models.Twice: "calls 'blocks.1' where 'blocks.2' is the next block",
    models.TwiceAtTheEnd: "calls 'blocks.3' again, behind the last block",
    models.Backwards: "calls 'blocks.3' where 'blocks.0' is the next block",
    models.LayerDrop: "is the next block|without calling",
    models.Aside: "used outside of it but is not among its outputs",
    models.Reentrant: "gradients turned off",
    models.NonReentrant: "inside of a checkpoint",
    models.Writing: "written to in place",
    models.Counting: "returns something else the second time",
    models.Running: "changes its buffers",
    models.Appending: "changes a list or mapping among its arguments",
    models.Shared: "used again behind a later one",
    models.Remembering: "another loss",
    models.Plain: "no stack of blocks",
}


def four_rows(number: int) -> dict[str, torch.Tensor]:
    """Batch norm needs several."""
    generator = torch.Generator().manual_seed(number)
    return {"inputs": torch.randn(4, 32, generator=generator)}


def two(first: int) -> Any:
    """Micro-batches of a step."""
    return iter([mlp_batch(first), mlp_batch(first + 1)])


def small(accumulation: str = "layer_major", **options: Any) -> dict[str, Any]:
    """A configuration of two micro-batches."""
    section = {"accumulation": accumulation}
    return make_config(accumulation=2, bf16=False, hytrain=section, **options)


@pytest.mark.parametrize("make", REASONS, ids=lambda make: make.__name__)
def test_falls_back_and_says_why(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hytrain"):
        run = train(make, four_rows)
    said = [r.getMessage() for r in caplog.records if "layer by layer" in r.getMessage()]
    assert len(said) == 1, "said once, though there were several steps"
    assert run.refusal is not None
    assert run.refusal in said[0]
    assert re.search(REASONS[make], run.refusal), run.refusal
    assert_same(run, train(make, four_rows, accumulation="micro_batch_major"))


def test_a_cache_is_turned_off_for_the_step_and_on_again() -> None:
    caches: list[Any] = []
    model = make_model("llama")
    model.model.layers[0].register_forward_pre_hook(
        lambda _m, _a, kwargs: caches.append(kwargs.get("past_key_values")), with_kwargs=True
    )
    with built(model, small()) as engine:
        assert model.config.use_cache
        engine.train_batch(iter([make_batch("llama", 0), make_batch("llama", 1)]))
        assert engine.batch_training.accumulation.refusal is None
        assert model.config.use_cache
    assert caches
    assert not any(caches)


def test_a_cache_that_the_batch_asks_for_is_noticed() -> None:
    def cached(number: int) -> dict[str, Any]:
        return {**make_batch("llama", number), "use_cache": True}

    run = train(lambda: make_model("llama"), cached)
    assert run.refusal is not None
    assert_same(run, train(lambda: make_model("llama"), cached, accumulation="micro_batch_major"))


def test_blocks_that_checkpoint_themselves_are_computed_twice_and_not_three_times() -> None:
    calls: list[int] = []
    model = make_model("llama")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    with built(model, small()) as engine:
        for step in range(2):
            calls.clear()
            engine.train_batch(iter([make_batch("llama", 2 * step + i) for i in range(2)]))
        assert engine.batch_training.accumulation.refusal is None
        assert model.model.layers[1].gradient_checkpointing
    assert len(calls) == 4  # two micro-batches, forward and backward


class Changing(models.Numbering):
    """Does as told from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.habit = ""

    def through(self, x: torch.Tensor) -> torch.Tensor:
        x = self.numbered(x)
        for index, block in enumerate(self.blocks):
            if self.habit != "skip" or index != 2:
                x = block(x)
        return self.blocks[0](x) if self.habit == "again" else x


class SpoilingBlock(Block):
    """Fails when it is computed again, once it is told to."""

    spoils = False

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        if self.spoils:
            self.times = vars(self).get("times", 0) + 1
            if self.times > 2:
                raise RuntimeError("spoiled")
        return y


def both_end_alike(steps: Callable[[Any], list[float]]) -> Any:
    """A training of two micro-batches both ways; what the one layer by layer was refused for."""
    ends: list[Any] = []
    for accumulation in ("layer_major", "micro_batch_major"):
        torch.manual_seed(0)
        with built(Changing(), small(accumulation, clipping=0.5)) as engine:
            losses = steps(engine)
            refusal = vars(engine.batch_training.accumulation).get("refusal")
            state = {name: x["fp32"] for name, x in engine.fp32_state_dict().items()}
            ends.append((losses, state, refusal))
    (ours, mine, refusal), (theirs, expected, _) = ends
    assert ours == theirs
    assert all(torch.equal(mine[name], tensor) for name, tensor in expected.items())
    return refusal


@pytest.mark.parametrize("habit", ["skip", "again"])
def test_a_model_that_changes_later_falls_back_then(habit: str) -> None:
    def steps(engine: Any) -> list[float]:
        losses: list[float] = []
        for step in range(4):
            engine.module.habit = habit if step >= 2 else ""
            losses.append(float(engine.train_batch(two(2 * step), rows)))
        return losses

    assert both_end_alike(steps) is not None


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
def test_an_error_in_the_second_pass_leaves_the_last_step(gpu_fraction: float) -> None:
    """After the first layers have been sent: the step is taken back, and training goes on."""
    torch.manual_seed(0)
    model = Changing()
    model.blocks[2] = SpoilingBlock()
    with built(model, small(gpu_fraction=gpu_fraction, clipping=0.5)) as engine:
        shadow = Shadow(engine)
        for step in range(2):
            engine.train_batch(two(step), rows)
        before = engine.fp32_state_dict()
        model.blocks[2].spoils = True
        with pytest.raises(RuntimeError, match="spoiled"):
            engine.train_batch(two(3), rows)
        model.blocks[2].spoils = False
        for name, tensors in engine.fp32_state_dict().items():
            assert torch.equal(tensors["fp32"], before[name]["fp32"]), name
        engine.train_batch(two(3), rows)
        assert engine.batch_training.accumulation.refusal is None
        assert len(shadow.gradients) == len(shadow.states)


class UserError(Exception):
    """Of the user's code."""


@pytest.mark.parametrize("where", ["before", "block", "behind", "loss"])
def test_the_users_error_is_raised_and_blames_nobody(where: str) -> None:
    class Failing(Mlp):
        fails = ""

        def through(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails == "before":
                raise UserError(where)
            x = super().through(x)
            if self.fails == "behind":
                raise UserError(where)
            return x

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            loss = super().forward(inputs)
            return loss.expand(2) if self.fails == "loss" else loss

    torch.manual_seed(0)
    model = Failing()

    def fail(_module: nn.Module, _inputs: object) -> None:
        if model.fails == "block":
            raise UserError(where)

    model.blocks[1].up.register_forward_pre_hook(fail)
    error = UnsupportedError if where == "loss" else UserError
    with built(model, small()) as engine:
        for fails in (True, False, True, False):
            model.fails = where if fails else ""
            with pytest.raises(error) if fails else nullcontext():
                engine.train_batch(two(0), rows)
        assert engine.batch_training.accumulation.refusal is None
        assert engine.global_steps == 2


def test_gradients_left_by_the_user_are_the_steps_first() -> None:
    def steps(engine: Any) -> list[float]:
        losses = [engine.train_batch(two(0), rows)]
        engine.set_gradient_accumulation_boundary(False)
        engine.backward(engine(**mlp_batch(2)))
        engine.set_gradient_accumulation_boundary(None)
        losses += [engine.train_batch(two(first), rows) for first in (3, 5)]
        return [float(loss) for loss in losses]

    assert both_end_alike(steps) is None


def test_steps_by_hand_between_steps_of_train_batch() -> None:
    """Both modes learn their own numbers of firings (a tied weight's differ)."""
    model = make_model("gpt2")
    with built(model, small()) as engine:
        early: list[int] = []
        for step in range(6):
            if step % 2:
                engine.train_batch(iter([make_batch("gpt2", step), make_batch("gpt2", step + 9)]))
                continue
            for micro in range(2):
                engine.backward(engine(**make_batch("gpt2", 20 * step + micro)).loss)
                early.append(sum(s.update.sent for s in engine.optimizer.layer_states))
                engine.step()
        assert engine.batch_training.accumulation.refusal is None
    layers = len(engine.optimizer.layer_states)
    assert early == [0, layers] * 3


def test_offload_needs_layer_major() -> None:
    with pytest.raises(ConfigError, match=r'needs "hytrain\.accumulation": "layer_major"'):
        train(Mlp, accumulation="micro_batch_major", activations="offload")


@pytest.mark.parametrize("make", [Mlp, models.TwiceAtTheEnd], ids=lambda make: make.__name__)
def test_deepspeeds_timers_know_one_forward_at_a_time(make: Any) -> None:
    run = train(make, wall_clock_breakdown=True)
    assert (run.refusal is None) == (make is Mlp)
