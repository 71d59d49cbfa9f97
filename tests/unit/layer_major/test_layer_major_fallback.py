"""What cannot be computed layer by layer is noticed, said once, and computed as ever."""

from __future__ import annotations

import logging
import re
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
    config = make_config(accumulation=2, bf16=False, hytrain={"accumulation": "layer_major"})
    with built(model, config) as engine:
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
    config = make_config(accumulation=2, bf16=False, hytrain={"accumulation": "layer_major"})
    with built(model, config) as engine:
        for step in range(2):
            calls.clear()
            engine.train_batch(iter([make_batch("llama", 2 * step + i) for i in range(2)]))
        assert engine.batch_training.accumulation.refusal is None
        assert model.model.layers[1].gradient_checkpointing
    assert len(calls) == 4  # two micro-batches, forward and backward


class Changing(Mlp):
    """Does as told from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.habit = ""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs)
        for index, block in enumerate(self.blocks):
            if self.habit == "skip" and index == 2:
                continue
            x = block(x)
        if self.habit == "again":
            x = self.blocks[0](x)
        return self.head(x).pow(2).mean()


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


@pytest.mark.parametrize("habit", ["skip", "again"])
def test_a_model_that_changes_later_falls_back_then(habit: str) -> None:
    def steps(accumulation: str) -> tuple[list[float], dict[str, Any], Any]:
        torch.manual_seed(0)
        model = Changing()
        section = {"accumulation": accumulation}
        config = make_config(accumulation=2, bf16=False, clipping=0.5, hytrain=section)
        with built(model, config) as engine:
            losses = []
            for step in range(4):
                model.habit = habit if step >= 2 else ""
                batches = iter([mlp_batch(2 * step), mlp_batch(2 * step + 1)])
                losses.append(float(engine.train_batch(batches, rows)))
            refusal = vars(engine.batch_training.accumulation).get("refusal")
            return losses, engine.fp32_state_dict(), refusal

    losses, state, refusal = steps("layer_major")
    assert refusal is not None
    expected_losses, expected, _ = steps("micro_batch_major")
    assert losses == expected_losses
    for name, tensors in expected.items():
        assert torch.equal(state[name]["fp32"], tensors["fp32"]), name


@pytest.mark.parametrize("gpu_fraction", [0.0, 1.0])
def test_an_error_in_the_second_pass_leaves_the_last_step(gpu_fraction: float) -> None:
    """After the first layers have been sent: the step is taken back, and training goes on."""
    torch.manual_seed(0)
    model = Changing()
    model.blocks[2] = SpoilingBlock()
    section = {"accumulation": "layer_major"}
    config = make_config(
        gpu_fraction=gpu_fraction, accumulation=2, bf16=False, clipping=0.5, hytrain=section
    )
    with built(model, config) as engine:
        shadow = Shadow(engine)
        for step in range(2):
            engine.train_batch(iter([mlp_batch(step), mlp_batch(step + 5)]), rows)
        before = engine.fp32_state_dict()
        model.blocks[2].spoils = True
        with pytest.raises(RuntimeError, match="spoiled"):
            engine.train_batch(iter([mlp_batch(3), mlp_batch(4)]), rows)
        model.blocks[2].spoils = False
        for name, tensors in engine.fp32_state_dict().items():
            assert torch.equal(tensors["fp32"], before[name]["fp32"]), name
        engine.train_batch(iter([mlp_batch(3), mlp_batch(4)]), rows)
        assert engine.batch_training.accumulation.refusal is None
        assert len(shadow.gradients) == len(shadow.states)


class UserError(Exception):
    """Of the user's code."""


@pytest.mark.parametrize("where", ["before", "block", "behind", "loss"])
def test_the_users_error_is_raised_and_blames_nobody(where: str) -> None:
    class Failing(Mlp):
        fails = ""

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            x = self.embed(inputs)
            if self.fails == "before":
                raise UserError(where)
            for block in self.blocks:
                x = block(x)
            if self.fails == "behind":
                raise UserError(where)
            return self.head(x).pow(2).mean() if self.fails != "loss" else x

    torch.manual_seed(0)
    model = Failing()

    def fail(_module: nn.Module, _inputs: object) -> None:
        if model.fails == "block":
            raise UserError(where)

    model.blocks[1].up.register_forward_pre_hook(fail)
    config = make_config(accumulation=2, bf16=False, hytrain={"accumulation": "layer_major"})
    error = UnsupportedError if where == "loss" else UserError
    with built(model, config) as engine:
        for fails in (True, False, True, False):
            model.fails = where if fails else ""
            batches = iter([mlp_batch(0), mlp_batch(1)])
            if fails:
                with pytest.raises(error):
                    engine.train_batch(batches, rows)
            else:
                engine.train_batch(batches, rows)
        assert engine.batch_training.accumulation.refusal is None
        assert engine.global_steps == 2


def test_gradients_left_by_the_user_are_the_steps_first() -> None:
    def steps(accumulation: str) -> Any:
        torch.manual_seed(0)
        model = Mlp()
        section = {"accumulation": accumulation}
        config = make_config(accumulation=2, bf16=False, clipping=0.5, hytrain=section)
        with built(model, config) as engine:
            engine.train_batch(iter([mlp_batch(0), mlp_batch(1)]), rows)
            engine.set_gradient_accumulation_boundary(False)
            engine.backward(engine(**mlp_batch(2)))
            engine.set_gradient_accumulation_boundary(None)
            engine.train_batch(iter([mlp_batch(3), mlp_batch(4)]), rows)
            engine.train_batch(iter([mlp_batch(5), mlp_batch(6)]), rows)
            return engine.fp32_state_dict()

    one, other = steps("layer_major"), steps("micro_batch_major")
    assert all(torch.equal(one[name]["fp32"], other[name]["fp32"]) for name in other)


def test_steps_by_hand_between_steps_of_train_batch() -> None:
    """Both modes learn their own numbers of firings (a tied weight's differ)."""
    model = make_model("gpt2")
    config = make_config(accumulation=2, bf16=False, hytrain={"accumulation": "layer_major"})
    with built(model, config) as engine:
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
