"""Asynchronous saves and SIGTERM on two ranks: killed at every point, delayed, failing."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankError, RankPool, RankPools
from support.resume import Run, assert_same, engine_of, snapshot, train

from hytrain.checkpoint import file_writers
from hytrain.errors import CheckpointError
from hytrain.testing import faults

RUN = Run(fractions=(0.6, 0.4), asynchronous=True, gpu_fraction=0.3)
MOST_STEPS = 2000
"""Until a save that goes on beside them has come to where it fails, on a busy machine too."""


def _save_beside(run: Run, folder: Path, seed: int) -> None:
    rank = dist.get_rank()
    with engine_of(replace(run, asynchronous=False)) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(folder / "sync", tag="t")
        saved = snapshot(engine)
        train(engine, 2, 6)
        end = snapshot(engine)
    os.environ[faults.DELAYS_VARIABLE] = f"{seed + rank}:3000"
    try:
        with engine_of(run) as engine:
            train(engine, 0, 2)
            engine.save_checkpoint(folder / "async", tag="t")
            train(engine, 2, 6)
            engine.wait_for_checkpoint()
            assert_same(snapshot(engine), end)
            engine.load_checkpoint(folder / "async")
            assert_same(snapshot(engine), saved)
    finally:
        del os.environ[faults.DELAYS_VARIABLE]
    with engine_of(replace(run.another(), asynchronous=False, fractions=None)) as engine:
        engine.load_checkpoint(folder / "async")
        now = snapshot(engine)
        engine.load_checkpoint(folder / "sync")
        assert_same(now, snapshot(engine))


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=pytest.mark.parity_full)])
def test_it_is_that_of_a_synchronous_save(stage: int, ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(_save_beside, replace(RUN, stage=stage), tmp_path, stage)


def _killed(folder: Path, point: str, count: int, victim: int) -> None:
    with engine_of(RUN) as engine:
        for name, steps in (("old", 2), ("new", 4)):
            train(engine, steps - 2, steps)
            engine.wait_for_checkpoint()
            now = snapshot(engine)
            if dist.get_rank() == 0:
                torch.save(now, folder / f"{name}.snapshot")
            dist.barrier()
            if name == "new":
                faults._seen.clear()
                os.environ[faults.KILL_VARIABLE] = f"{point}:{count}:{victim}"
            engine.save_checkpoint(folder / "saves", tag="t")
        for step in range(4, MOST_STEPS):
            train(engine, step, step + 1)
            time.sleep(0.02)


def _resume(folder: Path, expected: str) -> None:
    with engine_of(replace(RUN.another(), asynchronous=False)) as engine:
        path, _ = engine.load_checkpoint(folder / "saves")
        assert path is not None
        now = snapshot(engine)
        if dist.get_rank() == 0:
            assert_same(now, torch.load(folder / f"{expected}.snapshot", weights_only=False))
        dist.barrier()


@pytest.mark.parametrize(
    ("point", "count", "victim", "expected"),
    [
        ("save.renaming", 1, 0, "old"),
        *(
            pytest.param(*case, marks=pytest.mark.parity_full)
            for case in (
                *(("save.begun", 1, rank, "old") for rank in (0, 1)),
                *(("save.copied", 2, rank, "old") for rank in (0, 1)),
                *(("save.snapshot", 1, rank, "old") for rank in (0, 1)),
                *(("save.file", 7, rank, "old") for rank in (0, 1)),
                *(("save.synced", 1, rank, "old") for rank in (0, 1)),
                ("save.manifest", 1, 0, "old"),
                ("save.renamed", 1, 0, "new"),
                ("save.latest_universal", 1, 0, "new"),
                ("save.latest", 1, 0, "new"),
            )
        ),
    ],
)
def test_killed_during_it(
    point: str, count: int, victim: int, expected: str, ranks: RankPools, tmp_path: Path
) -> None:
    with (
        RankPool(2) as pool,
        pytest.raises(RankError, match=f"rank {victim} died with exit code -9"),
    ):
        pool.run(_killed, tmp_path, point, count, victim)
    ranks(2).run(_resume, tmp_path, expected)


def _fails_on_one(folder: Path) -> int:
    rank = dist.get_rank()
    with engine_of(RUN) as engine, pytest.MonkeyPatch.context() as patch:
        train(engine, 0, 2)
        if rank == 1:
            patch.setattr(file_writers, "begin_file", _full)
        message = ""
        engine.save_checkpoint(folder)
        for step in range(2, MOST_STEPS):
            try:
                train(engine, step, step + 1)
            except CheckpointError as error:
                message = str(error)
                break
            time.sleep(0.01)
        assert "on rank 1" in message
        assert "No space left" in message
        patch.undo()
        raised_at = engine.global_steps
        train(engine, raised_at, raised_at + 2)
        engine.save_checkpoint(folder)
        engine.wait_for_checkpoint()
        assert (folder / "latest").read_text() == f"global_step{raised_at + 2}"
        return raised_at


def _full(path: Path, stored: object) -> Any:
    raise OSError(28, "No space left on device")


def test_a_failure_is_raised_after_the_same_step(ranks: RankPools, tmp_path: Path) -> None:
    first, second = ranks(2).run(_fails_on_one, tmp_path)
    assert first == second < MOST_STEPS


def _asked_to_end(folder: Path, asynchronous: bool, direct: bool) -> tuple[int, int]:
    rank = dist.get_rank()
    run = replace(RUN, asynchronous=asynchronous, sigterm_dir=str(folder / "saves"))
    if direct:
        run = replace(run, clipping=0.0, check_overflow=False)
    with engine_of(run) as engine:
        for step in range(100):
            if step == 3 and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if step == 4 and rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)  # the other one, later
            try:
                train(engine, step, step + 1)
            except SystemExit as end:
                saved = snapshot(engine)
                engine.load_checkpoint(folder / "saves")
                assert_same(snapshot(engine), saved)
                return int(str(end.code)), engine.global_steps
    raise AssertionError("SIGTERM was not seen")


@pytest.mark.parametrize(
    ("asynchronous", "direct"),
    [(True, False), pytest.param(False, True, marks=pytest.mark.parity_full)],
)
def test_sigterm_saves_after_the_same_step(
    asynchronous: bool, direct: bool, ranks: RankPools, tmp_path: Path
) -> None:
    first, second = ranks(2).run(_asked_to_end, tmp_path, asynchronous, direct)
    assert first == second
    assert first == (143, 4 if direct else 5)
