"""What does not fit is refused before anything is touched; a failed save leaves latest alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.damage import assert_refused
from support.engines import built, make_config
from support.models import make_model
from support.resume import Run, engine_of
from torch import nn

from hytrain.errors import CheckpointError

TAG = "last"
EXP_AVG = Path(TAG) / "zero" / "blocks.1.up.weight" / "exp_avg.pt"
MANIFEST = Path(TAG) / "zero" / "hytrain_manifest.json"


def test_no_latest_is_a_warning(
    engine: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert engine.load_checkpoint(tmp_path) == (None, None)
    assert engine.load_checkpoint(tmp_path / "none") == (None, None)
    assert "has no file 'latest'" in caplog.text


def test_wrong_tag(engine: Any, folder: Path) -> None:
    assert_refused(engine, folder, "no checkpoint 'x'", f"the tags {TAG}, older", tag="x")
    (folder / "latest").write_text("gone\n")
    for path in folder.glob("*/zero/*.json"):
        path.unlink()  # what has no manifest is not gone back to
    assert_refused(engine, folder, "no checkpoint 'gone'", tag=None)


def test_files_that_hold_something_else(engine: Any, folder: Path) -> None:
    (folder / MANIFEST).unlink()
    content = (folder / EXP_AVG).read_bytes()
    (folder / EXP_AVG).unlink()
    assert_refused(engine, folder, str(EXP_AVG), "is missing")
    (folder / EXP_AVG).write_bytes(content[: len(content) // 2])
    assert_refused(engine, folder, str(EXP_AVG), "cannot be read", "load another tag")
    torch.save({"param": 3}, folder / EXP_AVG)
    assert_refused(engine, folder, str(EXP_AVG), "holds a int")
    for name in ("mp_rank_00_model_states.pt", "zero/optimizer_state.pt"):
        torch.save([1], folder / TAG / name)
        assert_refused(engine, folder, TAG)


def test_another_model(engine: Any, original: Path, tmp_path: Path) -> None:
    with engine_of(Run(num_blocks=4)) as other:
        assert_refused(other, original, "has no state of", "'blocks.3.", "another model")
        for part in ({"load_module_only": True}, {"load_optimizer_states": False}):
            assert_refused(other, original, "'blocks.3.", **part)
        other.save_checkpoint(tmp_path, tag=TAG)
    assert_refused(engine, tmp_path, "has state of 'blocks.3.", "does not train")
    with engine_of(Run(width=44)) as other:
        assert_refused(other, original, "has shape (36,) but", "(44,)")
        assert_refused(other, original, "has shape", load_module_only=True)
        assert_refused(other, original, "has shape", load_module_strict=False)


def test_other_groups(original: Path, tmp_path: Path) -> None:
    with engine_of(Run(groups=True)) as engine:
        assert_refused(engine, original, "has 1 parameter groups but the optimizer has 3")
        engine.load_checkpoint(original, load_optimizer_states=False)
        engine.save_checkpoint(tmp_path, tag=TAG)
        path = tmp_path / TAG / "zero/optimizer_state.pt"
        (tmp_path / MANIFEST).unlink()
        stored = torch.load(path, weights_only=False)
        names = stored["hytrain"]["group_parameters"]
        names[0].append(names[1].pop())
        torch.save(stored, path)
        assert_refused(engine, tmp_path, "parameter group 0", "differs", "'embed.weight'")


def test_a_later_format(engine: Any, folder: Path) -> None:
    path = folder / TAG / "zero/optimizer_state.pt"
    (folder / MANIFEST).unlink()
    stored = torch.load(path, weights_only=False)
    stored["hytrain"]["version"] = 99
    torch.save(stored, path)
    assert_refused(engine, folder, "later hytrain", "99")


def test_not_a_universal_checkpoint(engine: Any, folder: Path) -> None:
    shutil.rmtree(folder / TAG / "zero")
    assert_refused(engine, folder, "no universal checkpoint", "ds_to_universal")
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


class _Wrapped(nn.Module):
    """What DistributedDataParallel, or a trainer, makes of a model's names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


def _mlp(wrapped: bool, seed: int) -> nn.Module:
    model = make_model("mlp", seed=seed)
    return _Wrapped(model) if wrapped else model


@pytest.mark.parametrize("was_wrapped", [True, False])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_names_with_another_prefix_are_refused(
    stage: int, was_wrapped: bool, tmp_path: Path
) -> None:
    """https://github.com/facebookresearch/moco-v3/issues/30: every name has one more "module.".

    A load that takes what both have would take nothing, and train the new model's own weights.
    """
    config = make_config(gpu_fraction=0.5, stage=stage)
    with built(_mlp(was_wrapped, 0), config) as engine:
        engine.save_checkpoint(tmp_path)
    with built(_mlp(not was_wrapped, 1), config) as engine:
        before = {name: t.clone() for name, t in _masters(engine).items()}
        for arguments in _WAYS:
            with pytest.raises(CheckpointError, match=r"module\.") as told:
                engine.load_checkpoint(tmp_path, **arguments)
            # That the names differ in their beginning alone is the thing to be told.
            assert "begin with 'module.'" in str(told.value)
        after = _masters(engine)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


_WAYS: tuple[dict[str, bool], ...] = (
    {},
    {"load_module_only": True},
    {"load_optimizer_states": False},
    {"load_module_strict": False},
    {"load_module_strict": False, "load_module_only": True},
)


def _masters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: tensors["fp32"] for name, tensors in engine.fp32_state_dict().items()}
