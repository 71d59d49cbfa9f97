"""A mixture of 30 B parameters on one GPU: forward and backward alone, then steps, in one process.

python experiments/mixture/run.py --out DIR --clip 1 --accumulation 8
python experiments/mixture/run.py --out DIR --toy                     # on a CPU
"""

from __future__ import annotations

import argparse
import json
import os
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
    add("--master", default="split", choices=("fp32", "split"))
    add("--moments", default="8bit")
    add("--gpu-fraction", default="solve")
    add("--batch", type=int, default=2)
    add("--seq", type=int, default=2048)
    add("--steps", type=int, default=40)
    add("--seconds", type=float, default=400.0, help="no step begins after so many")
    return parser.parse_args()


def build(options: argparse.Namespace, device: torch.device) -> Any:
    """Random weights of Qwen3-30B-A3B's shape, bf16, made on the device."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    # The class's other defaults are that model's.
    shape: dict[str, Any] = {"num_hidden_layers": 48, "hidden_size": 2048, "num_experts": 128}
    shape |= {"vocab_size": 151936, "num_attention_heads": 32, "num_key_value_heads": 4}
    shape |= {"moe_intermediate_size": 768, "num_experts_per_tok": 8 if not options.toy else 2}
    shape |= {"head_dim": 128, "norm_topk_prob": True, "tie_word_embeddings": False}
    config = Qwen3MoeConfig(**shape | (TOY if options.toy else {}), use_cache=False)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, experts_implementation="grouped_mm"
        )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def timed(run: Any, device: torch.device) -> float:
    """Seconds of it on the device."""
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Runs it and writes result.json."""
    options = parse()
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {**one_rank, "MASTER_PORT": os.environ.get("MASTER_PORT", "29500")}
    import hytrain

    end = time.perf_counter() + options.seconds
    device = torch.device("cpu" if options.toy else "cuda")
    model = build(options, device)
    ids = torch.randint(0, model.config.vocab_size, (options.batch, options.seq), device=device)
    batch = {"input_ids": ids, "labels": ids}

    def alone() -> None:
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    passes = [timed(alone, device) for _ in range(5)][1:]
    section = {"master": options.master, "moments": options.moments}
    section["gpu_fraction"] = json.loads(options.gpu_fraction.replace("solve", '"solve"'))
    if options.accumulation > 1:
        section["accumulation"] = "layer_major"
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": options.clip,
        "bf16": {"enabled": True, "check_grad_overflow": options.clip > 0},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
        "hytrain": section,
    }
    engine, *_ = hytrain.initialize(model=model, model_parameters=model.parameters(), config=config)
    steps: list[float] = []
    while len(steps) < options.steps and time.perf_counter() < end:
        steps.append(
            timed(lambda: engine.train_batch(iter([batch] * options.accumulation)), device)
        )
    decision = engine.optimizer.placement.decisions[-1]
    result = {
        "options": {key: str(value) for key, value in vars(options).items()},
        "parameters": sum(p.numel() for p in model.parameters()),
        "alone_s": statistics.median(passes) * options.accumulation,
        "step_s": statistics.median(steps[-8:]),
        "steps_s": steps,
        "gpu_layers": f"{decision.gpu_layers_target} of {len(decision.layer_bytes)}",
        "clip_coefficient": engine.step_statistics().clip_coefficient,
        "host_gib": psutil.Process().memory_info().rss / 2**30,
        "gpu_peak_gib": torch.cuda.max_memory_allocated() / 2**30 if not options.toy else None,
    }
    engine.destroy()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "steps_s"}, indent=1))


if __name__ == "__main__":
    main()
