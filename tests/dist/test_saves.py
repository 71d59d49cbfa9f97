"""Saves on two ranks, synchronous and beside steps: killed at every point, delayed, failing."""

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
from harness import RankError, RankPool, RankPools, on_ranks
from support.engines import environment, from_all_ranks
from support.resume import Run, assert_same, engine_of, snapshot, train

from hytrain.checkpoint import file_writers, save_target, writer
from hytrain.checkpoint.files_beside import NOTE
from hytrain.errors import CheckpointError
from hytrain.testing import faults

full = pytest.mark.parity_full
RUN = Run(fractions=(0.6, 0.4), gpu_fraction=0.3)
BESIDE = replace(RUN, asynchronous=True)
TAG = "last"
LEFT = {TAG, "latest", "latest_universal", "zero_to_fp32.py", NOTE}
MOST_STEPS = 2000
"""Until a save that goes on beside them has come to where it fails, on a busy machine too."""


@pytest.mark.parametrize("stage", [3, pytest.param(2, marks=full)])
@on_ranks(2)
def test_a_save_beside_steps_is_that_of_a_synchronous_one(stage: int, tmp_path: Path) -> None:
    run = replace(RUN, stage=stage)
    with engine_of(run) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "sync", tag="t")
        saved = snapshot(engine)
        train(engine, 2, 6)
        end = snapshot(engine)
    delays = environment(faults.DELAYS_VARIABLE, f"{stage + dist.get_rank()}:3000")
    with delays, engine_of(replace(run, asynchronous=True)) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path / "async", tag="t")
        train(engine, 2, 6)
        engine.wait_for_checkpoint()
        assert_same(snapshot(engine), end)
        engine.load_checkpoint(tmp_path / "async")
        assert_same(snapshot(engine), saved)
    with engine_of(run.another(fractions=None)) as engine:
        engine.load_checkpoint(tmp_path / "async")
        now = snapshot(engine)
        engine.load_checkpoint(tmp_path / "sync")
        assert_same(now, snapshot(engine))


def _killed(run: Run, folder: Path, point: str, count: int, victim: int) -> None:
    """In the second of two saves of one tag."""
    with engine_of(run) as engine:
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
            engine.save_checkpoint(folder / "saves", tag=TAG)
        for step in range(4, MOST_STEPS):
            train(engine, step, step + 1)
            time.sleep(0.02)


def _load_and_save(folder: Path, expected: str) -> set[str]:
    with engine_of(RUN.another()) as engine:
        path, _ = engine.load_checkpoint(folder / "saves")
        assert path is not None
        now = snapshot(engine)
        if dist.get_rank() == 0:
            assert_same(now, torch.load(folder / f"{expected}.snapshot", weights_only=False))
        dist.barrier()
        train(engine, 4, 5)
        engine.save_checkpoint(folder / "saves", tag=TAG)
        saved = snapshot(engine)
        engine.load_checkpoint(folder / "saves")
        assert_same(snapshot(engine), saved)
    return {entry.name for entry in (folder / "saves").iterdir()}


POINTS = [
    *(("save.begun", 1, rank, "old") for rank in (0, 1)),
    *(("save.copied", 2, rank, "old") for rank in (0, 1)),
    *(("save.snapshot", 1, rank, "old") for rank in (0, 1)),
    *(("save.file", 7, rank, "old") for rank in (0, 1)),
    *(("save.synced", 1, rank, "old") for rank in (0, 1)),
    ("save.manifest", 1, 0, "old"),
    ("save.renaming", 1, 0, "old"),
    ("save.renamed", 1, 0, "new"),
    ("save.latest_universal", 1, 0, "new"),
    ("save.latest", 1, 0, "new"),
]
DAILY = {(RUN, "save.file", 1), (RUN, "save.latest", 0), (BESIDE, "save.renaming", 0)}


@pytest.mark.parametrize(
    ("run", "point", "count", "victim", "expected"),
    [
        pytest.param(run, *case, marks=() if (run, case[0], case[2]) in DAILY else full)
        for run in (RUN, BESIDE)
        for case in POINTS
        if run.asynchronous or case[0] not in ("save.begun", "save.copied", "save.snapshot")
    ],
    ids=lambda value: "beside" if value == BESIDE else "whole" if value == RUN else str(value),
)
def test_a_rank_that_dies_leaves_the_old_one_or_the_new_one(
    run: Run, point: str, count: int, victim: int, expected: str, ranks: RankPools, tmp_path: Path
) -> None:
    with (
        RankPool(2) as pool,
        pytest.raises(RankError, match=f"rank {victim} died with exit code -9"),
    ):
        pool.run(_killed, run, tmp_path, point, count, victim)
    if point == "save.renaming":  # between the two renames the tag has no folder
        names = {path.name for path in (tmp_path / "saves").iterdir()}
        assert f"hytrain-replaced-{TAG}" in names
        assert TAG not in names
    assert ranks(2).run(_load_and_save, tmp_path, expected) == [LEFT, LEFT]


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@on_ranks(2)
def test_a_closed_engine_leaves_no_threads(tmp_path: Path) -> None:
    """Nor does the next one meet what the group of the last one has left in the store."""
    counts: list[int] = []
    for number in range(4):
        with engine_of(BESIDE) as engine:
            train(engine, 0, 1)
            engine.save_checkpoint(tmp_path / "saves", tag=TAG)
            open_threads = _num_threads()
        time.sleep(0.2 * (dist.get_rank() == number % 2))
        counts.append(_num_threads())
        assert open_threads >= counts[-1] + 2
    assert max(counts) - min(counts) < 3, counts  # an engine's group has three


def _no_space(*_arguments: object) -> Any:
    raise OSError(28, "No space left on device")


def _delay_answers(patch: pytest.MonkeyPatch, engine: Any) -> None:
    """Its thread learns late where the ranks are: steps must not go on meanwhile."""
    collectives = engine._saver.collectives
    ask = collectives.gather_objects

    def late(*arguments: Any) -> Any:
        answer = ask(*arguments)
        time.sleep(0.3)
        return answer

    patch.setattr(collectives, "gather_objects", late)


@on_ranks(2)
def test_a_failure_beside_steps_is_raised_after_the_same_step(tmp_path: Path) -> None:
    rank = dist.get_rank()
    with engine_of(BESIDE) as engine, pytest.MonkeyPatch.context() as patch:
        train(engine, 0, 2)
        if rank == 1:
            patch.setattr(file_writers, "begin_file", _no_space)
            _delay_answers(patch, engine)
        message = ""
        engine.save_checkpoint(tmp_path)
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
        engine.save_checkpoint(tmp_path)
        engine.wait_for_checkpoint()
        assert (tmp_path / "latest").read_text() == f"global_step{raised_at + 2}"
        assert from_all_ranks(raised_at) == [raised_at, raised_at]


@pytest.mark.parametrize(
    ("asynchronous", "direct"), [(True, False), pytest.param(False, True, marks=full)]
)
@on_ranks(2)
def test_sigterm_saves_after_the_same_step(
    asynchronous: bool, direct: bool, tmp_path: Path
) -> None:
    rank = dist.get_rank()
    run = replace(RUN, asynchronous=asynchronous, sigterm_dir=str(tmp_path / "saves"))
    if direct:
        run = replace(run, clipping=0.0, check_overflow=False)
    with engine_of(run) as engine:

        def take_steps() -> None:
            for step in range(100):
                # Rank 1 first, and the other one later.
                if step == 4 - rank:
                    os.kill(os.getpid(), signal.SIGTERM)
                train(engine, step, step + 1)

        with pytest.raises(SystemExit) as end:
            take_steps()
        assert int(str(end.value.code)) == 143
        assert engine.global_steps == (4 if direct else 5)
        saved = snapshot(engine)
        engine.load_checkpoint(tmp_path / "saves")
        assert_same(snapshot(engine), saved)


@on_ranks(2)
def test_what_one_rank_cannot_do_fails_on_both(tmp_path: Path) -> None:
    """Whatever one rank alone cannot do is an error on both, and the tag is what it was."""
    rank = dist.get_rank()
    with engine_of(RUN) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(tmp_path, tag=TAG)
        saved = snapshot(engine)
        train(engine, 1, 2)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(file_writers, "begin_file", _no_space)
            with pytest.raises(CheckpointError, match=r"on rank 1: .*No space left.*unchanged"):
                engine.save_checkpoint(tmp_path, tag=TAG)
        for module, refuse in ((save_target, "begin_save"), (writer, "finish_save")):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0:
                    patch.setattr(module, refuse, _no_space)
                with pytest.raises(CheckpointError, match="No space left"):
                    engine.save_checkpoint(tmp_path, tag=TAG)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                find_parts = save_target.find_parts
                patch.setattr(
                    save_target, "find_parts", lambda f, c: find_parts(f / "elsewhere", c)
                )
            with pytest.raises(
                CheckpointError, match=r"on rank 1: .*that all ranks of a host share"
            ):
                engine.save_checkpoint(tmp_path, tag=TAG)
        with pytest.raises(CheckpointError, match="on rank 1: client_state has the keys module"):
            engine.save_checkpoint(tmp_path, tag=TAG, client_state={"module": 1} if rank else None)
        with pytest.raises(CheckpointError, match=r"on rank 1: the tag '' names no folder"):
            engine.save_checkpoint(tmp_path, tag="" if rank else TAG)
        dist.barrier()
        assert {entry.name for entry in tmp_path.iterdir()} == LEFT
        engine.load_checkpoint(tmp_path)
        assert_same(snapshot(engine), saved)
        # Two tags, which DeepSpeed warns of: one checkpoint, whole, under rank 0's.
        engine.save_checkpoint(tmp_path, tag=f"of rank {rank}")
        engine.load_checkpoint(tmp_path, tag="of rank 0")
        assert_same(snapshot(engine), saved)
        assert not (tmp_path / "of rank 1").exists()


@on_ranks(2)
def test_a_folder_that_another_host_does_not_see_yet_is_shared_all_the_same(tmp_path: Path) -> None:
    """As on NFS: a host remembers for a while that there was none, and its server knows better."""
    is_dir = Path.is_dir
    with engine_of(RUN) as engine, pytest.MonkeyPatch.context() as patch:
        train(engine, 0, 1)
        if dist.get_rank() == 1:
            saving = "hytrain-saving-"
            patch.setattr(Path, "is_dir", lambda p: not p.name.startswith(saving) and is_dir(p))
        engine.save_checkpoint(tmp_path, tag=TAG)
        patch.undo()
        saved = snapshot(engine)
        train(engine, 1, 2)
        engine.load_checkpoint(tmp_path)
        assert_same(snapshot(engine), saved)
    assert {path.name for path in tmp_path.iterdir()} == LEFT


@on_ranks(2)
def test_hosts_may_know_the_folder_by_different_names(tmp_path: Path) -> None:
    rank = dist.get_rank()
    if rank == 0:
        (tmp_path / "saves").mkdir()
        for other in range(2):
            (tmp_path / f"name{other}").symlink_to(tmp_path / "saves")
    dist.barrier()
    with engine_of(RUN) as engine:
        for _ in range(2):
            train(engine, 0, 1)
            engine.save_checkpoint(tmp_path / f"name{rank}", tag=TAG)
        saved = snapshot(engine)
        train(engine, 1, 2)
        engine.load_checkpoint(tmp_path / f"name{rank}")
        assert_same(snapshot(engine), saved)
    assert {path.name for path in (tmp_path / "saves").iterdir()} == LEFT
