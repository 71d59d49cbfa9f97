"""One process: Trainer on a Llama of random weights and tokens, a system after the other."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate.state import AcceleratorState
from transformers import Trainer, TrainerCallback, TrainingArguments

from experiments.common.item_processes import print_result
from experiments.common.records import Json
from experiments.hf_trainer.systems import SYSTEMS, Workload
from experiments.solve_k.regime_cells import llama


class _Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Each item one sequence, the same in every run."""

    def __init__(self, workload: Workload, vocabulary: int) -> None:
        self._length = workload.tokens
        self._vocabulary = vocabulary

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, self._vocabulary, (self._length,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


class _Times(TrainerCallback):
    """When each step has ended, on the device too."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.ends: list[float] = []

    def on_step_end(self, *_arguments: Any, **_named: Any) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())


def train(workload: Workload, system: str, device: str, folder: str) -> Json:
    """Trains as the system says, and takes the steps after its warm-up."""
    config, warmup, steps = SYSTEMS[system]
    # Without DeepSpeed bf16=True is autocast over fp32 weights; with it DeepSpeed makes them bf16.
    model = llama(workload.model, device, torch.float32)
    times = _Times(device)
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=folder,
            max_steps=warmup + steps,
            per_device_train_batch_size=workload.batch,
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
            deepspeed=config,
        ),
        train_dataset=_Tokens(workload, model.config.vocab_size),
        callbacks=[times],
    )
    trainer.train()
    wrapped: Any = trainer.model_wrapped
    taken = [b - a for a, b in zip(times.ends[warmup - 1 :], times.ends[warmup:], strict=False)]
    result = {
        "seconds": statistics.median(taken),
        "fastest": min(taken),
        "steps": len(taken),
        "loss": trainer.state.log_history[-1]["train_loss"],
        "gpu_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "engine": type(wrapped).__name__,
        "gpu_layers": _gpu_layers(wrapped),
    }
    if config is not None:
        wrapped.destroy()
    return result


def _gpu_layers(engine: Any) -> str | None:
    if type(engine).__name__ != "HyTrainEngine":
        return None
    placement = engine.optimizer.placement
    return f"{placement.controller.num_gpu_layers} of {placement.decisions[0].num_layers}"


@contextlib.contextmanager
def _launched_for(system: str, environment: Json) -> Generator[None]:
    """What a process finds when it begins: accelerate's state, the launcher's variables."""
    # There is no public way: one process trains with one configuration otherwise.
    AcceleratorState._reset_state(reset_partial_state=True)  # pyright: ignore[reportPrivateUsage]
    for key, value in environment.items():
        if system == "trainer_alone":
            os.environ.pop(key, None)  # else Trainer would wrap the model for several ranks
        else:
            os.environ[key] = value
    with contextlib.ExitStack() as stack:
        if system == "hytrain":
            import hytrain

            stack.enter_context(hytrain.register())
        yield


def main() -> None:
    """A process of run.py."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", type=Workload.of, required=True)
    parser.add_argument("--systems", nargs="+", choices=list(SYSTEMS), required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    arguments = parser.parse_args()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: os.environ[name] for name in names}
    for system in arguments.systems:
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, _launched_for(system, environment):
            result = train(arguments.workload, system, arguments.device, folder)
        result["took"] = time.perf_counter() - begin
        print_result(system, result)
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
