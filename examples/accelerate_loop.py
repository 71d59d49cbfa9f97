"""A loop with accelerate: deepspeed examples/accelerate_loop.py --text my.txt"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from transformers import AutoModelForCausalLM, AutoTokenizer

import hytrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
parser.add_argument("--text", default="README.md", help="a file to train on")
parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
options = parser.parse_args()

plugin = DeepSpeedPlugin(
    hf_ds_config=str(Path(__file__).with_name("ds_config.json")), gradient_clipping=1.0
)
accelerator = Accelerator(mixed_precision="bf16", deepspeed_plugin=plugin)
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
ids = tokenizer(Path(options.text).read_text(), return_tensors="pt").input_ids[0]
samples = ids[: len(ids) // options.length * options.length].view(-1, options.length)
loader = torch.utils.data.DataLoader(samples, batch_size=2, shuffle=True, drop_last=True)

with hytrain.register():
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
model.train()  # from_pretrained leaves eval mode: no activation checkpointing, no dropout
step = 0
while step < options.steps:
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)  # the engine also takes its step here
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 5 == 0:
            accelerator.print(f"step {step}: loss {loss.item():.4f}")
        if step == options.steps:
            break
accelerator.end_training()
