"""Cases in which one rank fails, or does other things than the rest: nobody waits for ever.

The group's timeout is far beyond a case's: whoever waited for that would fail the test.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from rank_training import backward, config_for
from support.engines import built
from support.models import HIDDEN, make_batch, make_model

from hytrain.comm import failure_watch as watch
from hytrain.errors import OutOfStepError, RankFailedError, UnsupportedError

SHARDS = [0.6, 0.4]
SECONDS = 25.0
"""Until the others know, on a busy machine; the group's timeout in the tests is 60 s."""


def impatient() -> None:
    """This process is not kept for other cases: its collectives hang when a case is over."""
    watch.PATIENCE_SECONDS, watch.ASK_SECONDS = 1.5, 0.3


def ends(folder: str, how: str) -> None:
    """Rank 1's script ends, with an exception (then its process outlives rank 0's) or without."""
    other = Path(folder, "rank0")
    with built(make_model("mlp"), config_for(SHARDS)) as engine:
        backward(engine, 0)
        engine.step()
        if dist.get_rank() == 1 and how == "exit":
            engine.destroy = lambda: None  # nobody does
            sys.exit(3)
        if dist.get_rank() == 1:
            show = sys.excepthook
            sys.excepthook = lambda *error: (show(*error), _until_gone(other))
            raise KeyError("injected: the script's own mistake")
        other.write_text(str(os.getpid()))
        match = "own mistake" if how == "raise" else "its process has ended"
        Path(folder, "text").write_text(_others_raise(engine, match, RankFailedError))


def _until_gone(path: Path) -> None:
    """Until the process whose number the file has is gone; a while at most."""
    deadline = time.monotonic() + SECONDS + 5.0
    while time.monotonic() < deadline:
        number = path.read_text() if path.exists() else ""
        if number and not Path("/proc", number).exists():
            return
        time.sleep(0.1)


def _others_raise(engine: Any, match: str, kind: type[RuntimeError]) -> str:
    """Trains on until the failure is seen; its text."""

    def train() -> None:
        for number in range(10, 20):
            backward(engine, number)
            engine.step()

    begin = time.monotonic()
    with pytest.raises(kind, match=match) as raised:
        train()
    assert time.monotonic() - begin < SECONDS
    _tell_raised()
    return str(raised.value)


def _tell_raised() -> None:
    """The rank that has failed may go now."""
    c10d._get_default_store().set("raised", "1")


def _until_raised() -> None:
    """This rank lives on and never comes back, until the other one has raised."""
    c10d._get_default_store().wait(["raised"], timedelta(seconds=SECONDS + 5.0))


def fails_in_backward(failing: int, step: int) -> str | None:
    """A hook of the user's raises on one rank in the middle of a backward; it goes elsewhere."""
    impatient()
    model = make_model("mlp")
    armed = [False]

    def strike(gradient: torch.Tensor) -> torch.Tensor:
        if armed[0]:
            raise ValueError("injected into block 2")
        return gradient

    model.blocks[2].up.weight.register_hook(strike)  # type: ignore[index, union-attr]
    with built(model, config_for(SHARDS, gpu_fraction=0.5)) as engine:
        for number in range(step):
            backward(engine, number)
            engine.step()
        if dist.get_rank() != failing:
            return _others_raise(engine, "injected into block 2", RankFailedError)
        armed[0] = True
        with pytest.raises(ValueError, match="injected"):
            backward(engine, step)
        _until_raised()
    return None


def all_fail_alike() -> None:
    """Every rank's backward raises before any collective; they try again, later than patience."""
    impatient()
    model = make_model("mlp")
    armed = [False]

    def strike(gradient: torch.Tensor) -> torch.Tensor:
        if armed[0]:
            raise ValueError("injected")
        return gradient

    model.head.weight.register_hook(strike)  # type: ignore[union-attr]
    with built(model, config_for(SHARDS, gpu_fraction=0.5)) as engine:
        for number in range(6):
            if number in (1, 3):
                armed[0] = True
                with pytest.raises(ValueError, match="injected"):
                    backward(engine, number)
                armed[0] = False
                if number == 1:
                    time.sleep(watch.PATIENCE_SECONDS / 2 * (1 + dist.get_rank()))
            backward(engine, number)
            engine.step()
        assert engine.global_steps == 6


def fewer_micro_batches(stage: int, fewer: int) -> str:
    """One rank steps after two micro-batches, the other after three."""
    impatient()
    with built(make_model("mlp"), config_for(SHARDS, stage=stage, accumulation=3)) as engine:
        for number in range(3):
            backward(engine, number)
            engine.step()
        count = 2 if dist.get_rank() == fewer else 3

        def train() -> None:
            for number in range(count):
                engine.set_gradient_accumulation_boundary(number + 1 == count)
                backward(engine, 10 + number)
                if number + 1 == count:
                    engine.step()
            for _ in range(2):  # one may have come through; then nobody follows
                backward(engine, 20)
                engine.step()

        begin = time.monotonic()
        with pytest.raises(OutOfStepError, match=r"engine\.train_batch") as raised:
            train()
        assert time.monotonic() - begin < SECONDS
        return str(raised.value)


def slow_ranks_are_waited_for() -> None:
    """A rank that takes longer than patience is not given up."""
    impatient()
    with built(make_model("mlp"), config_for(SHARDS)) as engine:
        for number in range(3):
            if number == 1 + dist.get_rank():
                time.sleep(2.5 * watch.PATIENCE_SECONDS)
            backward(engine, number)
            engine.step()
        assert engine.global_steps == 3


def one_rank_evaluates(alone: int) -> list[str]:
    """After a step one rank uses the weights, and the other only comes back later."""
    impatient()
    said: list[str] = []
    store = c10d._get_default_store()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            store.set("said", "1")

    watch.logger.addHandler(Listener(logging.WARNING))
    with built(make_model("mlp"), config_for(SHARDS)) as engine:
        for number in range(2):
            backward(engine, number)
            engine.step()
        usual, watch.WARN_SECONDS = watch.WARN_SECONDS, 1.5
        if dist.get_rank() == alone:
            with torch.no_grad():
                engine(**make_batch("mlp", 0))
        else:
            end = time.monotonic() + SECONDS
            while not store.check(["said"]) and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(2 * watch.WARN_SECONDS)  # it is said once
        watch.WARN_SECONDS = usual
        backward(engine, 2)
        engine.step()
        assert engine.global_steps == 3
    return said


def data_ends_on_one_rank(short: int) -> str | None:
    section = {"batch_sizes": [2, 1], "micro_batch_sizes": [1, 1]}
    config = config_for(SHARDS)
    config["hytrain"].update(section)
    with built(make_model("mlp"), config) as engine:
        count = (2, 1)[dist.get_rank()] * (1 if dist.get_rank() == short else 3)
        batches = iter([{"inputs": torch.ones(1, HIDDEN)}] * count)
        begin = time.monotonic()
        engine.train_batch(batches, num_valid=lambda _: 1)
        if dist.get_rank() == short:
            with pytest.raises(StopIteration):
                engine.train_batch(batches, num_valid=lambda _: 1)
            _until_raised()
            return None
        with pytest.raises(RankFailedError, match="StopIteration") as raised:
            engine.train_batch(batches, num_valid=lambda _: 1)
        assert time.monotonic() - begin < SECONDS
        _tell_raised()
        return str(raised.value)


def layers_in_another_order_later(failing: int, sizes: tuple[int, ...]) -> str | None:
    """Computed layer by layer under ZeRO-3, a model becomes one that cannot be, on one rank."""
    impatient()
    section = {"accumulation": "layer_major", "batch_sizes": list(sizes)}
    section["micro_batch_sizes"] = [1] * len(sizes)
    config = config_for(SHARDS, stage=3)
    config["hytrain"].update(section)
    model = make_model("mlp")
    armed = [False]
    blocks: Any = model.blocks

    def again(_module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> Any:
        return (blocks[1](args[0]),) if armed[0] else None

    model.get_submodule("head").register_forward_pre_hook(again)
    rank = dist.get_rank()
    with built(model, config) as engine:

        def step() -> None:
            batches = iter([{"inputs": torch.ones(1, HIDDEN)}] * sizes[rank])
            engine.train_batch(batches, num_valid=lambda _: 1)

        for _ in range(2):
            step()
        armed[0] = rank == failing
        begin = time.monotonic()
        if rank == failing:
            with pytest.raises(UnsupportedError, match="on their way through the layers"):
                step()
            _until_raised()
            return None
        with pytest.raises(RankFailedError, match="micro_batch_major") as raised:
            step()
        assert time.monotonic() - begin < SECONDS
        _tell_raised()
        return str(raised.value)


def build_fails_on_one_rank(failing: int) -> str | None:
    """One rank cannot take its memory, after all have agreed that there is enough."""
    impatient()
    from hytrain.engine import build_optimizer as build

    def refuse(*_arguments: Any, **_keywords: Any) -> None:
        raise MemoryError("injected: no host memory")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == failing:
            patch.setattr(build, "_allocate_state", refuse)
            with pytest.raises(MemoryError), built(make_model("mlp"), config_for(SHARDS)):
                pass
            _until_raised()
            return None
        # A build ends with a comparison of the ranks' clocks: there the others are told.
        begin = time.monotonic()
        with (
            pytest.raises(RankFailedError, match="injected: no host memory") as raised,
            built(make_model("mlp"), config_for(SHARDS)),
        ):
            pass
        assert time.monotonic() - begin < SECONDS
        _tell_raised()
        return str(raised.value)


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    ends(sys.argv[1], sys.argv[2])
