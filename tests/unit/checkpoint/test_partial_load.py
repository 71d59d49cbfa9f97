"""``load_module_strict=False``: what a checkpoint has not stays as it is, moments and all."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import built, device, make_config
from support.resume import Run, engine_of, micro_batch, snapshot, train
from torch import nn

from hytrain.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("process_group")

WIDTH = 8


class _Groups(nn.Module):
    def __init__(self, extra: str, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.ModuleDict({extra: nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.extra.values():
            x = x + part(x)
        return self.base(x).square().mean()


def _grouped(extra: str, seed: int, lr: float) -> Any:
    model = _Groups(extra, seed)
    groups = [
        {"params": list(model.base.parameters()), "lr": lr},
        {"params": list(model.extra.parameters()), "lr": 2 * lr},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr)
    return built(model, make_config(bf16=False, optimizer=None), optimizer=optimizer)


def _step(engine: Any, times: int) -> None:
    for _ in range(times):
        engine.backward(engine(torch.ones(2, WIDTH, device=device())))
        engine.step()


def test_a_group_that_the_checkpoint_has_nothing_of_keeps_its_steps(tmp_path: Path) -> None:
    with _grouped("a", 0, 0.01) as engine:
        _step(engine, 2)
        engine.save_checkpoint(tmp_path)
        saved = engine.fp32_state_dict()
    with _grouped("b", 1, 0.05) as engine:
        _step(engine, 5)
        before = engine.fp32_state_dict()
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        now = engine.fp32_state_dict()
        for name, tensors in now.items():
            expected = saved if name.startswith("base.") else before
            for kind, tensor in tensors.items():
                assert torch.equal(tensor, expected[name][kind]), (name, kind)
        # Adam corrects the moments of a group by its steps: both are the checkpoint's, or neither.
        assert engine.optimizer.steps == [2, 5]
        assert [group["lr"] for group in engine.optimizer.param_groups] == [0.01, 0.1]
        _step(engine, 1)
        assert engine.optimizer.steps == [3, 6]


def test_steps_that_only_nearly_fit_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(Run()) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
    with engine_of(Run().another(num_blocks=4)) as engine:
        train(engine, 10, 13)
        with caplog.at_level(logging.WARNING, "hytrain"):
            engine.load_checkpoint(tmp_path, load_module_strict=False)
        assert "'blocks.3." in caplog.text
        assert "of 3 steps" in caplog.text
        assert "their group 0 has made 2" in caplog.text


@pytest.mark.parametrize("tied", [False, True])
def test_weights_without_state_are_loaded_with_moments_of_zero(tied: bool, tmp_path: Path) -> None:
    """Frozen when it was saved, trained now: its weights are another's, so are its moments."""
    with engine_of(Run()) as engine:
        train(engine, 0, 2)
        engine.save_checkpoint(tmp_path)
        saved = snapshot(engine)
    tag = tmp_path / "global_step2"
    name = "embed.weight" if tied else "norm.weight"
    for path in (tag / "zero" / name).iterdir():
        path.unlink()
    (tag / "zero" / name).rmdir()
    (tag / "zero/hytrain_manifest.json").unlink()
    if tied:  # under its second name only
        stored = torch.load(tag / "mp_rank_00_model_states.pt", weights_only=False)
        del stored["module"][name]
        torch.save(stored, tag / "mp_rank_00_model_states.pt")
    with engine_of(Run().another()) as engine:
        train(engine, 10, 13)
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        now = snapshot(engine)
        assert torch.equal(now.weights[name], saved.weights[name])
        assert torch.equal(now.state[name]["fp32"], saved.weights[name].float())
        assert not now.state[name]["exp_avg"].any()
        assert not now.state[name]["exp_avg_sq"].any()


def test_without_optimizer_states_the_weights_keep_their_bits(tmp_path: Path) -> None:
    with engine_of(Run()) as engine:
        engine.save_checkpoint(tmp_path)
    with engine_of(Run().another(num_blocks=4)) as engine:
        train(engine, 10, 13)
        before = snapshot(engine)
        engine.load_checkpoint(tmp_path, load_module_strict=False, load_optimizer_states=False)
        now = snapshot(engine)
        name = "blocks.3.up.weight"
        assert torch.equal(now.state[name]["fp32"], before.state[name]["fp32"])
        assert not now.state[name]["exp_avg"].any()
        assert now.steps == [0]


def test_what_a_begun_step_has_changed_is_not_left_as_it_is(tmp_path: Path) -> None:
    """Without clipping and overflow check, updates are committed while backward runs."""
    run = Run(clipping=0.0, check_overflow=False, gpu_fraction=0.0)
    with engine_of(run) as engine:
        engine.save_checkpoint(tmp_path)
    with engine_of(run.another(num_blocks=4)) as engine:
        train(engine, 10, 12)
        engine.backward(engine(micro_batch(12).to(engine.device)))
        with pytest.raises(CheckpointError, match=r"'blocks\.3\..*call step\(\)"):
            engine.load_checkpoint(tmp_path, load_module_strict=False)
        engine.step()
        engine.load_checkpoint(tmp_path, load_module_strict=False)
        train(engine, 2, 3)
