"""register(): code that calls deepspeed.initialize itself gets hytrain's engine."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
from support.engines import make_config
from support.models import make_model

import hytrain
import hytrain.api
from hytrain.errors import ConfigError

pytestmark = pytest.mark.usefixtures("process_group")


def build(config: dict[str, object]) -> object:
    model = make_model("mlp")
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config_params=config
    )
    return engine


def test_the_block_builds_hytrains_engine_and_ends_cleanly() -> None:
    original = deepspeed.initialize
    with hytrain.register():
        engine = build(make_config())
        assert isinstance(engine, hytrain.HyTrainEngine)
        engine.destroy()
    assert deepspeed.initialize is original


def test_a_block_that_builds_no_engine_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hytrain.api.Registration, "was_used", False)
    with hytrain.register():
        pass
    assert "hytrain is not used" in caplog.text
    caplog.clear()
    with pytest.raises(KeyError), hytrain.register():
        raise KeyError
    with hytrain.register():
        engine: Any = build(make_config())
        engine.destroy()
    assert "hytrain is not used" not in caplog.text


def test_undo_is_idempotent_and_registrations_nest() -> None:
    original = deepspeed.initialize
    outer = hytrain.register()
    inner = hytrain.register()
    inner.undo()
    inner.undo()
    assert deepspeed.initialize is not original
    outer.undo()
    assert deepspeed.initialize is original


def test_a_swap_that_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a script replaces the name by its own before hytrain.api is imported."""

    def swapped(**keywords: Any) -> Any:
        return hytrain.initialize(**keywords)

    monkeypatch.setattr(hytrain.api, "_original_initialize", swapped)
    monkeypatch.setattr(deepspeed, "initialize", swapped)
    with pytest.raises(ConfigError, match=r"hytrain\.register\(\)"):
        build(make_config())
    monkeypatch.undo()
    with hytrain.register():
        engine: Any = build(make_config())
        engine.destroy()
