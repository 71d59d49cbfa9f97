"""A loop of your own: deepspeed examples/plain_loop.py --model Qwen/Qwen3-1.7B --text my.txt"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hytrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
parser.add_argument("--text", default="README.md", help="a file to train on")
parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
options = parser.parse_args()

config = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "gradient_clipping": 1.0,
    "hytrain": {"metrics": "out/metrics.jsonl"},
}
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")
ids = tokenizer(Path(options.text).read_text(), return_tensors="pt").input_ids[0]
samples = ids[: len(ids) // options.length * options.length].view(-1, options.length)

engine, *_ = hytrain.initialize(model=model, model_parameters=model.parameters(), config=config)
engine.train()  # from_pretrained leaves eval mode: no activation checkpointing, no dropout
torch.manual_seed(engine.global_rank)  # each rank draws samples of its own
for step in range(1, options.steps + 1):
    batch = samples[torch.randint(len(samples), (2,))].to(engine.device)
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    if step % 5 == 0 and engine.global_rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
engine.save_checkpoint("out/plain_loop")
engine.destroy()
