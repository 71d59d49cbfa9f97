"""An exception in the update worker reaches the training thread, and nothing hangs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from support.engines import built, environment, make_config
from support.models import make_model
from training import backward, inputs, make_steps

from hytrain.errors import WorkerError
from hytrain.offload import cpu_updater

pytestmark = pytest.mark.timeout(120)
AT_ONCE = 20.0
"""Seconds in which what does not wait is over, on a busy machine too; what waits does for ever."""


def _train(engine: Any) -> None:
    make_steps(engine, range(1, 100))


def _wait_for_failure(engine: Any) -> None:
    """The worker fails on its own thread; a call that waits for nothing may come before it."""
    deadline = time.monotonic() + AT_ONCE
    while time.monotonic() < deadline:
        try:
            engine.optimizer.pipeline.cpu.worker.check_error()
        except RuntimeError:
            return
        time.sleep(0.001)
    raise AssertionError("the worker did not fail")


@pytest.mark.parametrize("layer", [0, 3, 5])
def test_the_error_names_the_layer(layer: int) -> None:
    with built(make_model("mlp"), make_config()) as engine:
        backward(engine, 0)
        engine.step()
        engine.synchronize()
        name = engine.optimizer.layer_states[layer].name
        engine.optimizer.pipeline.cpu.worker.fail_at(layer)
        begin = time.monotonic()
        with pytest.raises(WorkerError, match=f"layer '{name}'.*injected fault"):
            _train(engine)
        assert time.monotonic() - begin < AT_ONCE  # also a thread that waits for the layer


USES: dict[str, Callable[[Any], Any]] = {
    "forward": lambda engine: engine(**inputs(5)),
    "backward": lambda engine: backward(engine, 5),
    "step": lambda engine: engine.step(),
    "synchronize": lambda engine: engine.synchronize(),
    "state_dict": lambda engine: engine.module.state_dict(),
    "flush": lambda engine: engine.optimizer.flush(),
    "eval": lambda engine: engine.eval(),
}


@pytest.mark.parametrize("use", USES)
def test_every_later_call_raises_at_once(use: str) -> None:
    with built(make_model("mlp"), make_config(clipping=1e-3)) as engine:
        make_steps(engine, range(2))
        engine.synchronize()
        engine.optimizer.pipeline.cpu.worker.fail_at(0)  # the last to get its gradient
        with suppress(WorkerError):  # it may strike before backward has ended
            backward(engine, 2)
        begin = time.monotonic()
        _wait_for_failure(engine)
        for _ in range(2):  # the second time as well
            with pytest.raises(WorkerError, match=r"'before blocks\.0'"):
                USES[use](engine)
        assert time.monotonic() - begin < AT_ONCE


def test_warns_of_a_wait_that_lasts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Delays stand for copies that do not come; the training goes on when they do."""
    monkeypatch.setattr(cpu_updater, "STALL_SECONDS", 0.02)
    with (
        environment("HYTRAIN_DELAYS", "3:60000"),
        built(make_model("mlp"), make_config()) as engine,
    ):
        backward(engine, 0)
        engine.step()
        engine.synchronize()
    told = [text for text in caplog.messages if "has finished nothing for 0.02 s" in text]
    assert told
    assert all("CPU update: " in text and "jobs left" in text for text in told)
    assert any("of layer 'blocks" in text for text in told)


def test_destroy_after_a_failure() -> None:
    with built(make_model("mlp"), make_config()) as engine:
        engine.optimizer.pipeline.cpu.worker.fail_at(2)
        # The worker may be so far during backward already.
        with pytest.raises(WorkerError):
            _train(engine)
        begin = time.monotonic()
        engine.destroy()
        assert time.monotonic() - begin < AT_ONCE
    # Another engine in the same process is not affected.
    with built(make_model("mlp"), make_config()) as engine:
        backward(engine, 0)
        engine.step()
        engine.synchronize()
