"""What is read is what was written, or an error that names the file and the tensor."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage import assert_refused, damaged, flip, random_flips
from support.resume import assert_same, snapshot, train

from hytrain.checkpoint import writer
from hytrain.checkpoint.files_beside import NOTE
from hytrain.errors import CheckpointError

TAG = "last"
MANIFEST = Path("zero/hytrain_manifest.json")
EXP_AVG = Path("zero/blocks.1.up.weight/exp_avg.pt")
FP32 = Path("zero/blocks.1.up.weight/fp32.pt")
MODEL = Path("mp_rank_00_model_states.pt")


def _elements(path: Path, name: str) -> int:
    """Offset in its file of the elements that a tensor of the module has, or of ``param``."""
    stored = torch.load(path, weights_only=False)
    tensor = stored["module"][name] if "module" in stored else stored[name]
    content = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    found = [match.start() for match in re.finditer(re.escape(content), path.read_bytes())]
    assert len(found) == 1
    return found[0]


def _named(path: Path) -> list[str]:
    """What a message about a file must have."""
    if path.parent.name == "zero" or path.parent.name == TAG:
        return [str(path)]
    return [str(path), f"({path.stem} of parameter '{path.parent.name}')"]


def test_every_flipped_bit_isassert_refused(engine: Any, folder: Path) -> None:
    before = snapshot(engine)
    for path, bit in random_flips(folder / TAG, 10, seed=1):
        with damaged(path, flip(bit)), pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(folder, tag=TAG)
        assert all(word in str(caught.value) for word in _named(path)), (path, bit)
    assert_same(snapshot(engine), before)
    engine.load_checkpoint(folder)


@pytest.mark.parametrize("with_manifest", [True, False])
def test_the_damaged_parameter_is_named(engine: Any, folder: Path, with_manifest: bool) -> None:
    tag = folder / TAG
    if not with_manifest:
        (tag / MANIFEST).unlink()
    bit = 8 * _elements(tag / EXP_AVG, "param") + 77
    with damaged(tag / EXP_AVG, flip(bit)):
        words = ("exp_avg of parameter 'blocks.1.up.weight'", "is damaged", "load another tag")
        assert_refused(engine, folder, str(tag / EXP_AVG), *words)
    bit = 8 * _elements(tag / MODEL, "frozen.weight") + 3
    with damaged(tag / MODEL, flip(bit)):
        assert_refused(engine, folder, str(MODEL), "is damaged", "load another tag")
    engine.load_checkpoint(folder)


def test_a_file_without_sums_of_its_own_loads(engine: Any, folder: Path) -> None:
    (folder / TAG / MANIFEST).unlink()
    torch.serialization.set_crc32_options(False)
    try:
        for path in (EXP_AVG, MODEL):
            stored = torch.load(folder / TAG / path, weights_only=False)
            torch.save(stored, folder / TAG / path)
    finally:
        torch.serialization.set_crc32_options(True)
    engine.load_checkpoint(folder)
    assert engine.fp32_state_dict()["blocks.1.up.weight"]["exp_avg"].any()


def test_files_that_are_not_those_that_were_saved(engine: Any, folder: Path) -> None:
    tag, other = folder / TAG, Path("zero/blocks.2.up.weight/exp_avg.pt")
    mine, twin = (tag / EXP_AVG).read_bytes(), (tag / other).read_bytes()
    assert len(mine) == len(twin)
    (tag / EXP_AVG).write_bytes(twin)
    (tag / other).write_bytes(mine)
    assert_refused(engine, folder, str(EXP_AVG), str(other), "another save's")
    (tag / other).write_bytes(twin)
    older = (folder / "older" / EXP_AVG).read_bytes()
    assert len(mine) == len(older)
    with damaged(tag / EXP_AVG, lambda _: bytearray(older)):
        assert_refused(engine, folder, str(EXP_AVG), "another save's", "load another tag")
    (tag / EXP_AVG).write_bytes(mine[:-1])
    assert_refused(engine, folder, str(EXP_AVG), f"{len(mine) - 1} bytes where {len(mine)} were")
    (tag / EXP_AVG).write_bytes(mine)
    for extra in ("zero/more/fp32.pt", "zero/norm.bias/exp_avg2.pt", "mp_rank_01_model_states.pt"):
        (tag / extra).parent.mkdir(exist_ok=True)
        shutil.copy(tag / FP32, tag / extra)
        assert_refused(engine, folder, extra, "was not saved with the checkpoint")
        (tag / extra).unlink()
    for name in (EXP_AVG, "zero/norm.bias/step.pt", "zero/optimizer_state.pt"):
        with damaged(tag / name, lambda _: None):
            assert_refused(engine, folder, str(name), "is missing")
            assert_refused(engine, folder, str(name), "is missing", load_module_strict=False)
    engine.load_checkpoint(folder)


def test_a_damaged_manifest(engine: Any, folder: Path) -> None:
    path = folder / TAG / MANIFEST
    size = path.stat().st_size
    for change in (
        lambda content: content[: size // 2],
        lambda content: bytearray(),
        lambda content: content + b" ",
        lambda content: content.replace(b"exp_avg", b"Exp_avg", 1),
        flip(8 * 11),  # in its own sum
        lambda content: bytearray((folder / "older" / MANIFEST).read_bytes()),
    ):
        with damaged(path, change):
            assert_refused(engine, folder, str(folder / TAG), "damaged")
    engine.load_checkpoint(folder)


def test_a_partial_load_checks_what_it_reads(engine: Any, folder: Path) -> None:
    tag = folder / TAG
    with damaged(tag / EXP_AVG, flip(9000)):
        for partial in ({"load_module_only": True}, {"load_optimizer_states": False}):
            engine.load_checkpoint(folder, **partial)
        assert_refused(engine, folder, str(EXP_AVG), load_module_strict=False)
    for name in (FP32, MODEL):
        with damaged(tag / name, flip(9000)):
            assert_refused(engine, folder, str(name), load_module_only=True)
            assert_refused(engine, folder, str(name), load_optimizer_states=False)
    with damaged(tag / MODEL, flip(9000)):
        assert_refused(engine, folder, str(MODEL), custom_load_fn=lambda src, dst: None)


@pytest.mark.parametrize("content", [b"", b"\xf4", b"..", b"last\x00", b"/", b"a\nb"])
def test_a_latest_that_is_no_tag(
    content: bytes, engine: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "latest").write_bytes(content)
    path, _ = engine.load_checkpoint(folder)
    assert Path(path).parent.name == TAG
    for word in (str(folder / "latest"), "is no tag", f"{TAG}, older"):
        assert word in caplog.text


@pytest.mark.parametrize(
    "tag",
    [" lead", "trail ", "a\nb", "a\tb", "a\xa0b", "\u200b", "\ud800", "a" * 5000, "é" * 120,
     "latest", "latest_universal", "zero_to_fp32.py", "hytrain-lock-a", "x/ y\n",
     "", ".", "../up", "a/../..", "/nowhere/x", "hytrain-saving-x"],
)  # fmt: skip
def test_tags_that_would_not_be_read_back_are_refused(
    tag: str, engine: Any, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match="pass a"):
        engine.save_checkpoint(tmp_path / "saves", tag=tag)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(tmp_path, tag=tag)


@pytest.mark.parametrize("tag", ["a b", "epoch=1-step=2.ckpt", "été", "a/b", "日本", "x" * 200])
def test_tags_that_are_read_back(tag: str, engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path, tag=tag)
    path, _ = engine.load_checkpoint(tmp_path)
    assert Path(path).parent == tmp_path / tag


def test_a_latest_that_names_nothing_or_another(
    engine: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "latest").write_text("lasu")
    path, _ = engine.load_checkpoint(folder)
    assert Path(path).parent.name == TAG
    assert f"'lasu' (named by {folder / 'latest'})" in caplog.text
    caplog.clear()
    (folder / "latest").write_text("older")
    engine.load_checkpoint(folder)
    assert f"'older' and {folder / 'latest_universal'} 'last': the first is loaded" in caplog.text


def test_all_is_on_the_disk_before_the_tag_is(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    fsync, finish = os.fsync, writer.finish_save

    def record(descriptor: int) -> None:
        # What replaces another is synced before it has its name.
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(re.sub(r"\.tmp\d+$", "", path))
        fsync(descriptor)

    def check(saving: Path, folder: Path) -> None:
        files = {path for path in saving.rglob("*") if path.is_file()}
        assert {str(p) for p in files if p.suffix == ".pt"} <= set(synced)
        assert str(saving / "zero/hytrain_manifest") in synced
        assert {str(saving), *(str(p) for p in saving.rglob("*") if p.is_dir())} <= set(synced)
        assert str(tmp_path) not in synced
        finish(saving, folder)
        assert synced[-1] == str(tmp_path)
        assert not (tmp_path / "latest").exists()

    monkeypatch.setattr(os, "fsync", record)
    monkeypatch.setattr(writer, "finish_save", check)
    engine.save_checkpoint(tmp_path, tag=TAG)
    assert synced[-2:] == [str(tmp_path / "latest"), str(tmp_path)]


@pytest.mark.parametrize("what", [str(EXP_AVG), ""], ids=["a file", "the tag"])
def test_what_does_not_reach_the_disk_fails_the_save(
    what: str, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads of their own wait for files, slow ones here: none is removed too early."""
    folder = tmp_path / "saves"
    engine.save_checkpoint(folder, tag=TAG)
    saved = snapshot(engine)
    train(engine, 1, 2)
    fsync, waited = os.fsync, list[str]()

    def fail(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        waited.append(path)
        time.sleep(0.03)
        if path.endswith(what or str(folder)):
            raise OSError(5, "Input/output error")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"could not.*Input/output.*unchanged"):
        engine.save_checkpoint(folder, tag=TAG)
    assert len(waited) > 1
    assert not any(Path(path).name == "latest" for path in waited)
    monkeypatch.undo()
    files = {TAG, "latest", "latest_universal", "zero_to_fp32.py", NOTE}
    assert {path.name for path in folder.iterdir()} == files
    engine.load_checkpoint(folder)
    assert_same(snapshot(engine), saved)


def test_no_file_is_left_open(engine: Any, tmp_path: Path) -> None:
    engine.save_checkpoint(tmp_path)
    engine.load_checkpoint(tmp_path)
    assert f"{tmp_path}/global_step1/zero/" not in Path("/proc/self/maps").read_text()


def test_what_the_user_is_given_is_no_file(engine: Any, tmp_path: Path) -> None:
    """Whoever writes over the file changes nothing of it, and ends no process."""
    shared = torch.arange(6.0)
    client = {"all": shared, "part": [shared[2:]]}
    engine.save_checkpoint(tmp_path, tag=TAG, client_state=client)
    sources: list[Any] = []

    def load(src: Any, dst: Any) -> None:
        sources.extend(map(type, src.values()))
        dst.load_state_dict(src)

    _, found = engine.load_checkpoint(tmp_path, custom_load_fn=load)
    (tmp_path / TAG / MODEL).write_bytes(b"")
    assert found["all"].tolist() == [0, 1, 2, 3, 4, 5]
    found["all"].mul_(2)
    assert found["part"][0].tolist() == [4, 6, 8, 10]
    assert set(sources) == {torch.Tensor}
