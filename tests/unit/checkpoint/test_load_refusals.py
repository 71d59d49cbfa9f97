"""What does not fit is refused before anything is touched; a failed save leaves latest alone."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.resume import Run, assert_same, engine_of, snapshot, train

from hytrain.errors import CheckpointError

TAG = "global_step2"
EXP_AVG = Path(TAG) / "zero" / "blocks.1.up.weight" / "exp_avg.pt"
MANIFEST = Path(TAG) / "zero" / "hytrain_manifest.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory, process_group: None) -> Path:
    """A checkpoint of ``Run()`` after two steps."""
    folder = tmp_path_factory.mktemp("original")
    with engine_of(Run()) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(folder)
    return folder


def check_refused(engine: Any, folder: Path, *words: str, **arguments: Any) -> None:
    """The load fails with a message of these words, and the engine is what it was."""
    before = snapshot(engine)
    pattern = "(?s)" + ".*".join(map(re.escape, words))
    with pytest.raises(CheckpointError, match=pattern):
        engine.load_checkpoint(folder, **arguments)
    assert_same(snapshot(engine), before)
    train(engine, 5, 6)


def test_no_latest_is_a_warning(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert engine.load_checkpoint(tmp_path / "none") == (None, None)
    assert "has no file 'latest'" in caplog.text


def test_wrong_tag(engine: Any, folder: Path) -> None:
    check_refused(engine, folder, "no checkpoint 'x'", f"the tags {TAG}", tag="x")
    (folder / "latest").write_text("gone\n")
    for path in (folder / TAG / "zero").glob("*.json"):
        path.unlink()  # what has no manifest is not gone back to
    check_refused(engine, folder, "no checkpoint 'gone'")


def test_missing_and_damaged_files(engine: Any, folder: Path) -> None:
    content = (folder / EXP_AVG).read_bytes()
    (folder / EXP_AVG).unlink()
    check_refused(engine, folder, str(EXP_AVG), "is missing")
    (folder / MANIFEST).unlink()
    check_refused(engine, folder, str(EXP_AVG), "is missing")
    (folder / EXP_AVG).write_bytes(content[: len(content) // 2])
    check_refused(engine, folder, str(EXP_AVG), "cannot be read", "load another tag")
    torch.save({"param": 3}, folder / EXP_AVG)
    check_refused(engine, folder, str(EXP_AVG), "holds a int")
    (folder / EXP_AVG).write_bytes(content)
    for name in ("mp_rank_00_model_states.pt", "zero/optimizer_state.pt"):
        path = folder / TAG / name
        content = path.read_bytes()
        path.unlink()
        check_refused(engine, folder, name, "is missing")
        torch.save([1], path)
        check_refused(engine, folder, TAG)
        path.write_bytes(content)
    engine.load_checkpoint(folder)  # whole again


def test_another_model(engine: Any, original: Path, tmp_path: Path) -> None:
    with engine_of(Run(num_blocks=4)) as other:
        check_refused(other, original, "has no state of", "'blocks.3.", "another model")
        for part in ({"load_module_only": True}, {"load_optimizer_states": False}):
            check_refused(other, original, "'blocks.3.", **part)
        other.save_checkpoint(tmp_path)
    check_refused(engine, tmp_path, "has state of 'blocks.3.", "does not train")
    with engine_of(Run(width=44)) as other:
        check_refused(other, original, "has shape (36,) but", "(44,)")
        check_refused(other, original, "has shape", load_module_only=True)
        check_refused(other, original, "has shape", load_module_strict=False)


def test_other_groups(original: Path, tmp_path: Path) -> None:
    with engine_of(Run(groups=True)) as engine:
        check_refused(engine, original, "has 1 parameter groups but the optimizer has 3")
        engine.load_checkpoint(original, load_optimizer_states=False)
        engine.save_checkpoint(tmp_path)
        path = tmp_path / TAG / "zero/optimizer_state.pt"
        (tmp_path / MANIFEST).unlink()
        stored = torch.load(path, weights_only=False)
        names = stored["hytrain"]["group_parameters"]
        names[0].append(names[1].pop())
        torch.save(stored, path)
        check_refused(engine, tmp_path, "parameter group 0", "differs", "'embed.weight'")


def test_a_later_format(engine: Any, folder: Path) -> None:
    path = folder / TAG / "zero/optimizer_state.pt"
    (folder / MANIFEST).unlink()
    stored = torch.load(path, weights_only=False)
    stored["hytrain"]["version"] = 99
    torch.save(stored, path)
    check_refused(engine, folder, "later hytrain", "99")


def test_not_a_universal_checkpoint(engine: Any, folder: Path) -> None:
    shutil.rmtree(folder / TAG / "zero")
    check_refused(engine, folder, "no universal checkpoint", "ds_to_universal")
    # Its weights are there all the same.
    engine.load_checkpoint(folder, load_module_only=True)
    stored = torch.load(folder / TAG / "mp_rank_00_model_states.pt", weights_only=False)
    weight = stored["module"]["blocks.0.up.weight"]
    assert torch.equal(engine.fp32_state_dict()["blocks.0.up.weight"]["fp32"], weight.float())


def test_client_state_may_not_replace_the_module(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="client_state has the keys module"):
        engine.save_checkpoint(tmp_path, client_state={"module": 1})
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_pickled_is_said(engine: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model_states\.pt could not be written"):
        engine.save_checkpoint(tmp_path, client_state={"function": lambda: 0})
    assert not (tmp_path / "latest").exists()
