"""What users set on Trainer, peft and TRL beside the usual: a short training of a small model each.

Every training is one case of the kind "options" of train.py; all are made in one process, one
after the other.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import samples
import torch

Arguments = dict[str, Any]
"""Of TrainingArguments."""
_LORA: dict[str, Any] = {"r": 4, "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
_TRAINER: dict[str, Arguments] = {
    "neftune": {"neftune_noise_alpha": 5.0},
    "evaluations": {"eval_on_start": True, "eval_strategy": "steps", "eval_steps": 2},
    "smoothing": {"label_smoothing_factor": 0.1},
    "no clipping": {"max_grad_norm": 0.0},
    "small clipping": {"max_grad_norm": 0.05},
    "accumulation": {"gradient_accumulation_steps": 3},
    "last accumulation is short": {
        "max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 5,
    },
    "reentrant": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
    "not reentrant": {
        "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "plateau": {
        "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 2,
    },
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "fused": {"optim": "adamw_torch_fused"},
    "decay": {"weight_decay": 0.1},
    "empty cache": {"torch_empty_cache_steps": 1},
    "compiled": {"torch_compile": True, "torch_compile_backend": "eager"},
}  # fmt: skip


def _data(number: int = 32) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 64, (number, 12), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in tokens]


def _trainer(arguments: Arguments, model: Any = None, callbacks: Any = None) -> Any:
    from transformers import Trainer, TrainingArguments, default_data_collator

    return Trainer(
        model or samples.llama(), TrainingArguments(**arguments), train_dataset=_data(),
        eval_dataset=_data(8), data_collator=default_data_collator, callbacks=callbacks,
    )  # fmt: skip


def _callbacks() -> dict[str, Any]:
    """What a callback may do after a step."""
    from transformers import TrainerCallback

    class Evaluates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            named["model"].eval()
            with torch.no_grad():
                tokens = torch.full((1, 5), 7, device=args.device)
                named["model"](input_ids=tokens)
            named["model"].train()

    class Decays(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            for group in named["optimizer"].param_groups:
                group["weight_decay"] = 0.1 * state.global_step

    class Freezes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 3:
                named["model"].get_input_embeddings().requires_grad_(False)

    return {"evaluates": Evaluates(), "changes decay": Decays(), "freezes": Freezes()}


def _peft_configs() -> dict[str, Any]:
    import peft

    attention: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"]}
    causal: dict[str, Any] = {"task_type": "CAUSAL_LM"}
    whole: dict[str, Any] = {"modules_to_save": ["lm_head", "embed_tokens"]}
    scaled: dict[str, Any] = {"target_modules": "all-linear", "use_rslora": True}
    fed: dict[str, Any] = {"feedforward_modules": ["down_proj"]}
    return {
        "lora": peft.LoraConfig(**_LORA, **attention),
        "lora dropout": peft.LoraConfig(**(_LORA | {"lora_dropout": 0.3}), **attention),
        "lora and whole modules": peft.LoraConfig(**_LORA, **attention, **whole),
        "rslora": peft.LoraConfig(**_LORA, **scaled, bias="lora_only"),
        "dora": peft.LoraConfig(**_LORA, **attention, use_dora=True),
        "ia3": peft.IA3Config(**causal, **fed, target_modules=["k_proj", "down_proj"]),
        "prompt": peft.PromptTuningConfig(**causal, num_virtual_tokens=4),
        "vera": peft.VeraConfig(**causal, target_modules=["q_proj"], r=8),
    }


def _adapted(config: Any) -> Any:
    from peft import get_peft_model

    model = samples.llama()
    torch.manual_seed(0)  # of the adapter's weights
    return get_peft_model(model, config)


def _stored(folder: str) -> Any:
    """A model that TRL finds again, to have a reference."""
    from transformers import AutoModelForCausalLM

    if os.environ["RANK"] == "0":
        samples.llama().save_pretrained(folder)
        samples.tokenizer().save_pretrained(folder)
    torch.distributed.barrier()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _trl(common: Arguments, folder: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    import trl
    from datasets import Dataset

    common = common | {"max_steps": 4, "bf16": False}
    tokens = samples.tokenizer()

    def texts(**columns: tuple[int, int]) -> Any:
        return Dataset.from_dict(
            {k: samples.texts(32, n, seed) for k, (n, seed) in columns.items()}
        )

    def reward(completions: list[str], **_named: Any) -> list[float]:
        return [float(sum(text.count(digit) for digit in "135")) for text in completions]

    def sft(**more: Any) -> Any:
        data = texts(prompt=(4, 0), completion=(6, 1)) if "completion_only_loss" in more else None
        return trl.SFTTrainer(
            samples.llama(), trl.SFTConfig(**common, max_length=32, **more),
            train_dataset=data or texts(text=(12, 0)), processing_class=tokens,
        )  # fmt: skip

    def dpo(**more: Any) -> Any:
        pairs = texts(prompt=(4, 0), chosen=(6, 1), rejected=(6, 2))
        return trl.DPOTrainer(
            samples.llama(), samples.llama(), trl.DPOConfig(**common, max_length=32, **more),
            train_dataset=pairs, processing_class=tokens,
        )  # fmt: skip

    def online(trainer: Any, config: Any, **more: Any) -> Any:
        own = {"learning_rate": 1e-3, "num_generations": 2, "max_completion_length": 6}
        return trainer(
            _stored(folder), reward, config(**(common | own | more)),
            train_dataset=texts(prompt=(4, 0)), processing_class=tokens,
        )  # fmt: skip

    def kto() -> Any:
        data = texts(prompt=(4, 0), completion=(6, 1))
        data = data.add_column("label", [number % 2 == 0 for number in range(32)])
        return trl.KTOTrainer(
            samples.llama(), samples.llama(), args=trl.KTOConfig(**common, max_length=32),
            train_dataset=data, processing_class=tokens,
        )  # fmt: skip

    moved = {"sync_ref_model": True, "ref_model_sync_steps": 2}
    yield "sft packing", lambda: sft(packing=True)
    yield "sft completion", lambda: sft(completion_only_loss=True)
    if os.environ["WORLD_SIZE"] == "1":  # else TRL needs a data set in a file
        yield "dpo precomputed", lambda: dpo(precompute_ref_log_probs=True)
    yield "dpo moved reference", lambda: dpo(**moved)
    yield "kto", kto
    yield "rloo", lambda: online(trl.RLOOTrainer, trl.RLOOConfig)
    yield "grpo iterations", lambda: online(trl.GRPOTrainer, trl.GRPOConfig, num_iterations=2)
    grpo = (trl.GRPOTrainer, trl.GRPOConfig)
    yield "grpo moved reference", lambda: online(*grpo, beta=0.04, **moved)


def _cases(common: Arguments, folder: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    for name, arguments in _TRAINER.items():
        yield name, lambda arguments=arguments: _trainer(common | arguments)
    for name, callback in _callbacks().items():
        yield name, lambda callback=callback: _trainer(common, callbacks=[callback])
    for name, config in _peft_configs().items():
        yield name, lambda config=config: _trainer(common, _adapted(config))
    yield from _trl(common, folder)


def _weights(trainer: Any) -> dict[str, torch.Tensor]:
    named = dict(trainer.model.named_parameters())
    is_sharded = any(hasattr(parameter, "ds_id") for parameter in named.values())
    with deepspeed.zero.GatheredParameters(list(named.values()), enabled=is_sharded):
        return {name: p.detach().float().cpu().clone() for name, p in named.items()}


def _sum_of_files(folder: str) -> float:
    """Of what Trainer has saved; rank 0 has written it by now, what others see does not matter."""
    from safetensors.torch import load_file

    files = sorted(Path(folder).glob("*.safetensors")) if os.environ["RANK"] == "0" else []
    return sum(float(t.double().abs().sum()) for file in files for t in load_file(file).values())


def train_each(
    common: Arguments, folder: str, check: Callable[[Any], None]
) -> dict[str, dict[str, Any]]:
    """Makes every training; returns its losses, norms and weights. ``check`` sees its engine."""
    found: dict[str, dict[str, Any]] = {}
    for name, make in _cases(common, folder):
        torch.manual_seed(0)
        trainer = make()
        trainer.train()
        check(trainer.model_wrapped)
        history = trainer.state.log_history
        keys = ("loss", "eval_loss", "grad_norm")
        numbers = {key: [entry[key] for entry in history if key in entry] for key in keys}
        saved = 0.0
        if name != "prompt":  # peft computes what it saves: in ZeRO-3 rank 0 alone would gather
            trainer.save_model(f"{folder}-{len(found)}")
            saved = _sum_of_files(f"{folder}-{len(found)}")
        found[name] = {**numbers, "saved": saved, "weights": _weights(trainer)}
        del trainer
        gc.collect()
    return found
