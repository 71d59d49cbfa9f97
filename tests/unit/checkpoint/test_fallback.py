"""A load without a tag goes back to the newest checkpoint that is whole, and says why."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.damage import damaged, flip
from support.resume import Run, assert_same, engine_of, snapshot, train

from hytrain.errors import CheckpointError, DamagedCheckpointError

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> tuple[Path, list]:
    """Three checkpoints; by name the oldest would be the newest."""
    folder = tmp_path_factory.mktemp("three")
    states = []
    with engine_of(Run()) as engine:
        for step, tag in enumerate(("z", "y", "x")):
            train(engine, step, step + 1)
            engine.save_checkpoint(folder, tag=tag)
            states.append(snapshot(engine))
    return folder, states


@pytest.mark.parametrize(
    ("file", "change", "word"),
    [
        ("x/zero/embed.weight/exp_avg.pt", flip(8 * 900), "exp_avg of parameter 'embed.weight'"),
        ("x/zero/norm.bias/fp32.pt", lambda data: None, "is missing"),
        ("x/zero/hytrain_manifest.json", flip(8 * 60), "manifest"),
        ("latest", lambda data: bytearray(b"\xff\xfe"), "holds no tag|is damaged"),
        ("latest", lambda data: bytearray(b"gone"), "no checkpoint 'gone'"),
    ],
)
def test_the_newest_whole_one_is_loaded(
    file: str,
    change: Callable[[bytearray], bytearray | None],
    word: str,
    saved: tuple[Path, list],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, states = saved
    expected = 2 if file == "latest" else 1
    with engine_of(Run().another()) as engine, damaged(folder / file, change):
        train(engine, 30, 31)
        with caplog.at_level(logging.WARNING, "hytrain"):
            path, _ = engine.load_checkpoint(folder)
        assert Path(path).parent.name == "zyx"[expected]
        assert_same(snapshot(engine), states[expected])
    (record,) = [r for r in caplog.records if "IS DAMAGED" in r.getMessage()]
    assert any(part in record.getMessage() for part in word.split("|"))
    assert f"step {expected + 1}" in record.getMessage()


def test_the_next_one_too_and_none_at_all(saved: tuple[Path, list], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(saved[0], folder)
    with engine_of(Run().another()) as engine:
        for broken, tag in (("x", "y"), ("y", "z")):
            file = folder / broken / "zero/norm.bias/exp_avg_sq.pt"
            file.write_bytes(bytes(flip(8 * 500)(bytearray(file.read_bytes()))))
            path, _ = engine.load_checkpoint(folder)
            assert Path(path).parent.name == tag
        assert_same(snapshot(engine), saved[1][0])
        shutil.rmtree(folder / "z/zero/norm.bias")
        train(engine, 5, 6)
        now = snapshot(engine)
        with pytest.raises(DamagedCheckpointError, match=r"'norm.bias'|norm\.bias"):
            engine.load_checkpoint(folder)
        assert_same(snapshot(engine), now)


def test_a_named_tag_and_a_misfit_are_errors(saved: tuple[Path, list]) -> None:
    folder, _ = saved
    with (
        damaged(folder / "x/zero/norm.bias/fp32.pt", flip(8 * 500)),
        engine_of(Run().another()) as engine,
        pytest.raises(DamagedCheckpointError),
    ):
        engine.load_checkpoint(folder, tag="x")
    with engine_of(Run(width=20)) as engine, pytest.raises(CheckpointError, match="shape"):
        engine.load_checkpoint(folder)
