"""TRL's SFT, or DPO with --dpo: deepspeed examples/sft.py --data chats.jsonl

A line of the file: {"messages": [{"role": "user", "content": "..."}, ...]}, or, with --dpo,
{"prompt": [...], "chosen": [...], "rejected": [...]}, each a list of such messages.
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import hytrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-1.7B")
parser.add_argument("--data", required=True, help="a file of JSON lines")
parser.add_argument("--dpo", action="store_true", help="pairs of answers instead of chats")
parser.add_argument("--config", default=str(Path(__file__).with_name("ds_config.json")))
parser.add_argument("--batch", type=int, default=2, help="samples at once on each GPU")
parser.add_argument("--length", type=int, default=1024, help="tokens of a sample, at most")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--save", help="a folder for the trained weights")
parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
options = parser.parse_args()

config, kind = (DPOConfig, DPOTrainer) if options.dpo else (SFTConfig, SFTTrainer)
# These arguments come first: they tell transformers about DeepSpeed before the model is made.
arguments = config(
    "out/sft",
    deepspeed=options.config,
    max_steps=options.steps,
    max_length=options.length,
    per_device_train_batch_size=options.batch,
    gradient_checkpointing=True,
    learning_rate=1e-6 if options.dpo else 1e-5,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=5,
    save_strategy="no",
    report_to="none",
)
tokenizer = AutoTokenizer.from_pretrained(options.model)
data = load_dataset("json", data_files=options.data, split="train")
# In bf16: TRL may load a model given by name in fp32. DPO's reference is a second model.
models = [AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")]
if options.dpo:
    models.append(AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16"))

with hytrain.register():
    trainer = kind(*models, args=arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    if options.save:
        trainer.save_model(options.save)
