"""Hugging Face Trainer: deepspeed examples/trainer.py --model Qwen/Qwen3-1.7B --text my.txt"""

import argparse
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

import hytrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
parser.add_argument("--text", default="README.md", help="a file to train on")
parser.add_argument("--config", default=str(Path(__file__).with_name("ds_config.json")))
parser.add_argument("--batch", type=int, default=2, help="samples at once on each GPU")
parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step")
parser.add_argument("--length", type=int, default=512, help="tokens of a sample")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--save", help="a folder for the trained weights")
parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
options = parser.parse_args()

# Trainer's arguments come first: they tell transformers about DeepSpeed before the model is made.
arguments = TrainingArguments(
    "out/trainer",
    deepspeed=options.config,
    max_steps=options.steps,
    per_device_train_batch_size=options.batch,
    gradient_accumulation_steps=options.accumulation,
    gradient_checkpointing=True,  # 5.24 prints a deprecation warning here; ignore it
    learning_rate=1e-5,
    max_grad_norm=1.0,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=5,
    save_strategy="no",
    report_to="none",
)
tokenizer = AutoTokenizer.from_pretrained(options.model)
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")
ids = tokenizer(Path(options.text).read_text(), return_tensors="pt").input_ids[0]
samples = ids[: len(ids) // options.length * options.length].view(-1, options.length)
data = [{"input_ids": sample, "labels": sample} for sample in samples]

with hytrain.register():
    trainer = Trainer(model, arguments, default_data_collator, data, processing_class=tokenizer)
    trainer.train()
    if options.save:
        trainer.save_model(options.save)  # in the model's dtype, bf16
