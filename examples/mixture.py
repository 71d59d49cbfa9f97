"""A mixture of experts: deepspeed examples/mixture.py --model Qwen/Qwen3-30B-A3B --text my.txt

30 B parameters on one H200 with 128 GiB of host memory, with clipping: moments in 8 bits, master
weights in 2 bytes beside their bf16 copy, activations recomputed in backward. An update covers all
parameters, however few a token uses, so a step has many tokens: 8 micro-batches, layer by layer.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hytrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
parser.add_argument("--text", default="README.md", help="a file to train on")
parser.add_argument("--length", type=int, default=2048, help="tokens of a sample")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
options = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 8,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-6}},
    "hytrain": {
        "moments": "8bit",
        "master": "split",
        "accumulation": "layer_major",
        "metrics": "out/metrics.jsonl",
    },
}
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")
model.gradient_checkpointing_enable({"use_reentrant": False})
ids = tokenizer(Path(options.text).read_text(), return_tensors="pt").input_ids[0]
samples = ids[: len(ids) // options.length * options.length].view(-1, options.length)

engine, *_ = hytrain.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.train()  # from_pretrained leaves eval mode: no activation checkpointing, no dropout
torch.manual_seed(engine.global_rank)  # each rank draws samples of its own


def micro_batches() -> Iterator[dict[str, torch.Tensor]]:
    while True:
        batch = samples[torch.randint(len(samples), (2,))].to(engine.device)
        yield {"input_ids": batch, "labels": batch}


batches = micro_batches()
for step in range(1, options.steps + 1):
    loss = engine.train_batch(batches)
    if step % 5 == 0 and engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
engine.destroy()
