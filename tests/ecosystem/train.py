"""One training with a library's own trainer, for test_ecosystem.py: writes what it found as JSON.

On a GPU, or on the CPU with DS_ACCELERATOR=cpu.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import samples
import torch
from deepspeed.ops import __compatible_ops__ as compatible_ops

import hytrain

Result = dict[str, Any]
_LR = 1e-2
_CONFIGS = Path(__file__).resolve().parents[2] / "ds_configs" / "libraries"
_ON_GPU = os.environ.get("DS_ACCELERATOR") != "cpu"


def _config(options: argparse.Namespace) -> dict[str, Any]:
    """The library's configuration in ds_configs/, with layers of a small model on CPU and GPU."""
    name = "lightning" if options.kind == "lightning" else "hf"
    config = json.loads((_CONFIGS / f"{name}_zero{max(2, options.stage)}.json").read_text())
    zero = config["zero_optimization"]
    zero["stage"] = options.stage
    if options.stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    if options.engine == "hytrain":
        offload = {"chunk_elements": 1024, "cpu_threads": 1}
        config["hytrain"] |= {"gpu_fraction": 0.5, "offload": offload}
    else:
        del config["hytrain"], zero["offload_optimizer"]
    return config


def _common(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "output_dir": str(options.folder / "out"), "deepspeed": _config(options), "max_steps": 6,
        "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [],
        "use_cpu": not _ON_GPU, "bf16": options.bf16, "seed": 0,
        "learning_rate": _LR, "lr_scheduler_type": "linear",
        "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip


def _check(engine: Any, options: argparse.Namespace) -> None:
    """Asserts that it is the engine that was asked for."""
    expected = "HyTrainEngine" if options.engine == "hytrain" else "DeepSpeedEngine"
    assert type(engine).__name__ == expected, type(engine)


def _losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _lora(options: argparse.Namespace) -> Any:
    if not options.lora:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM"
    )


def _trainer(options: argparse.Namespace, model: Any, data: list[dict[str, Any]]) -> Result:
    """Runs Trainer: evaluates, saves every two steps, takes the best; resumes if asked for."""
    from transformers import DataCollatorWithPadding, Trainer, TrainingArguments

    arguments = _common(options) | {
        "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
        "load_best_model_at_end": not options.resume, "metric_for_best_model": "loss",
    }  # fmt: skip
    is_text = "input_ids" in data[0]
    collator = DataCollatorWithPadding(samples.tokenizer()) if is_text else None
    trainer = Trainer(
        model, TrainingArguments(**arguments), train_dataset=data, eval_dataset=data[:8],
        data_collator=collator,
    )  # fmt: skip
    found: Result = {}
    if options.engine == "hytrain":
        found["before"] = trainer.evaluate()["eval_loss"]  # plain DeepSpeed's fails
    resumed = str(options.folder / "out" / "checkpoint-4") if options.resume else None
    trainer.train(resume_from_checkpoint=resumed)
    _check(trainer.model_wrapped, options)
    history = trainer.state.log_history
    found["losses"] = _losses(trainer)
    found["evaluated"] = [entry["eval_loss"] for entry in history if "eval_loss" in entry]
    found["last"] = trainer.evaluate()["eval_loss"]
    return found


def _text(options: argparse.Namespace) -> Result:
    return _trainer(options, samples.bert(), samples.sentences(options.folder))


def _vit(options: argparse.Namespace) -> Result:
    from support.models import make_model

    return _trainer(options, make_model("vit"), samples.images())


def _sft(options: argparse.Namespace) -> Result:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    data = Dataset.from_dict({"text": samples.texts(32, 12)})
    arguments = SFTConfig(**_common(options), max_length=32, dataset_text_field="text")
    trainer = SFTTrainer(
        samples.llama(), arguments, train_dataset=data, processing_class=samples.tokenizer(),
        peft_config=_lora(options),
    )  # fmt: skip
    trainer.train()
    return {"losses": _losses(trainer), "generated": _generate(trainer, options)}


def _dpo(options: argparse.Namespace) -> Result:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    columns = {"prompt": (4, 0), "chosen": (6, 1), "rejected": (6, 2)}
    data = Dataset.from_dict({k: samples.texts(32, n, seed) for k, (n, seed) in columns.items()})
    trainer = DPOTrainer(
        samples.llama(), None if options.lora else samples.llama(),
        DPOConfig(**_common(options), max_length=32), train_dataset=data,
        processing_class=samples.tokenizer(), peft_config=_lora(options),
    )  # fmt: skip
    trainer.train()
    return {"losses": _losses(trainer), "generated": _generate(trainer, options)}


def _grpo(options: argparse.Namespace) -> Result:
    """Trains online: every step trains on what the model itself has generated."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_named: Any) -> list[float]:
        return [float(sum(text.count(digit) for digit in "135")) for text in completions]

    arguments = _common(options) | {"learning_rate": 1e-3, "max_steps": 4}
    trainer = GRPOTrainer(
        samples.llama(), reward,
        GRPOConfig(**arguments, num_generations=2, max_completion_length=6),
        train_dataset=Dataset.from_dict({"prompt": samples.texts(32, 4)}),
        processing_class=samples.tokenizer(), peft_config=_lora(options),
    )  # fmt: skip
    trainer.train()
    rewards = [e["reward"] for e in trainer.state.log_history if "reward" in e]
    return {"losses": [*_losses(trainer), *rewards], "generated": _generate(trainer, options)}


def _generate(trainer: Any, options: argparse.Namespace) -> list[list[int]]:
    """Generates as online trainers do between two steps."""
    _check(trainer.model_wrapped, options)
    from trl.models.utils import unwrap_model_for_generation

    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        prompt = torch.tensor([[5, 6, 7]], device=trainer.accelerator.device)
        return model.generate(prompt, max_new_tokens=6, do_sample=False).tolist()


_LONG = 16
"""Tokens per sequence; ranks that share it have equal parts."""


def _sequences() -> list[dict[str, torch.Tensor]]:
    """Whole sequences; the first labels of each are ignored, so parts differ in valid labels."""
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, torch.Tensor]] = []
    for number in range(24):
        tokens = torch.randint(3, 64, (_LONG,), generator=generator)
        labels = tokens.clone()
        labels[: number % 7] = -100
        places = torch.arange(_LONG)
        found.append({"input_ids": tokens, "labels": labels, "position_ids": places})
    return found


def _shared() -> Any:
    """The configuration in which all ranks share each sequence; None for one rank."""
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    ranks = int(os.environ["WORLD_SIZE"])
    if ranks == 1:
        return None
    if not _ON_GPU:  # where accelerate does not tell DeepSpeed of the ranks
        deepspeed.init_distributed("gloo", verbose=False)
    handler = DeepSpeedSequenceParallelConfig(
        sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
    )
    return ParallelismConfig(sp_size=ranks, sp_backend="deepspeed", sp_handler=handler)


def _count(model: Any) -> list[int]:
    """An engine's global batch, accumulation steps and samples so far."""
    return [model.train_batch_size(), model.gradient_accumulation_steps(), model.global_samples]


def _trainer_sequences(options: argparse.Namespace) -> Result:
    from transformers import Trainer, TrainingArguments, default_data_collator

    arguments = _common(options) | {
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_grad_norm": 0.5,
        "parallelism_config": _shared(), "train_sampling_strategy": "sequential",
    }  # fmt: skip
    trainer = Trainer(
        samples.llama(), TrainingArguments(**arguments), train_dataset=_sequences(),
        data_collator=default_data_collator,
    )  # fmt: skip
    # Where ranks share sequences, Trainer takes the micro-batches' mean, whatever tokens they have.
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    _check(trainer.model_wrapped, options)
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry]
    return {"losses": _losses(trainer), "norms": norms, "batch": _count(trainer.model_wrapped)}


def _accelerate_sequences(options: argparse.Namespace) -> Result:
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from support.sequences import shared_loss
    from torch.utils.data import DataLoader

    if not _ON_GPU:
        PartialState(cpu=True)
    plugin = DeepSpeedPlugin(hf_ds_config=_config(options), gradient_accumulation_steps=2)
    shared = _shared()
    accelerator = Accelerator(
        deepspeed_plugin=plugin, mixed_precision="no", parallelism_config=shared
    )
    model = samples.llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    loader: Any = DataLoader(_sequences(), batch_size=1)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    _check(model, options)
    group = None if shared is None else model.get_sequence_parallel_group()
    losses: list[float] = []
    norms: list[float] = []
    for number, batch in enumerate(loader):
        if number == 12:
            break
        batch = {name: tensor.to(accelerator.device) for name, tensor in batch.items()}
        batch.setdefault("labels", batch.get("shift_labels"))
        with accelerator.accumulate(model):
            loss = shared_loss(model, batch, group)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if number % 2:
            norms.append(float(model.get_global_grad_norm()))
    return {"losses": losses, "norms": norms, "batch": _count(model)}


def _accelerate(options: argparse.Namespace) -> Result:
    """Runs a hand-written loop: accumulates, clips, saves and loads in the middle."""
    from accelerate import Accelerator, DeepSpeedPlugin, PartialState
    from torch.utils.data import DataLoader

    if not _ON_GPU:
        # As Trainer does: ranks by gloo. With cpu=True Accelerator itself takes DDP for DeepSpeed.
        PartialState(cpu=True)
    # Its own way of accumulation: the file leaves it to whoever prepares the model.
    plugin = DeepSpeedPlugin(hf_ds_config=_config(options), gradient_accumulation_steps=2)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="no")
    model = samples.llama()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (32, 8), generator=generator)
    loader = DataLoader(tokens, batch_size=2)  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    _check(model, options)
    assert model.gradient_accumulation_steps() == 2

    def train(first: int, last: int) -> list[float]:
        losses: list[float] = []
        for number, batch in enumerate(loader):
            if first <= number < last:
                with accelerator.accumulate(model):
                    loss = model(input_ids=batch, labels=batch).loss
                    accelerator.backward(loss)
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    losses = train(0, 4)
    folder = str(options.folder / "state")
    accelerator.save_state(folder)
    straight = train(4, 8)
    accelerator.load_state(folder)
    again = train(4, 8)
    weights = accelerator.get_state_dict(model)
    total = sum(float(v.double().abs().sum()) for v in weights.values()) if weights else None
    saved = _saved_by_accelerate(accelerator, model, options.folder)
    found = {"losses": losses + straight, "again": again, "straight": straight, "total": total}
    return found | {"saved": saved}


def _saved_by_accelerate(accelerator: Any, model: Any, folder: Path) -> list[float]:
    """Saves in accelerate's two ways, which all ranks run; the sum of each one's values."""
    from safetensors.torch import load_file

    accelerator.save_model(model, str(folder / "saved"), max_shard_size="20KB")
    accelerator.unwrap_model(model).save_pretrained(
        str(folder / "pretrained"), is_main_process=accelerator.is_main_process,
        save_function=accelerator.save, state_dict=accelerator.get_state_dict(model),
    )  # fmt: skip
    accelerator.wait_for_everyone()
    files = [sorted((folder / name).glob("*.safetensors")) for name in ("saved", "pretrained")]
    tensors = [[t for file in some for t in load_file(file).values()] for some in files]
    return [sum(float(t.double().abs().sum()) for t in some) for some in tensors]


def _let_lightning_use_a_cpu() -> None:
    """Patches Lightning's DeepSpeedStrategy, which refuses a CPU; on a GPU it runs as it is."""
    from lightning.pytorch.accelerators.cpu import CPUAccelerator
    from lightning.pytorch.strategies import deepspeed as strategy

    found: Any = strategy
    found.CUDAAccelerator = CPUAccelerator
    found._validate_device_index_selection = lambda *_arguments: None
    found.DeepSpeedStrategy.root_device = property(lambda _self: torch.device("cpu", 0))


def _lightning(options: argparse.Namespace) -> Result:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    if not _ON_GPU:
        _let_lightning_use_a_cpu()

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = samples.llama()
            self.losses: list[float] = []

        def training_step(self, batch: Any, _number: int) -> Any:
            loss = self.model(input_ids=batch, labels=batch).loss
            _check(self.trainer.strategy.model, options)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=_LR)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (12, 8), generator=generator)
    module = Module()
    pl.Trainer(
        accelerator="gpu" if _ON_GPU else "cpu", devices=1,
        strategy=DeepSpeedStrategy(config=_config(options)), max_epochs=1,
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, precision="32-true",
        enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(options.folder),
    ).fit(module, torch.utils.data.DataLoader(tokens, batch_size=2))  # fmt: skip
    return {"losses": module.losses}


def _options(options: argparse.Namespace) -> Result:
    """Makes a short training with each option of options.py; weights go to a file."""
    from options import train_each

    each = train_each(
        _common(options), str(options.folder / "model"), lambda engine: _check(engine, options)
    )
    if os.environ.get("RANK", "0") == "0":
        weights = {name: found.pop("weights") for name, found in each.items()}
        torch.save(weights, options.folder / "weights.pt")
    return {"each": each if os.environ.get("RANK", "0") == "0" else None}


def _versions() -> str:
    packages = ("torch", "deepspeed", "transformers", "accelerate", "trl", "peft", "lightning")
    return ", ".join(
        f"{name} {module.__version__}"
        for name in packages
        if (module := sys.modules.get(name)) is not None
    )


KINDS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "text": _text, "vit": _vit, "sft": _sft, "dpo": _dpo, "grpo": _grpo,
    "accelerate": _accelerate, "lightning": _lightning, "options": _options,
    "trainer_sequences": _trainer_sequences, "accelerate_sequences": _accelerate_sequences,
}  # fmt: skip


def main() -> None:
    """Trains; rank 0 writes what it found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--engine", choices=("plain", "hytrain"), required=True)
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    compatible_ops["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    import transformers.trainer  # noqa: F401  as scripts do, before register()

    is_ours = options.engine == "hytrain"
    with hytrain.register() if is_ours else contextlib.nullcontext():
        found = KINDS[options.kind](options)
    if os.environ.get("RANK", "0") == "0":
        found["versions"] = _versions()
        (options.folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
