"""Saves that fail on one rank, or end with it, while they replace a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RankError, RankPool, RankPools
from support.resume import Run, assert_same, engine_of, snapshot, train

from hytrain.checkpoint import file_writers, target, writer
from hytrain.checkpoint.export_script import NOTE
from hytrain.errors import CheckpointError
from hytrain.testing import faults

RUN = Run(fractions=(0.6, 0.4))
TAG = "last"


def _save_then_die(folder: Path, rank: int, file: str) -> None:
    """The old snapshot and the new one are beside the checkpoint; rank ``rank`` dies at a file, or
    where it comes to a point that is named as in ``faults.point``.
    """
    begin_file = file_writers.begin_file

    def die(path: Path, stored: object) -> Any:
        if dist.get_rank() == rank and path.name == file and path.parts[-2] != "blocks.0.up.weight":
            os._exit(9)
        return begin_file(path, stored)

    with engine_of(RUN) as engine:
        for name, steps in (("old", 2), ("new", 4)):
            train(engine, steps - 2, steps)
            now = snapshot(engine)
            if dist.get_rank() == 0:
                torch.save(now, folder / f"{name}.snapshot")
            dist.barrier()
            if name == "new" and file.startswith("save."):
                os.environ[faults.KILL_VARIABLE] = f"{file}:1:{rank}"
            elif name == "new":
                file_writers.begin_file = die
            engine.save_checkpoint(folder / "saves", tag=TAG)


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
    return {entry.name for entry in (folder / "saves").iterdir()} - {"zero_to_fp32.py", NOTE}


def _full(*case: object) -> Any:
    return pytest.param(*case, marks=pytest.mark.parity_full)


@pytest.mark.parametrize(
    ("rank", "file", "expected"),
    [
        (1, "exp_avg_sq.pt", "old"),
        (0, "save.renaming", "old"),  # between the two renames: the tag has no folder
        (0, "save.latest", "new"),
        _full(0, "optimizer_state.pt", "old"),
        *(_full(rank, "save.file", "old") for rank in (0, 1)),
        *(_full(rank, "save.synced", "old") for rank in (0, 1)),
        _full(0, "save.manifest", "old"),
        _full(0, "save.renamed", "new"),
        _full(0, "save.latest_universal", "new"),
        _full(0, "save.hytrain_latest", "new"),
    ],
)
def test_a_rank_that_dies_leaves_the_old_one_or_the_new_one(
    rank: int, file: str, expected: str, ranks: RankPools, tmp_path: Path
) -> None:
    code = -9 if file.startswith("save.") else 9
    with (
        RankPool(2) as pool,
        pytest.raises(RankError, match=f"rank {rank} died with exit code {code}"),
    ):
        pool.run(_save_then_die, tmp_path, rank, file)
    if file == "save.renaming":
        names = {path.name for path in (tmp_path / "saves").iterdir()}
        assert f"hytrain-replaced-{TAG}" in names
        assert TAG not in names
    for left in ranks(2).run(_load_and_save, tmp_path, expected):
        assert left == {TAG, "latest", "latest_universal", "hytrain_latest"}


def _fail_everywhere(folder: Path) -> None:
    """Whatever one rank alone cannot do is an error on both, and the tag is what it was."""
    rank = dist.get_rank()
    with engine_of(RUN) as engine:
        train(engine, 0, 1)
        engine.save_checkpoint(folder, tag=TAG)
        saved = snapshot(engine)
        train(engine, 1, 2)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                patch.setattr(file_writers, "begin_file", _no_space)
            with pytest.raises(CheckpointError, match=r"on rank 1: .*No space left.*unchanged"):
                engine.save_checkpoint(folder, tag=TAG)
        for module, refuse in ((target, "begin_save"), (writer, "finish_save")):
            with pytest.MonkeyPatch.context() as patch:
                if rank == 0:
                    patch.setattr(module, refuse, _no_space)
                with pytest.raises(CheckpointError, match="No space left"):
                    engine.save_checkpoint(folder, tag=TAG)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                from_first = target.from_first
                patch.setattr(target, "from_first", lambda *a: str(from_first(*a)) + "-not-here")
            with pytest.raises(CheckpointError, match=r"on rank 1: .*that all hosts share"):
                engine.save_checkpoint(folder, tag=TAG)
        with pytest.raises(CheckpointError, match="on rank 1: client_state has the keys module"):
            engine.save_checkpoint(folder, tag=TAG, client_state={"module": 1} if rank else None)
        with pytest.raises(CheckpointError, match=r"on rank 1: the tag '' names no folder"):
            engine.save_checkpoint(folder, tag="" if rank else TAG)
        dist.barrier()
        files = {TAG, "latest", "latest_universal", "hytrain_latest", "zero_to_fp32.py", NOTE}
        assert {entry.name for entry in folder.iterdir()} == files
        engine.load_checkpoint(folder)
        assert_same(snapshot(engine), saved)
        # Two tags, which DeepSpeed warns of: one checkpoint, whole, under rank 0's.
        engine.save_checkpoint(folder, tag=f"of rank {rank}")
        engine.load_checkpoint(folder, tag="of rank 0")
        assert_same(snapshot(engine), saved)
        assert not (folder / "of rank 1").exists()


def _by_two_names(folder: Path) -> None:
    rank = dist.get_rank()
    with engine_of(RUN) as engine:
        for _ in range(2):
            train(engine, 0, 1)
            engine.save_checkpoint(folder / f"name{rank}", tag=TAG)
        saved = snapshot(engine)
        train(engine, 1, 2)
        engine.load_checkpoint(folder / f"name{rank}")
        assert_same(snapshot(engine), saved)


def test_hosts_may_know_the_folder_by_different_names(ranks: RankPools, tmp_path: Path) -> None:
    (tmp_path / "saves").mkdir()
    for rank in range(2):
        (tmp_path / f"name{rank}").symlink_to(tmp_path / "saves")
    ranks(2).run(_by_two_names, tmp_path)
    assert {path.name for path in (tmp_path / "saves").iterdir()} == {
        TAG,
        "latest",
        "latest_universal",
        "hytrain_latest",
        "zero_to_fp32.py",
        NOTE,
    }


def _no_space(*arguments: Any) -> None:
    raise OSError(28, "No space left on device")


def test_what_one_rank_cannot_do_fails_on_both(ranks: RankPools, tmp_path: Path) -> None:
    ranks(2).run(_fail_everywhere, tmp_path)
