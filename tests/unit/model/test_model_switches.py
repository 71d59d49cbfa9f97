"""Caches and blocks' own checkpointing are off during a step, however they are set before it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from support.models import make_model
from torch import nn

from hytrain.layer_major.accumulation import TrainingSwitches


def test_what_is_turned_on_after_the_first_step_is_turned_off_in_the_next() -> None:
    model = make_model("llama")
    model.config.use_cache = False
    blocks = list(model.model.layers)
    switches = TrainingSwitches(model, blocks)
    with switches.turned_off():
        pass
    assert not model.config.use_cache
    model.config.use_cache = True
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert all(block.gradient_checkpointing for block in blocks)
    with switches.turned_off():
        assert not model.config.use_cache
        assert not any(block.gradient_checkpointing for block in blocks)
    assert model.config.use_cache
    assert all(block.gradient_checkpointing for block in blocks)


def test_blocks_that_are_not_recomputed_keep_their_checkpointing() -> None:
    model = make_model("llama")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with TrainingSwitches(model).turned_off():
        assert all(block.gradient_checkpointing for block in model.model.layers)


def test_another_configuration_of_a_part_counts_and_an_error_turns_on_again() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first, second = SimpleNamespace(use_cache=True), SimpleNamespace(use_cache=True)
    vars(model[0])["config"] = first
    vars(model[1])["config"] = {"use_cache": True}  # not a configuration: left alone
    switches = TrainingSwitches(model)
    vars(model[0])["config"] = second
    during: list[bool] = []

    def fail() -> None:
        with switches.turned_off():
            during.extend(
                [first.use_cache, second.use_cache, vars(model[1])["config"]["use_cache"]]
            )
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert during == [True, False, True]
    assert second.use_cache
