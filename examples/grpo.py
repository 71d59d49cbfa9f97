"""TRL's GRPO, which generates with a copy of the weights: no rank gathers the model for it.

deepspeed examples/grpo.py --model Qwen/Qwen3-0.6B --text my.txt
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

import hytrain

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--text", default="README.md", help="a file whose lines begin prompts")
parser.add_argument("--length", type=int, default=64, help="tokens of a completion")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--local_rank", type=int, help="given by the deepspeed launcher")
options = parser.parse_args()

# Stands in for an inference engine, which may be another process (handover.py) or vLLM. It is
# loaded first: once arguments with ZeRO-3 exist, transformers shards the models that it loads.
generator = AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16").eval()

arguments = GRPOConfig(
    "out/grpo",
    deepspeed=str(Path(__file__).with_name("ds_config.json")),
    max_steps=options.steps,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=options.length,
    learning_rate=1e-6,
    max_grad_norm=1.0,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    logging_steps=5,
    save_strategy="no",
    report_to="none",
)
tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or tokenizer.unk_token
model = AutoModelForCausalLM.from_pretrained(options.model, dtype="bfloat16")


def generate(prompts, trainer):
    """Returns one completion for each prompt; GRPO has already repeated the prompts."""
    own = generator.to(trainer.accelerator.device).state_dict()
    with torch.no_grad():
        for name, tensor in trainer.model_wrapped.iterate_weights():
            own[name].copy_(tensor)
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        inputs = inputs.to(generator.device)
        most, pad = options.length, tokenizer.pad_token_id
        whole = generator.generate(**inputs, max_new_tokens=most, do_sample=True, pad_token_id=pad)
    begin = inputs.input_ids.shape[1]
    asked = [ids[at:] for ids, at in zip(inputs.input_ids.tolist(), starts(inputs), strict=True)]
    return {
        "prompt_ids": asked,
        "completion_ids": [until_end(ids) for ids in whole[:, begin:].tolist()],
        "logprobs": None,
    }


def starts(inputs):
    """Returns where each prompt begins, after its padding."""
    return (inputs.attention_mask == 0).sum(dim=1).tolist()


def until_end(ids):
    """Returns the ids up to and including the end token."""
    end = tokenizer.eos_token_id
    return ids[: ids.index(end) + 1] if end in ids else ids


def reward(completions, **_named):
    """Returns the share of distinct words in each completion."""
    return [len(set(text.split())) / max(len(text.split()), 1) for text in completions]


lines = [line for line in Path(options.text).read_text().splitlines() if line.strip()]
prompts = [" ".join(line.split()[:8]) for line in lines]
trainer = GRPOTrainer(
    model,
    reward,
    arguments,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    processing_class=tokenizer,
    rollout_func=generate,
)
with hytrain.register():
    trainer.train()
