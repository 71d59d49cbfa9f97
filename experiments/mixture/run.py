"""A mixture of 30 B parameters: forward and backward alone, then steps, in the same processes.

python experiments/mixture/run.py --out DIR --clip 1 --accumulation 8
python experiments/mixture/run.py --out DIR --blocks 31 --streamed --gpu-gib 24 --host-gib 128
torchrun --nproc-per-node 2 experiments/mixture/run.py --out DIR --seq 4096   # ZeRO-3
python experiments/mixture/run.py --out DIR --clip 0 --trainer --save MODEL   # in HF Trainer
python experiments/mixture/run.py --out DIR --load MODEL              # what it has saved, alone
python experiments/mixture/run.py --out DIR --toy                     # on a CPU
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch

TOY = {"num_hidden_layers": 2, "hidden_size": 64, "num_experts": 4, "vocab_size": 256}


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--toy", action="store_true", help="a small model on a CPU")
    add("--clip", type=float, default=1.0, help="0: no clipping and no overflow check")
    add("--accumulation", type=int, default=1, help="micro-batches a step, layer-major if several")
    add("--master-weights", default="split", choices=("fp32", "split"))
    add("--moments", default="8bit")
    add("--gpu-fraction", default="solve")
    add("--blocks", type=int, default=48, help="0.62 B parameters each, beside 0.62 B")
    add(
        "--streamed", action="store_true", help="weights in host memory, which is all that is timed"
    )
    add("--gpu-gib", type=float, help="limit of the GPU")
    add("--host-gib", type=float, help="limit of what the process allocates")
    add("--batch", type=int, default=2)
    add("--seq", type=int, default=2048)
    add("--steps", type=int, default=40)
    add("--seconds", type=float, default=400.0, help="no step begins after so many")
    add("--trainer", action="store_true", help="steps of HF Trainer, a micro-batch each")
    add("--save", type=Path, help="with --trainer: a folder for the trained model")
    add("--load", type=Path, help="loads a saved model onto the device, prints its loss, and stops")
    return parser.parse_args()


def build(options: argparse.Namespace, device: torch.device) -> Any:
    """Random weights of Qwen3-30B-A3B's shape, bf16, made on the device."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    # The class's other defaults are that model's.
    shape: dict[str, Any] = {
        "num_hidden_layers": options.blocks,
        "hidden_size": 2048,
        "num_experts": 128,
    }
    shape |= {"vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4}
    shape |= {"moe_intermediate_size": 768, "num_experts_per_tok": 8 if not options.toy else 2}
    shape |= {"head_dim": 128, "norm_topk_prob": True, "tie_word_embeddings": False}
    config = Qwen3MoeConfig(**shape | (TOY if options.toy else {}), use_cache=False)
    torch.manual_seed(0)
    with torch.device("meta" if options.streamed else device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        )
    if options.streamed:
        fill_on_host(model, device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def fill_on_host(model: Any, device: torch.device) -> None:
    """Fills weights in host memory with random numbers, made on the device, which is faster."""
    model.to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            values = torch.ones_like(parameter, device=device)
            parameter.copy_(values if "norm" in name else values.normal_(std=0.02))
    # Buffers are not parameters, and have no values on the meta device.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A data set that repeats the rows of one batch."""

    def __init__(self, ids: torch.Tensor) -> None:
        self._ids = ids.cpu()

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = self._ids[index % len(self._ids)]
        return {"input_ids": ids, "labels": ids}


def train(
    options: argparse.Namespace, model: Any, ids: torch.Tensor, config: dict[str, Any], end: float
) -> tuple[Any, list[float], float]:
    """Trains in HF Trainer until `end`; returns the engine, seconds of steps, and peak host GiB.

    The last is the most that the process had from its start until the engine was built.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    import hytrain

    ends: list[float] = []
    built: list[float] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            built.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if ids.is_cuda:
                torch.cuda.synchronize()
            ends.append(time.perf_counter())
            control.should_training_stop |= ends[-1] > end

    arguments = TrainingArguments(
        output_dir=str(options.out),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=1e-6,
        bf16=True,
        max_grad_norm=options.clip,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=options.toy,
        deepspeed=config,
    )
    with hytrain.register():
        trainer = Trainer(model, arguments, train_dataset=Tokens(ids), callbacks=[Watch()])
        trainer.train()
        if options.save:
            begin = time.perf_counter()
            trainer.save_model(str(options.save))
            print(f"saved in {time.perf_counter() - begin:.1f} s", flush=True)
            with torch.no_grad():
                print("loss of the trained model", float(model(input_ids=ids, labels=ids).loss))
    steps = [b - a for a, b in itertools.pairwise(ends)]
    return trainer.model_wrapped, steps, built[0]


def load(options: argparse.Namespace, device: torch.device) -> None:
    """Prints the loss of a saved model, which is read onto the device file by file."""
    from transformers import AutoModelForCausalLM

    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(
        options.load,
        dtype=torch.bfloat16,
        device_map=device,
        experts_implementation="grouped_mm",
    )
    seconds = time.perf_counter() - begin
    with torch.no_grad():
        ids = random_tokens(options, model.config.vocab_size, device)
        loss = float(model(input_ids=ids, labels=ids).loss)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"loaded in {seconds:.1f} s, at most {peak:.1f} GiB of host memory; loss {loss}")


def random_tokens(options: argparse.Namespace, vocab: int, device: torch.device) -> torch.Tensor:
    """The batch of a rank, the same in every run."""
    generator = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
    return torch.randint(vocab, (options.batch, options.seq), generator=generator).to(device)


def timed(run: Any, device: torch.device) -> float:
    """Seconds of a call, until the device has finished."""
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def limit_memory(options: argparse.Namespace, device: torch.device) -> None:
    """Limits this process's memory, by CUDA's allocator and by the kernel."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if options.gpu_gib is not None:
        share = options.gpu_gib * 2**30 / torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(share)
    if options.host_gib is not None:
        most = int(options.host_gib * 2**30)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def zero(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """The zero_optimization section: weights are sharded if there are several ranks."""
    section: dict[str, Any] = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    if ranks > 1 or options.streamed:
        section["stage"] = 3
    return section | ({"offload_param": {"device": "cpu"}} if options.streamed else {})


def main() -> None:
    """Runs the experiment; rank 0 writes result.json."""
    options = parse()
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    # The solver fills the GPU: its memory must not be lost to gaps between blocks.
    allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    os.environ |= {**one_rank, "MASTER_PORT": "0", **allocator, **os.environ}
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import hytrain

    end = time.perf_counter() + options.seconds
    local = int(os.environ["LOCAL_RANK"])
    device = torch.device("cpu") if options.toy else torch.device("cuda", local)
    limit_memory(options, device)
    if options.load:
        load(options, device)
        return
    model = build(options, device)
    parameters = sum(p.numel() for p in model.parameters())
    ids = random_tokens(options, model.config.vocab_size, device)
    batch = {"input_ids": ids, "labels": ids}

    def alone() -> None:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    passes = [] if options.streamed else [timed(alone, device) for _ in range(5)][1:]
    section = {"master": options.master_weights, "moments": options.moments}
    section["gpu_fraction"] = json.loads(options.gpu_fraction.replace("solve", '"solve"'))
    if options.accumulation > 1:
        section["accumulation"] = "layer_major"
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": options.clip,
        "bf16": {"enabled": True, "check_grad_overflow": options.clip > 0},
        "zero_optimization": zero(options, ranks),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "hytrain": section,
    }
    steps: list[float] = []
    built: float | None = None
    if options.trainer:
        engine, steps, built = train(options, model, ids, config, end)
    else:
        engine, *_ = hytrain.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        # Several ranks make a fixed number of steps: no rank may end by itself.
        while len(steps) < options.steps and (ranks > 1 or time.perf_counter() < end):
            steps.append(
                timed(lambda: engine.train_batch(iter([batch] * options.accumulation)), device)
            )
    decision = engine.optimizer.placement.decisions[-1]
    result = {
        "ranks": ranks,
        "options": {key: str(value) for key, value in vars(options).items()},
        "parameters": parameters,
        "alone_s": statistics.median(passes) * options.accumulation if passes else None,
        "step_s": statistics.median(steps[-8:]),
        "steps_s": steps,
        "gpu_layers": f"{decision.gpu_layers_target} of {len(decision.layer_bytes)}",
        "clip_coefficient": engine.step_statistics().clip_coefficient,
        "host_peak_until_built_gib": built,
        "host_gib": psutil.Process().memory_info().rss / 2**30,
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if not options.toy else None,
    }
    engine.destroy()
    if rank:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "steps_s"}, indent=1))


if __name__ == "__main__":
    main()
