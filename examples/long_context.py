"""Ranks that share each sequence: deepspeed --num_gpus 4 examples/long_context.py --text my.txt"""

import argparse
from pathlib import Path

import deepspeed
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import (
    UlyssesSPAttentionHF,
    UlyssesSPDataLoaderAdapter,
)
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer

import hytrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
parser.add_argument("--text", default="README.md", help="a file to train on")
parser.add_argument("--length", type=int, default=4096, help="tokens of a sample")
parser.add_argument("--attention", default="sdpa", help="or flash_attention_2")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
options = parser.parse_args()

on_gpu = torch.cuda.is_available()
deepspeed.init_distributed("nccl" if on_gpu else "gloo")
ranks, rank = deepspeed.comm.get_world_size(), deepspeed.comm.get_rank()
config = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": ranks,  # one sample loaded by each rank
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    "gradient_clipping": 1.0,
    "hytrain": {"metrics": "out/metrics.jsonl"},
}
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(
    options.model, dtype="bfloat16", attn_implementation=options.attention
)
model.gradient_checkpointing_enable()
mpu = UlyssesSPAttentionHF.register_with_transformers(
    model, options.attention, sequence_parallel_size=ranks, micro_batch_size=1
)
ids = tokenizer(Path(options.text).read_text(), return_tensors="pt").input_ids[0]
places = torch.arange(options.length)
samples = [
    {"input_ids": part, "labels": part, "position_ids": places}
    for part in ids[: len(ids) // options.length * options.length].view(-1, options.length)
]

engine, *_ = hytrain.initialize(
    model=model, model_parameters=model.parameters(), config=config, mpu=mpu
)
engine.train()  # from_pretrained leaves eval mode: no activation checkpointing, no dropout
loader = UlyssesSPDataLoaderAdapter(
    DataLoader(samples[rank::ranks], batch_size=1),
    sp_rank=mpu.get_sequence_parallel_rank(),
    sp_group=mpu.get_sequence_parallel_group(),
    sp_world_size=ranks,
    device=engine.device,
)


def parts():
    """Yields this rank's part of each sample, on the device, without end."""
    while True:
        for part in loader:
            yield {name: tensor.to(engine.device) for name, tensor in part.items()}


batches = parts()
for step in range(1, options.steps + 1):
    # The inputs of blocks are kept in host memory until backward.
    with torch.autograd.graph.save_on_cpu(pin_memory=on_gpu):
        loss = engine.train_batch(batches)
    if step % 5 == 0 and rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")
engine.destroy()
