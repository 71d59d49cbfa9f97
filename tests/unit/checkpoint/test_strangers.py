"""A stranger's checkpoint, of ours or of plain DeepSpeed's, runs no code unless it is trusted."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import zero_to_fp32
from support.damage import assert_refused, sums_of
from support.engines import built, make_config
from support.plain_deepspeed import plain_engine
from support.resume import Run, assert_same, engine_of, snapshot, train

from hytrain.checkpoint.inert import Unknown
from hytrain.checkpoint.manifest import Manifest, read_manifest
from hytrain.checkpoint.torch_files import load_states
from hytrain.checkpoint.universal import OptimizerRecord
from hytrain.engine.foreign_checkpoints import offer_conversions
from hytrain.errors import CheckpointError, DamagedCheckpointError
from hytrain.tools import cli

TAG = "last"


class _Mark:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def _seal(tag: Path, manifest: bool) -> None:
    """All sums are those of the files."""
    path = tag / "zero/hytrain_manifest.json"
    path.unlink(missing_ok=True)
    if manifest:
        sums = {
            file.relative_to(tag).as_posix(): sums_of(file.read_bytes())
            for file in tag.rglob("*.pt")
        }
        path.write_bytes(Manifest(sums, time.time()).pack())


def _plant(path: Path, value: object) -> None:
    stored = torch.load(path, weights_only=False)
    stored["planted"] = value
    torch.save(stored, path)


@pytest.mark.parametrize("manifest", [True, False])
def test_ours_runs_nothing(
    manifest: bool, engine: Any, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark, tag = tmp_path / "mark", folder / TAG
    for name in ("mp_rank_00_model_states.pt", "zero/optimizer_state.pt"):
        _plant(tag / name, _Mark(mark))
    for path in (tag / "zero/blocks.0.up.weight").iterdir():
        if path.stem != "step":
            _plant(path, _Mark(mark))
    _seal(tag, manifest)
    assert cli.main(["checkpoint", "info", str(folder)]) == 0
    assert cli.main(["checkpoint", "verify", str(folder)]) == 0
    assert cli.main(["export", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "Traceback" not in capsys.readouterr().err
    words = "mkdir (at 'planted')", "run_pickled_code", "model_states.pt"
    assert_refused(engine, folder, *words)
    assert not mark.exists()


def test_a_client_state_of_classes_is_refused_unless_trusted(
    engine: Any, folder: Path, tmp_path: Path
) -> None:
    state = engine.load_checkpoint(folder, tag=TAG)[1]
    assert (state["best"], state["seen"], state["order"]) == (0.5, {3}, [(1, "a")])
    assert torch.equal(state["mean"], torch.arange(3.0))
    client = {"args": argparse.Namespace(lr=0.1, tensor=torch.arange(2.0)), "best": 1}
    with engine_of(Run(run_pickled_code=True)) as trusting:
        train(trusting, 0, 1)
        trusting.save_checkpoint(folder, tag="classes", client_state=client)
        saved = snapshot(trusting)
        train(trusting, 1, 2)
        _, state = trusting.load_checkpoint(folder, tag="classes")
        assert_same(snapshot(trusting), saved)
        assert state["args"].lr == 0.1
        assert torch.equal(state["args"].tensor, client["args"].tensor)
    for only in (False, True):
        with pytest.raises(CheckpointError, match=r"argparse\.Namespace \(at 'args'\).*trust"):
            engine.load_checkpoint(folder, tag="classes", load_module_only=only)
    assert cli.main(["export", str(folder), "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("stage", [2, 3])
def test_plain_deepspeeds_runs_nothing(stage: int, process_group: None, tmp_path: Path) -> None:
    model, folder, mark = torch.nn.Linear(4, 3), tmp_path / "in", tmp_path / "mark"
    plain = plain_engine(model, stage)
    plain.backward(plain(torch.ones(2, 4)).sum())
    plain.step()
    plain.save_checkpoint(str(folder), tag=TAG)
    plain.destroy()
    for path in (folder / TAG).glob("*.pt"):
        _plant(path, _Mark(mark))
    offer_conversions()
    assert cli.main(["export", str(folder), "--out", str(tmp_path / "out")]) == 0
    weights = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert set(weights) == {"weight", "bias"}
    # The model states have it, too, which the user would be given.
    with built(torch.nn.Linear(4, 3), make_config(bf16=False)) as engine:
        with pytest.raises(CheckpointError, match=r"mkdir \(at 'planted'\)"):
            engine.load_checkpoint(folder, tag=TAG)
        with contextlib.suppress(CheckpointError):
            engine.load_checkpoint(folder, tag=TAG, load_optimizer_states=False)
    assert not mark.exists()
    trust = {"checkpoint": {"run_pickled_code": True}}
    config = make_config(bf16=False, hytrain=trust)
    # The second file's mark cannot be made.
    with built(torch.nn.Linear(4, 3), config) as engine, contextlib.suppress(CheckpointError):
        engine.load_checkpoint(folder, tag=TAG)
    assert mark.exists()


@pytest.mark.parametrize("wrong", ["saved_at", "global_steps"])
def test_numbers_that_cannot_be_shown(
    wrong: str, engine: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tag = folder / TAG
    states, manifest = tag / "mp_rank_00_model_states.pt", tag / "zero/hytrain_manifest.json"
    if wrong == "global_steps":
        torch.save(torch.load(states, weights_only=False) | {wrong: 10**5000}, states)
        _seal(tag, True)
    else:
        manifest.write_bytes(Manifest(read_manifest(manifest).files, 1e300).pack())
    assert cli.main(["checkpoint", "info", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "damaged" in text
    assert wrong in text


def test_a_job_of_so_many_ranks_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").mkdir()
    states = {"module": {}, "dp_world_size": 10**12, "mp_world_size": 1}
    torch.save(states, tmp_path / "one/mp_rank_00_model_states.pt")
    torch.save({}, tmp_path / "one/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert cli.main(["checkpoint", "verify", str(tmp_path), "--tag", "one"]) == 1
    assert "more than any job has" in " ".join(capsys.readouterr().out.split())


def test_a_loss_scaler_of_deepspeeds_is_read_by_its_fields(tmp_path: Path) -> None:
    scaler = Unknown("deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler", ())
    scaler.fields = {"cur_scale": 1024.0}
    torch.save({"param_groups": [], "loss_scaler": scaler}, tmp_path / "again.pt")
    record = OptimizerRecord.read(tmp_path / "again.pt")
    assert record.loss_scale == {"cur_scale": 1024.0}


def test_states_without_names(tmp_path: Path) -> None:
    torch.save(5, tmp_path / "states.pt")
    with pytest.raises(DamagedCheckpointError, match="object of type int where a checkpoint has"):
        load_states(tmp_path / "states.pt")
