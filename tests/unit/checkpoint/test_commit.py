"""A save that is broken off, anywhere, leaves the old checkpoint or the new one, never a mix."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.resume import Run, Snapshot, assert_same, engine_of, snapshot, train

from hytrain.checkpoint import file_writers
from hytrain.checkpoint.commit import saved_tags
from hytrain.checkpoint.files_beside import NOTE
from hytrain.checkpoint.summed_files import SummingFile
from hytrain.checkpoint.universal import MODEL_STATES_OF_ZERO3
from hytrain.errors import CheckpointError

TAG = "last"
SCRIPT = "zero_to_fp32.py"
MODEL = "mp_rank_00_model_states.pt"


class _Killed(BaseException):
    """Nothing in the package catches it: what is on the disk then stays as it is."""


@pytest.fixture(scope="module")
def reader(process_group: None) -> Iterator[Any]:
    """An engine of another run, which loads."""
    with engine_of(Run()) as built:
        yield built


def _loaded(reader: Any, folder: Path) -> Snapshot:
    train(reader, 20, 21)
    reader.load_checkpoint(folder)
    return snapshot(reader)


def _entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {SCRIPT, NOTE}


def _at_call(number: int, function: Callable[..., Any], error: BaseException) -> Any:
    """``function``, but its call of that number raises before it does anything."""
    calls = iter(range(10**6))

    def call(*arguments: Any, **named: Any) -> Any:
        if next(calls) == number:
            raise error
        return function(*arguments, **named)

    return call


def _break(point: str, error: BaseException, patch: pytest.MonkeyPatch) -> None:
    what, _, where = point.partition(" ")
    if what == "rename":
        patch.setattr(Path, "rename", _at_call(int(where), Path.rename, error))
    elif what == "remove":
        patch.setattr(shutil, "rmtree", _at_call(0, shutil.rmtree, error))
    elif what == "file":
        real = file_writers.begin_file
        patch.setattr(file_writers, "begin_file", _at_call(int(where), real, error))
    else:
        sync = SummingFile.sync

        def fail(self: SummingFile) -> None:
            if self.name.partition(".tmp")[0] == what:
                raise error
            sync(self)

        patch.setattr(SummingFile, "sync", fail)


@pytest.mark.parametrize(
    ("point", "has_new"),
    [
        ("file 0", False),
        ("file 11", False),
        ("mp_rank_00_model_states.pt", False),
        ("rename 0", False),  # the old one gives way
        ("rename 1", False),  # the new one takes its place
        ("rename 2", True),  # the old one loses its name
        ("remove", True),
        ("latest_universal", True),
        ("latest", True),
    ],
)
def test_killed_while_replacing(
    point: str, has_new: bool, engine: Any, reader: Any, tmp_path: Path
) -> None:
    engine.save_checkpoint(tmp_path, tag=TAG)
    old = snapshot(engine)
    train(engine, 1, 3)
    new = snapshot(engine)
    with pytest.MonkeyPatch.context() as patch:
        _break(point, _Killed(), patch)
        with pytest.raises(_Killed):
            engine.save_checkpoint(tmp_path, tag=TAG)
    assert_same(_loaded(reader, tmp_path), new if has_new else old)
    # A load tidies nothing up: others may be loading, too. The next save does.
    assert_same(_loaded(reader, tmp_path), new if has_new else old)
    engine.save_checkpoint(tmp_path, tag=TAG)
    assert _entries(tmp_path) == {TAG, "latest", "latest_universal"}
    assert_same(_loaded(reader, tmp_path), new)


@pytest.mark.parametrize(
    "point",
    ["file 11", "mp_rank_00_model_states.pt", "hytrain_manifest", "rename 0", "rename 1", "latest"],
)
def test_failed_while_replacing(point: str, engine: Any, reader: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag=TAG)
    old = snapshot(engine)
    train(engine, 3, 4)
    new = snapshot(engine)
    with pytest.MonkeyPatch.context() as patch:
        _break(point, OSError(28, "No space left on device"), patch)
        words = "pass the tag 'last' to load it" if point == "latest" else "so is what was saved"
        with pytest.raises(CheckpointError, match=f"No space left.*{words}"):
            engine.save_checkpoint(tmp_path, tag=TAG)
    assert _entries(tmp_path) == {TAG, "latest", "latest_universal"}
    assert_same(_loaded(reader, tmp_path), new if point == "latest" else old)
    assert_same(snapshot(engine), new)


def test_what_cannot_be_removed_is_told(
    engine: Any, reader: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.save_checkpoint(tmp_path, tag=TAG)
    train(engine, 4, 5)
    for point in ("rename 2", "remove"):
        with pytest.MonkeyPatch.context() as patch:
            _break(point, OSError(16, "Device or resource busy"), patch)
            engine.save_checkpoint(tmp_path, tag=TAG)
        assert "cannot be removed" in caplog.text
        assert len(_entries(tmp_path)) == 4
        assert_same(_loaded(reader, tmp_path), snapshot(engine))
        caplog.clear()
    engine.save_checkpoint(tmp_path, tag=TAG)
    assert len(_entries(tmp_path)) == 3


def test_a_broken_off_replacement_is_told(
    engine: Any, reader: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine.save_checkpoint(tmp_path, tag=TAG)
    (tmp_path / TAG).rename(tmp_path / f"hytrain-replaced-{TAG}")
    with caplog.at_level(logging.WARNING, "hytrain"):
        path, _ = reader.load_checkpoint(tmp_path)
    assert Path(path).parent.name == f"hytrain-replaced-{TAG}"
    assert "was broken off while it replaced" in caplog.text
    assert saved_tags(tmp_path) == [TAG]
    # A save under another tag leaves it alone.
    engine.save_checkpoint(tmp_path, tag="other")
    assert saved_tags(tmp_path) == [TAG, "other"]
    reader.load_checkpoint(tmp_path, tag=TAG)


def test_left_over_folders(engine: Any, tmp_path: Path) -> None:
    """Those of the tag go at once; another tag's may be another run's, and go an hour later."""
    for tag in (TAG, "other", "old"):
        (tmp_path / f"hytrain-saving-{tag}-12345678" / "zero" / "embed.weight").mkdir(parents=True)
    hours_ago = time.time() - 1.5 * 3600
    for path in (tmp_path / "hytrain-saving-old-12345678").rglob("*"):
        os.utime(path, (hours_ago, hours_ago))
    os.utime(tmp_path / "hytrain-saving-old-12345678", (hours_ago, hours_ago))
    # One that works on has made a parameter's folder lately.
    os.utime(tmp_path / "hytrain-saving-other-12345678", (hours_ago, hours_ago))
    with pytest.raises(CheckpointError, match="is not whole"):
        engine.load_checkpoint(tmp_path, tag=f"hytrain-saving-{TAG}-12345678")
    with pytest.raises(CheckpointError, match="the folder has none at all"):
        engine.load_checkpoint(tmp_path, tag=TAG)
    engine.save_checkpoint(tmp_path, tag=TAG)
    own = {TAG, "latest", "latest_universal"}
    assert _entries(tmp_path) == own | {"hytrain-saving-other-12345678"}


def test_other_files_in_the_tags_folder_stay(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag=TAG)
    (tmp_path / TAG / "trainer_state.json").write_text("mine")
    (tmp_path / TAG / "rng").mkdir()
    # DeepSpeed's own shards are another step's: with the new weights they would be a mix.
    (tmp_path / TAG / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_text("old")
    engine.save_checkpoint(tmp_path, tag=TAG)
    expected = {MODEL, MODEL_STATES_OF_ZERO3, "zero", "trainer_state.json", "rng"}
    assert _entries(tmp_path / TAG) == expected
    assert (tmp_path / TAG / "trainer_state.json").read_text() == "mine"


def test_a_tag_that_is_a_link(engine: Any, reader: Any, tmp_path: Path) -> None:
    saves, room = tmp_path / "saves", tmp_path / "room"
    saves.mkdir()
    (room / "here").mkdir(parents=True)
    (saves / TAG).symlink_to(room / "here")
    for _ in range(2):
        engine.save_checkpoint(saves, tag=TAG)
    assert (saves / TAG).is_symlink()
    assert _entries(room) == {"here"}
    assert_same(_loaded(reader, saves), snapshot(engine))
    (room / "here").rename(room / "hytrain-replaced-here")
    assert_same(_loaded(reader, saves), snapshot(engine))


def test_where_nothing_can_be_made(engine: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder, tag in ((tmp_path, "file"), (tmp_path / "file", TAG)):
        with pytest.raises(CheckpointError, match="nothing can be saved in"):
            engine.save_checkpoint(folder, tag=tag)
    assert _entries(tmp_path) == {"file"}


def test_room_is_asked_for_before_anything_is_written(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save_checkpoint(tmp_path, tag=TAG)
    before = _entries(tmp_path)
    size = sum(path.stat().st_size for path in (tmp_path / TAG).rglob("*.pt"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=size // 3))
    with pytest.raises(CheckpointError, match=r"iB free, and the checkpoint takes.*is unchanged"):
        engine.save_checkpoint(tmp_path, tag=TAG)
    assert _entries(tmp_path) == before
    monkeypatch.undo()
    engine.load_checkpoint(tmp_path)
