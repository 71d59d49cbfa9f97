"""LoRA by peft, in Trainer: deepspeed examples/lora.py --model Qwen/Qwen3-8B --text my.txt"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

import hytrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-8B")
parser.add_argument("--text", default="README.md", help="a file to train on")
parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
options = parser.parse_args()

arguments = TrainingArguments(
    "out/lora",
    deepspeed=str(Path(__file__).with_name("ds_config.json")),
    max_steps=options.steps,
    per_device_train_batch_size=2,
    learning_rate=1e-4,
    max_grad_norm=1.0,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=5,
    save_strategy="no",
    report_to="none",
)
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")
model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
ids = tokenizer(Path(options.text).read_text(), return_tensors="pt").input_ids[0]
samples = ids[: len(ids) // options.length * options.length].view(-1, options.length)
data = [{"input_ids": sample, "labels": sample} for sample in samples]

# Frozen weights have no state; the adapters' is small, and is updated where it costs least.
with hytrain.register():
    Trainer(model, arguments, train_dataset=data).train()
model.save_pretrained("out/lora/adapter")
