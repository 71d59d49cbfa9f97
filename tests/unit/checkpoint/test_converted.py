"""Checkpoints of plain DeepSpeed, made universal by its own converter, resume without a tag."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from support.comparisons import assert_same_states
from support.engines import built, device, make_config
from support.plain_deepspeed import conversion, plain_engine, plain_state
from torch import nn

from hytrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("process_group")

WIDTH = 8


class _Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # The converter makes folders in folders of a name with "/".
        self.parts = nn.ModuleDict({"en/de": nn.Linear(WIDTH, WIDTH), "de": nn.LayerNorm(WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = x + part(x)
        return x.square().mean()


def _train(engine: Any, begin: int, end: int) -> list[float]:
    losses: list[float] = []
    for number in range(begin, end):
        generator = torch.Generator().manual_seed(number)
        loss = engine(torch.randn(2, WIDTH, generator=generator).to(device()))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def _save_and_convert(stage: int, folder: Path) -> tuple[dict[str, Any], list[float]]:
    """State of a plain engine after three steps, by name; the losses of the next three."""
    plain = plain_engine(_Model(seed=0), stage, gradient_clipping=1.0)
    _train(plain, 0, 3)
    plain.save_checkpoint(str(folder))
    ds_to_universal.main(conversion(folder / "global_step3", folder / "converted"))
    state = plain_state(plain)
    losses = _train(plain, 3, 6)
    plain.destroy()
    return state, losses


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_converted_one_is_found(
    stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state, losses = _save_and_convert(stage, tmp_path)
    # The converter leaves DeepSpeed's own checkpoint the latest.
    assert (tmp_path / "latest").read_text() == "global_step3"
    with built(_Model(seed=1), make_config(bf16=False)) as engine:
        path, _ = engine.load_checkpoint(tmp_path)
        assert Path(path).parent.name == "converted"
        assert "'global_step3'" in caplog.text
        assert "'converted'" in caplog.text
        assert_same_states(engine.fp32_state_dict(), state)
        assert engine.optimizer.steps == [3]
        assert _train(engine, 3, 6) == pytest.approx(losses, rel=1e-5)
        # From here on the engine's own checkpoints are the latest, for plain DeepSpeed as well.
        engine.save_checkpoint(tmp_path)
        saved = engine.fp32_state_dict()
        _train(engine, 6, 7)
        path, _ = engine.load_checkpoint(tmp_path)
        assert Path(path).parent.name == "global_step6"
        now = engine.fp32_state_dict()
        assert all(torch.equal(now[name]["fp32"], saved[name]["fp32"]) for name in saved)


def test_an_own_checkpoint_set_back_by_hand_stays_the_latest(tmp_path: Path) -> None:
    with built(_Model(seed=1), make_config(bf16=False)) as engine:
        engine.save_checkpoint(tmp_path, tag="old")
        engine.save_checkpoint(tmp_path, tag="new")
        time.sleep(0.05)  # more than clocks of file systems tell apart
        (tmp_path / "latest").write_text("old")
        path, _ = engine.load_checkpoint(tmp_path)
        assert Path(path).parent.name == "old"


def _remove_converted(folder: Path) -> None:
    shutil.rmtree(folder / "converted")
    (folder / "latest_universal").unlink()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_that_is_not_converted_is_converted(
    stage: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    state, losses = _save_and_convert(stage, tmp_path)
    _remove_converted(tmp_path)
    capsys.readouterr()
    for tag in (None, "global_step3"):
        with built(_Model(seed=1), make_config(bf16=False)) as engine:
            path, _ = engine.load_checkpoint(tmp_path, tag=tag)
            assert Path(path).parent.name == "global_step3_universal"
            assert_same_states(engine.fp32_state_dict(), state)
            assert engine.optimizer.steps == [3]
            assert _train(engine, 3, 6) == pytest.approx(losses, rel=1e-5)
    assert caplog.text.count("DeepSpeed's own format") == 1  # the second time it is there
    assert "Extracting" not in capsys.readouterr().out
    assert not list(tmp_path.glob("hytrain-*"))
    assert not (tmp_path / "latest_universal").exists()


def test_weights_alone_need_no_conversion(tmp_path: Path) -> None:
    state, _ = _save_and_convert(2, tmp_path)
    _remove_converted(tmp_path)
    with built(_Model(seed=1), make_config(bf16=False)) as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        now = engine.fp32_state_dict()
        assert all(torch.equal(now[name]["fp32"], state[name]["fp32"]) for name in state)
    assert not (tmp_path / "global_step3_universal").exists()


def test_one_that_cannot_be_converted_is_refused_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save_and_convert(2, tmp_path)
    _remove_converted(tmp_path)
    before = {entry.name for entry in tmp_path.iterdir()}
    with built(_Model(seed=1), make_config(bf16=False)) as engine:
        full = SimpleNamespace(free=1000)
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda _: full)
            with pytest.raises(CheckpointError, match=r"has 1 KiB free.*--inject_missing_state"):
                engine.load_checkpoint(tmp_path)
        (shard,) = (tmp_path / "global_step3").glob("*_optim_states.pt")
        shard.write_bytes(shard.read_bytes()[:1000])
        with pytest.raises(CheckpointError, match=r"could not be converted.*ds_to_universal"):
            engine.load_checkpoint(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == before


def test_a_conversion_that_misses_the_flag_names_it(tmp_path: Path) -> None:
    """DeepSpeed's own message asks for a state that only some frameworks save."""
    _save_and_convert(2, tmp_path)
    with built(_Model(seed=1), make_config(bf16=False)):
        pass  # from here on ds_to_universal is known to hytrain
    arguments = conversion(tmp_path / "global_step3", tmp_path / "again", inject=False)
    with pytest.raises(CheckpointError, match=r"universal_checkpoint_info.*--inject_missing_state"):
        ds_to_universal.main(arguments)
