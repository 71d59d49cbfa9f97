"""Models that are not trained get plain DeepSpeed's engine; training beside them is as ever."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from support.engines import built, device, make_config
from support.models import LENGTH, VOCABULARY, loss_of, make_batch, make_model
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

import hytrain
from hytrain.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.timeout(120)


def _reference(model: nn.Module, **config: Any) -> Any:
    """As trl does it for the model that is compared with."""
    with hytrain.register():
        engine, *rest = deepspeed.initialize(
            model=model, config=copy.deepcopy(make_config(optimizer=None, **config))
        )
    assert type(engine) is deepspeed.DeepSpeedEngine
    assert rest[1:] == [None, None]
    engine.eval()
    return engine


def _evaluate(engine: Any) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(engine(**make_batch("llama", 0, device()))).float()


def _train(model: nn.Module, **config: Any) -> list[float]:
    losses: list[float] = []
    with built(model, make_config(**config)) as engine:
        assert isinstance(engine, hytrain.HyTrainEngine)
        for number in range(4):
            loss = loss_of(engine(**make_batch("llama", number, device())))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (3, True)])
def test_plain_engine_and_training_beside_it(
    stage: int, bf16: bool, caplog: pytest.LogCaptureFixture
) -> None:
    straight = _train(make_model("llama"), stage=3, bf16=bf16)
    config = make_config(stage=stage, bf16=bf16, optimizer=None)
    del config["hytrain"]
    plain, *_ = deepspeed.initialize(model=make_model("llama"), config=config)
    expected = _evaluate(plain)
    plain.destroy()
    if not bf16:
        assert torch.equal(_evaluate(make_model("llama").to(device())), expected)
    with caplog.at_level(logging.WARNING, logger="hytrain.api"):
        engine = _reference(make_model("llama"), stage=stage, bf16=bf16)
    assert "no optimizer was given: this is an engine of plain DeepSpeed" in caplog.text
    assert torch.equal(_evaluate(engine), expected)
    assert _train(make_model("llama"), stage=3, bf16=bf16) == straight
    assert torch.equal(_evaluate(engine), expected)
    engine.destroy()


def test_the_same_model_is_trained_later() -> None:
    """As by a Trainer that evaluates and another one that trains."""
    straight = _train(make_model("llama"), stage=3)
    model = make_model("llama")
    engine = _reference(model, stage=3)
    _evaluate(engine)
    assert _train(model, stage=3) == straight


def test_another_engine_has_the_model() -> None:
    straight = _train(make_model("llama"), stage=3)
    model = make_model("llama")
    config = make_config(stage=3, optimizer=None)
    del config["hytrain"]
    engine, *_ = deepspeed.initialize(model=model, config=config)
    _evaluate(engine)
    with pytest.raises(UnsupportedError, match=r"call that engine's destroy\(\)"):
        hytrain.initialize(
            model=model, model_parameters=model.parameters(), config=make_config(stage=3)
        )
    _evaluate(engine)  # nothing was touched
    engine.destroy()
    assert _train(model, stage=3) == straight


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_that_shard_nothing_but_optimizers(stage: int) -> None:
    config = make_config(stage=stage, optimizer=None)
    with pytest.raises(ConfigError, match=f'not trained needs another .*stage" than {stage}: 3'):
        hytrain.initialize(model=make_model("mlp"), config=config)


def test_batches_that_only_the_section_has() -> None:
    config = make_config(stage=3, optimizer=None, hytrain={"batch_sizes": [3]})
    del config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]
    engine, *_ = hytrain.initialize(model=make_model("llama"), config=config)
    assert _evaluate(engine).isfinite()
    engine.destroy()


@pytest.fixture
def _accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # accelerate would set it for the whole session
    with hytrain.register():
        yield
    unset_hf_deepspeed_config()
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


AUTO = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}


def _trainer(
    folder: Path, stage: int = 3, optimizer: Any = None, model: nn.Module | None = None
) -> Trainer:
    config = make_config(
        stage=stage, optimizer=copy.deepcopy(optimizer), clipping="auto"  # type: ignore[arg-type]
    )  # fmt: skip
    config |= {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    config |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=device().type == "cpu",
        deepspeed=config,
    )
    tokens = torch.arange(8 * LENGTH).remainder(VOCABULARY).view(8, LENGTH)
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    model = make_model("llama") if model is None else model
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data)


@pytest.mark.usefixtures("_accelerate")
def test_a_wrong_section_is_refused_in_hytrains_words(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, 2, AUTO)
    trainer.accelerator.state.deepspeed_plugin.deepspeed_config["hytrain"]["gpu_fraction"] = "auto"
    with pytest.raises(ConfigError, match=r"hytrain.gpu_fraction = 'auto': must be .* \"solve\""):
        trainer.train()


def _losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


full = pytest.mark.parity_full


@pytest.mark.usefixtures("_accelerate")
@pytest.mark.parametrize(
    ("stage", "optimizer"), [(2, AUTO), pytest.param(3, None, marks=full)], ids=str
)
def test_one_trainer_evaluates_and_then_trains(stage: int, optimizer: Any, tmp_path: Path) -> None:
    straight = _trainer(tmp_path, stage, optimizer)
    straight.train()
    straight.deepspeed.destroy()
    trainer = _trainer(tmp_path, stage, optimizer)
    before = trainer.evaluate()["eval_loss"]
    assert trainer.evaluate()["eval_loss"] == before
    assert type(trainer.deepspeed) is deepspeed.DeepSpeedEngine
    trainer.train()
    assert isinstance(trainer.deepspeed, hytrain.HyTrainEngine)
    assert ("optimizer" in trainer.deepspeed.config) is (optimizer is not None)
    assert _losses(trainer) == _losses(straight)
    assert trainer.evaluate()["eval_loss"] < before
    trainer.deepspeed.destroy()


@pytest.mark.usefixtures("_accelerate")
@pytest.mark.parametrize(
    ("stage", "optimizer"), [pytest.param(2, AUTO, marks=full), (3, None)], ids=str
)
def test_one_trainer_trains_twice(stage: int, optimizer: Any, tmp_path: Path) -> None:
    """As two that have the same model, one after the other: Adam begins anew."""
    first = _trainer(tmp_path, stage, optimizer)
    first.train()
    first.deepspeed.destroy()
    second = _trainer(tmp_path, stage, optimizer, first.model)
    second.train()
    second.deepspeed.destroy()
    trainer = _trainer(tmp_path, stage, optimizer)
    for expected in (first, second):
        trainer.train()
        assert _losses(trainer) == _losses(expected)
    trainer.deepspeed.destroy()


def test_what_transformers_has_is_put_back() -> None:
    import transformers.trainer

    before = transformers.trainer.deepspeed_init
    with hytrain.register(), hytrain.register():
        assert transformers.trainer.deepspeed_init != before
    assert transformers.trainer.deepspeed_init == before
