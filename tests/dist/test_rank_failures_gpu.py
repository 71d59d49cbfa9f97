"""Two GPUs over NCCL: a failed rank, and ranks that are out of step, end the job within seconds."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as multiprocessing
from support.ports import free_port
from test_two_gpus import enter_rank

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.timeout(300),
]

SECONDS = 60.0
"""Until both know; the group's own timeout is DeepSpeed's half hour."""


def _backward(engine: Any, number: int) -> None:
    from support.engines import device
    from support.models import loss_of, make_batch

    engine.backward(loss_of(engine(**make_batch("llama", number, device()))))


def _engine(accumulation: int, wait_in_stream: bool) -> Any:
    from support.engines import make_config
    from support.models import make_model

    import hytrain

    section = {"shard_fractions": [0.6, 0.4], "wait_in_stream": wait_in_stream}
    config = make_config(gpu_fraction=0.5, accumulation=accumulation, hytrain=section)
    model = make_model("llama")
    engine, *_ = hytrain.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def _train(engine: Any, numbers: range) -> None:
    for number in numbers:
        _backward(engine, number)
        engine.step()


def _live_on(folder: str) -> None:
    """Does not come back until rank 0 knows; after rank 0's end this process would be ended."""
    end = time.monotonic() + SECONDS
    while not Path(folder, "rank0").exists() and time.monotonic() < end:
        time.sleep(0.05)


def fails_in_backward(rank: int, port: int, folder: str, wait_in_stream: bool) -> None:
    from hytrain.errors import RankFailedError

    enter_rank(rank, port)
    engine = _engine(1, wait_in_stream)
    armed = [False]

    def strike(gradient: torch.Tensor) -> torch.Tensor:
        if armed[0]:
            raise ValueError("injected into layer 2")
        return gradient

    engine.module.model.layers[2].mlp.up_proj.weight.register_hook(strike)
    for number in range(3):
        _backward(engine, number)
        engine.step()
    armed[0] = rank == 1
    begin = time.monotonic()
    if rank == 1:
        with pytest.raises(ValueError, match="injected"):
            _backward(engine, 3)
        _live_on(folder)
    else:
        with pytest.raises(RankFailedError, match="injected into layer 2"):
            _train(engine, range(3, 10))
    assert time.monotonic() - begin < SECONDS
    Path(folder, f"rank{rank}").touch()
    os._exit(0)  # the group is broken: its destructor would wait


def fewer_micro_batches(rank: int, port: int, folder: str, wait_in_stream: bool) -> None:
    from hytrain.errors import OutOfStepError, RankFailedError

    enter_rank(rank, port)
    engine = _engine(3, wait_in_stream)
    for number in range(6):
        _backward(engine, number)
        engine.step()
    count = 2 if rank == 1 else 3
    begin = time.monotonic()
    text = "nothing was raised"
    try:
        for number in range(count):
            engine.set_gradient_accumulation_boundary(number + 1 == count)
            _backward(engine, 10 + number)
        engine.step()
        for number in range(20, 20 + count):
            engine.set_gradient_accumulation_boundary(number + 1 == 20 + count)
            _backward(engine, number)
        engine.step()
    except (OutOfStepError, RankFailedError) as error:
        text = str(error)
    assert time.monotonic() - begin < SECONDS
    Path(folder, f"rank{rank}").write_text(text)
    time.sleep(10)  # the store is rank 0's: the other one asks it until then
    os._exit(0)


def evaluates_alone(rank: int, port: int, folder: str, wait_in_stream: bool) -> None:
    """Rank 0 uses the weights after a step, and its host waits for what the device never gets."""
    from support.engines import device
    from support.models import loss_of, make_batch

    from hytrain.comm import failure_watch as watch
    from hytrain.comm import waits
    from hytrain.errors import RankFailedError

    watch.WARN_SECONDS = waits.PATIENCE_SECONDS
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    watch.logger.addHandler(Listener(logging.WARNING))
    enter_rank(rank, port)
    engine = _engine(1, wait_in_stream)
    _train(engine, range(2))

    def evaluate() -> float:
        with torch.no_grad():
            return float(loss_of(engine(**make_batch("llama", 9, device()))))

    def evaluate_and_train() -> None:
        evaluate()
        _train(engine, range(4, 6))

    if rank == 0:
        evaluate()
    else:
        time.sleep(3 * watch.WARN_SECONDS)
    _train(engine, range(2, 4))
    assert bool(said) == (rank == 0), said
    if rank == 1:
        # Now it fails, and lives on; the other one is not in a step, but in its own line.
        engine.optimizer.collectives.watch.tell(ValueError("injected"), final=False)
        _live_on(folder)
    else:
        begin = time.monotonic()
        with pytest.raises(RankFailedError, match="injected"):
            evaluate_and_train()
        assert time.monotonic() - begin < SECONDS
        assert "not there yet: ranks [1]" in said[0]
    Path(folder, f"rank{rank}").touch()
    os._exit(0)


def is_killed(rank: int, port: int, folder: str, wait_in_stream: bool) -> None:
    """Rank 0, which holds the store, is killed between two steps; rank 1 waits on the device."""
    import sys

    enter_rank(rank, port)
    sys.stderr = open(Path(folder, f"log{rank}"), "w", buffering=1)  # noqa: SIM115 - to the end
    engine = _engine(1, wait_in_stream)
    _train(engine, range(3))
    Path(folder, f"ready{rank}").touch()
    while len(list(Path(folder).glob("ready*"))) < 2:
        time.sleep(0.05)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    # What a script would do: the interpreter shows it, and ends.
    try:
        _train(engine, range(3, 1000))
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)


in_both = pytest.mark.parametrize("wait_in_stream", [True, False], ids=["in stream", "in kernels"])


@in_both
def test_an_exception_in_one_ranks_backward(tmp_path: Path, wait_in_stream: bool) -> None:
    arguments = free_port(), str(tmp_path), wait_in_stream
    multiprocessing.spawn(fails_in_backward, args=arguments, nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


@in_both
def test_fewer_micro_batches_on_one_rank(tmp_path: Path, wait_in_stream: bool) -> None:
    arguments = free_port(), str(tmp_path), wait_in_stream
    multiprocessing.spawn(fewer_micro_batches, args=arguments, nprocs=2)
    texts = [(tmp_path / f"rank{rank}").read_text() for rank in range(2)]
    # NCCL may let collectives pass that do not fit; somebody waits for one too many in the end.
    assert any("out of step" in text for text in texts), texts


@in_both
def test_a_rank_that_evaluates_alone(tmp_path: Path, wait_in_stream: bool) -> None:
    arguments = free_port(), str(tmp_path), wait_in_stream
    multiprocessing.spawn(evaluates_alone, args=arguments, nprocs=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0", "rank1"]


@in_both
def test_a_killed_rank(tmp_path: Path, wait_in_stream: bool) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = free_port(), str(tmp_path), wait_in_stream
    ranks = [context.Process(target=is_killed, args=(rank, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    ranks[0].join(200)
    assert ranks[0].exitcode == -signal.SIGKILL
    begin = time.monotonic()
    ranks[1].join(60)
    assert ranks[1].exitcode == 1
    assert time.monotonic() - begin < 30.0
    text = (tmp_path / "log1").read_text()
    assert "RankFailedError: rank 0 was killed or has crashed" in text, text
