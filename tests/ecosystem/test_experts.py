"""LoRA of experts packed in one parameter (peft's ``target_parameters``), compared with torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import on_ranks
from support.beside_torch import training_beside_torch

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(240)]

EPS = 1e-3


def _adapted(architecture: str) -> Any:
    """A tiny mixture whose experts and attention have adapters."""
    import transformers
    from peft import LoraConfig, get_peft_model

    sizes: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0,
    }  # fmt: skip
    torch.manual_seed(0)  # the same on all ranks
    config = transformers.AutoConfig.for_model(architecture, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    lora = LoraConfig(
        r=4,
        target_modules=["q_proj", "v_proj"],
        target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=False,
    )
    return get_peft_model(model, lora)


def _loss(model: Any, step: int, rank: int) -> torch.Tensor:
    """The loss of one repeated token: most experts are idle, and ranks use different ones."""
    token = torch.randint(3, 96, (1,), generator=torch.Generator().manual_seed(2 * step + rank))
    ids = token.expand(2, 8).clone()
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("stage", [2, 3])
@on_ranks(2)
def test_adapters_of_experts(stage: int, architecture: str, recomputed: bool) -> None:
    model = _adapted(architecture)
    assert any("experts" in name for name, p in model.named_parameters() if p.requires_grad)
    if recomputed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with training_beside_torch(model, stage, eps=EPS) as beside:
        for step in range(4):
            beside.step(lambda model, rank, step=step: _loss(model, step, rank))
