"""The Trainer of transformers, on hytrain's engine: resumed losses are the same to the digit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from support.engines import device
from support.models import LENGTH, VOCABULARY, make_model
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hytrain

pytestmark = pytest.mark.usefixtures("process_group")


@pytest.fixture(autouse=True)
def hytrain_for_deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """accelerate looks ``deepspeed.initialize`` up when it prepares the model."""
    monkeypatch.setattr(deepspeed, "initialize", hytrain.initialize)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # accelerate would set it for the whole session
    yield
    unset_hf_deepspeed_config()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


class _Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def _config(from_json: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "hytrain": {"gpu_fraction": 0.5, "offload": {"chunk_elements": 1024, "cpu_threads": 1}},
    }
    if from_json:
        names = ("lr", "betas", "eps", "weight_decay")
        config["optimizer"] = {"type": "AdamW", "params": dict.fromkeys(names, "auto")}
        names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
        config["scheduler"] = {"type": "WarmupLR", "params": dict.fromkeys(names, "auto")}
    return config


def _train(
    folder: Path, from_json: bool, *, seed: int, resume: Path | None = None
) -> list[tuple[float, ...]]:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        weight_decay=0.1,
        warmup_steps=3,
        lr_scheduler_type="constant_with_warmup" if from_json else "linear",
        bf16=True,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=device().type == "cpu",
        deepspeed=_config(from_json),
    )
    trainer = Trainer(model=make_model("llama", seed=seed), args=arguments, train_dataset=_Tokens())
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert isinstance(trainer.model_wrapped, hytrain.HyTrainEngine)
    return [
        (entry["step"], entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "loss" in entry
    ]


@pytest.mark.parametrize(
    "from_json", [True, pytest.param(False, marks=pytest.mark.parity_full)], ids=["json", "torch"]
)
def test_resumed_losses_are_the_same(from_json: bool, tmp_path: Path) -> None:
    straight = _train(tmp_path / "a", from_json, seed=1)
    assert [entry[0] for entry in straight] == [1, 2, 3, 4, 5]
    saved = tmp_path / "a" / "checkpoint-2"
    resumed = _train(tmp_path / "b", from_json, seed=2, resume=saved)
    assert resumed[-3:] == straight[2:]
