"""One process: Trainer on a Llama of random weights and tokens, with one of the systems."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from experiments.common.model import build_model
from experiments.common.records import Json
from experiments.common.sizes import size_of
from experiments.common.timing import synchronize
from experiments.common.worker import Recorder


class _Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A data set of random sequences, the same in every run."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self._length = length
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self._vocabulary, (self._length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class _Times(TrainerCallback):
    """Records when each step has ended, on the device too."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.ends: list[float] = []

    def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
        synchronize(self._device)
        self.ends.append(time.perf_counter())


def run(job: Json, recorder: Recorder) -> None:
    """Trains with the job's system, and measures the steps after its warm-up."""
    if job["system"] == "trainer_alone":
        # Else Trainer would wrap the model for several ranks.
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
    with contextlib.ExitStack() as stack:
        if job["system"] == "hytrain":
            import hytrain

            stack.enter_context(hytrain.register())
        recorder.put(**_train(job))


def _train(job: Json) -> Json:
    device, warmup = job["device"], job["warmup"]
    # Without DeepSpeed bf16=True is autocast over fp32 weights; with it DeepSpeed makes them bf16.
    model = build_model(job, torch.float32)
    times = _Times(device)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=job["folder"],
            max_steps=warmup + job["steps"],
            per_device_train_batch_size=job["batch"],
            learning_rate=1e-5,
            bf16=True,
            max_grad_norm=1.0,
            optim="adamw_torch_fused" if device == "cuda" else "adamw_torch",
            lr_scheduler_type="constant",
            logging_steps=10**9,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_drop_last=True,
            use_cpu=device == "cpu",
            deepspeed=job["config"],
        ),
        train_dataset=_Tokens(job["seq"], size_of(job["model"]).vocab),
        callbacks=[times],
    )
    trainer.train()
    wrapped: Any = trainer.model_wrapped
    taken = [b - a for a, b in zip(times.ends[warmup - 1 :], times.ends[warmup:], strict=False)]
    layers = None
    if job["system"] == "hytrain":
        decision = wrapped.placement_decisions()[-1]
        layers = f"{decision.gpu_layers_target} of {decision.num_layers}"
    found = {
        "seconds": statistics.median(taken),
        "fastest": min(taken),
        "loss": trainer.state.log_history[-1]["train_loss"],
        "gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "engine": type(wrapped).__name__,
        "gpu_layers": layers,
    }
    if job["config"] is not None:
        wrapped.destroy()
    return found
