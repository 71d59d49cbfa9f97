"""What one rank does wrong, the others are told within seconds; nothing hangs.

The group's timeout is far beyond a case's: whoever waited for that would fail the test.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from harness import on_ranks
from rank_shadow import backward, config_for, take_steps
from support.engines import built
from support.models import HIDDEN, make_batch, make_model
from support.sequences import make_model as make_shared
from support.sequences import training_shared

from hytrain.comm import failure_watch as watch
from hytrain.comm import waits
from hytrain.engine import build_optimizer
from hytrain.errors import LossGraphError, OutOfStepError, RankFailedError, UnsupportedError

pytestmark = pytest.mark.timeout(240)
full = pytest.mark.parity_full

SHARDS = [0.6, 0.4]
SECONDS = 25.0
"""Until the others know, on a busy machine; the group's timeout in the tests is 60 s."""


def impatient() -> None:
    """This process is not kept for other cases: its collectives hang when a case is over."""
    waits.PATIENCE_SECONDS, watch.ASK_SECONDS = 1.5, 0.3


@contextmanager
def told(kind: type[RuntimeError], *words: str) -> Iterator[None]:
    """The error comes in time and says so; then the rank that has failed may go."""
    begin = time.monotonic()
    with pytest.raises(kind) as raised:
        yield
    assert time.monotonic() - begin < SECONDS
    assert all(word in str(raised.value) for word in words), raised.value
    c10d._get_default_store().set("raised", "1")


def _until_raised() -> None:
    """This rank lives on and never comes back, until the other one has raised."""
    c10d._get_default_store().wait(["raised"], timedelta(seconds=SECONDS + 5.0))


class _Strike:
    """A hook of the user's that raises in the middle of a backward, where it is armed."""

    def __init__(self, parameter: Any) -> None:
        self.armed = False
        parameter.register_hook(self)

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.armed:
            raise ValueError("injected")
        return gradient


@on_ranks(2, alone=True)
def test_an_exception_where_ranks_share_sequences() -> None:
    """Behind attention's last exchange, in which the other rank would wait for this process."""
    impatient()

    def train() -> None:
        with training_shared(make_shared("llama", 2), 2) as on:
            on.step(0)
            strike = _Strike(on.beside.engine.module.get_input_embeddings().weight)
            strike.armed = dist.get_rank() == 1
            on.step(1)

    if dist.get_rank() == 0:
        with told(RankFailedError, "rank 1 has failed", "ValueError: injected"):
            train()
        return
    with pytest.raises(ValueError, match="injected"):
        train()
    _until_raised()


@pytest.mark.parametrize(("failing", "step"), [(1, 2), pytest.param(0, 0, marks=full)])
@on_ranks(2, alone=True)
def test_an_exception_in_one_ranks_backward(failing: int, step: int) -> None:
    """It goes elsewhere."""
    impatient()
    model = make_model("mlp")
    strike = _Strike(model.get_parameter("blocks.2.up.weight"))
    with built(model, config_for(SHARDS, gpu_fraction=0.5)) as engine:
        take_steps(engine, range(step))
        if dist.get_rank() != failing:
            with told(RankFailedError, f"rank {failing} has failed", "ValueError: injected"):
                take_steps(engine, range(10, 20))
            return
        strike.armed = True
        with pytest.raises(ValueError, match="injected"):
            backward(engine, step)
        _until_raised()


@on_ranks(2, alone=True)
def test_all_ranks_that_fail_alike_go_on_and_slow_ones_are_waited_for() -> None:
    """Every rank's backward raises before any collective; they try again, later than patience."""
    impatient()
    model = make_model("mlp")
    strike = _Strike(model.get_parameter("head.weight"))
    with built(model, config_for(SHARDS, gpu_fraction=0.5)) as engine:
        for number in range(6):
            if number in (1, 3):
                strike.armed = True
                with pytest.raises(ValueError, match="injected"):
                    backward(engine, number)
                strike.armed = False
                if number == 1:
                    time.sleep(waits.PATIENCE_SECONDS / 2 * (1 + dist.get_rank()))
            if number == 4 + dist.get_rank():
                time.sleep(2.5 * waits.PATIENCE_SECONDS)
            take_steps(engine, [number])
        assert engine.global_steps == 6


@pytest.mark.parametrize("by_hand", [False, True])
@on_ranks(2, alone=True)
def test_a_loss_of_one_rank_that_comes_from_nothing_trained(by_hand: bool) -> None:
    impatient()
    with built(make_model("mlp"), config_for(SHARDS)) as engine:
        take_steps(engine, range(2))
        loss = engine(**make_batch("mlp", dist.get_rank()))
        if dist.get_rank() == 0:
            with told(RankFailedError, "rank 1 has failed", "rank 1: the loss has no graph"):
                engine.backward(loss)
                engine.step()
            return
        with pytest.raises(LossGraphError, match="rank 1: the loss has no graph") as raised:
            engine.scale(loss.detach()) if by_hand else engine.backward(loss.detach())
        assert isinstance(raised.value, AssertionError)
        if by_hand:  # it is the call that tells the others
            with pytest.raises(LossGraphError):
                engine.backward(loss.detach())
        _until_raised()


@pytest.mark.parametrize("fewer", [1, pytest.param(0, marks=full)])
@on_ranks(2, alone=True)
def test_fewer_micro_batches_on_one_rank(fewer: int) -> None:
    """One rank steps after two micro-batches, the other after three."""
    impatient()
    with built(make_model("mlp"), config_for(SHARDS, accumulation=3)) as engine:
        take_steps(engine, range(3))
        count = 2 if dist.get_rank() == fewer else 3
        with told(OutOfStepError, "the ranks are out of step", "engine.train_batch"):
            for number in range(count):
                engine.set_gradient_accumulation_boundary(number + 1 == count)
                backward(engine, 10 + number)
                if number + 1 == count:
                    engine.step()
            take_steps(engine, (20, 20))  # one may have come through; then nobody follows


@on_ranks(2, alone=True)
def test_warns_a_rank_that_evaluates_alone_why_it_waits() -> None:
    """After a step it uses the weights, and the other only comes back later."""
    impatient()
    said: list[str] = []
    store = c10d._get_default_store()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            store.set("said", "1")

    watch.logger.addHandler(Listener(logging.WARNING))
    with built(make_model("mlp"), config_for(SHARDS)) as engine:
        take_steps(engine, (0, 1))
        usual, watch.WARN_SECONDS = watch.WARN_SECONDS, 1.5
        if dist.get_rank() == 0:
            with torch.no_grad():
                engine(**make_batch("mlp", 0))
        else:
            end = time.monotonic() + SECONDS
            while not store.check(["said"]) and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(2 * watch.WARN_SECONDS)  # it is said once
        watch.WARN_SECONDS = usual
        take_steps(engine, [2])
        assert engine.global_steps == 3
    if dist.get_rank() == 1:
        assert not said
        return
    (text,) = said
    for words in (
        "the all-gather of '",
        "Rank 1 stands at ",
        "in test_warns_a_rank_that_evaluates_alone_why_it_waits.",
        "not there yet: ranks [1]",
        "engine.synchronize()",
    ):
        assert words in text


@full
@on_ranks(2, alone=True)
def test_data_that_ends_on_one_rank() -> None:
    config = config_for(SHARDS)
    config["hytrain"].update({"batch_sizes": [2, 1], "micro_batch_sizes": [1, 1]})
    with built(make_model("mlp"), config) as engine:
        count = (2 * 3, 1)[dist.get_rank()]
        batches = iter([{"inputs": torch.ones(1, HIDDEN)}] * count)
        engine.train_batch(batches, num_valid=lambda _: 1)
        if dist.get_rank() == 1:
            with pytest.raises(StopIteration):
                engine.train_batch(batches, num_valid=lambda _: 1)
            _until_raised()
            return
        with told(RankFailedError, "rank 1 has failed", "StopIteration"):
            engine.train_batch(batches, num_valid=lambda _: 1)


@pytest.mark.parametrize("sizes", [(3, 0), pytest.param((2, 1), marks=full)], ids=str)
@on_ranks(2, alone=True)
def test_a_model_that_changes_its_order_of_layers(sizes: tuple[int, int]) -> None:
    """Computed layer by layer under ZeRO-3, it becomes one that cannot be, on rank 0."""
    impatient()
    config = config_for(SHARDS, stage=3)
    config["hytrain"].update({"accumulation": "layer_major", "batch_sizes": list(sizes)})
    config["hytrain"]["micro_batch_sizes"] = [1, 1]
    model: Any = make_model("mlp")
    armed = [False]

    def again(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        return (model.blocks[1](args[0]),) if armed[0] else None

    model.head.register_forward_pre_hook(again)
    rank = dist.get_rank()
    with built(model, config) as engine:

        def step() -> None:
            batches = iter([{"inputs": torch.ones(1, HIDDEN)}] * sizes[rank])
            engine.train_batch(batches, num_valid=lambda _: 1)

        step()
        step()
        armed[0] = rank == 0
        if rank == 0:
            with pytest.raises(UnsupportedError, match="on their way through the layers"):
                step()
            _until_raised()
            return
        calls = "calls 'blocks.1' again"
        with told(RankFailedError, "rank 0 has failed", calls, "micro_batch_major"):
            step()


@full
@on_ranks(2, alone=True)
def test_a_build_that_fails_on_one_rank() -> None:
    """Rank 0 cannot take its memory, after all have agreed that there is enough."""
    impatient()

    def refuse(*_arguments: Any, **_keywords: Any) -> None:
        raise MemoryError("injected: no host memory")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(build_optimizer, "_allocate_state", refuse)
            with pytest.raises(MemoryError), built(make_model("mlp"), config_for(SHARDS)):
                pass
            _until_raised()
            return
        # A build ends with a comparison of the ranks' clocks: there the others are told.
        with (
            told(RankFailedError, "rank 0 has failed", "injected: no host memory"),
            built(make_model("mlp"), config_for(SHARDS)),
        ):
            pass
