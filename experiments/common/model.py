"""The model and the data that every system trains, made the same way for each of them.

A job says which: "model" (a name of sizes.py) with "layers" blocks (its own unless given), "batch"
sequences of "seq" tokens, "device", and "checkpointing" of activations (off unless given).
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3Config

from experiments.common.records import Json
from experiments.common.sizes import size_of

Batch = dict[str, torch.Tensor]

NUM_BATCHES = 4
"""Batches that take turns: few, so that a falling loss shows that updates arrive."""


def model_config(job: Json) -> PretrainedConfig:
    """The configuration of the job's model."""
    size = size_of(job["model"], job.get("layers"))
    make = Qwen3Config if size.qwen3 else LlamaConfig
    return make(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads or size.heads,
        head_dim=size.head_dim,
        max_position_embeddings=max(2048, job["seq"]),
        tie_word_embeddings=size.qwen3,
        use_cache=False,
    )


def checkpoint(model: Any) -> None:
    """Makes the model recompute its blocks' activations in backward."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def build_model(job: Json, dtype: torch.dtype) -> Any:
    """Random weights, made on the device in bf16 and then cast, so that all dtypes start equal."""
    torch.manual_seed(0)
    with torch.device(job["device"]):
        model = AutoModelForCausalLM.from_config(
            model_config(job), attn_implementation="sdpa", dtype=torch.bfloat16
        )
    for parameter in model.parameters():
        # The weights alone: the buffer of the rotary frequencies is fp32 and must stay so.
        parameter.data = parameter.data.to(dtype)
    return _prepared(model, job)


def build_host_model(job: Json, dtype: torch.dtype) -> Any:
    """Random weights in host memory, for a model that the device does not hold."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(
            model_config(job), attn_implementation="sdpa", dtype=dtype
        )
    rotary = model.model.rotary_emb
    model = model.to_empty(device="cpu")
    # Random numbers for the whole model would take the host minutes: one parameter at a time is
    # made on the device, which has the memory for it, and copied.
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            values = torch.ones_like(parameter, device=job["device"])
            parameter.copy_(values if "norm" in name else values.uniform_(-0.02, 0.02))
    # Buffers are not parameters: their values were lost with the meta device.
    model.model.rotary_emb = type(rotary)(config=model.config)
    return _prepared(model, job)


def build_partitioned_model(job: Json, dtype: torch.dtype, config: Json) -> Any:
    """Random weights, a part of every parameter on each rank, for a model that no device holds.

    Args:
        job: says which model and how many tokens.
        dtype: the weights' dtype.
        config: the DeepSpeed JSON, of ZeRO-3; transformers builds under ``deepspeed.zero.Init``.
    """
    # Not needed by the other models, whose systems may run without DeepSpeed.
    from transformers.integrations import HfDeepSpeedConfig

    # transformers keeps only a weak reference to it, and builds whole models once it is gone.
    told = HfDeepSpeedConfig(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        model_config(job), attn_implementation="sdpa", dtype=dtype
    )
    del told
    return _prepared(model, job)


def _prepared(model: Any, job: Json) -> Any:
    if job.get("checkpointing", False):
        checkpoint(model)
    return model.train()


def build_batches(job: Json, *, first: int = 0) -> list[Batch]:
    """Random tokens on the device, also as labels. Ranks begin with different batches."""
    generator = torch.Generator().manual_seed(1)
    shape = (job["batch"], job["seq"])
    batches: list[Batch] = []
    for _ in range(NUM_BATCHES):
        tokens = torch.randint(size_of(job["model"]).vocab, shape, generator=generator)
        tokens = tokens.to(job["device"])
        batches.append({"input_ids": tokens, "labels": tokens})
    first %= NUM_BATCHES
    return batches[first:] + batches[:first]
