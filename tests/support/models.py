"""Toy models and batches. Every call with the same arguments gives the same numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

VOCABULARY = 64
LENGTH = 12
HIDDEN = 32
BATCH = 2

TRANSFORMERS = ("llama", "gpt2", "vit")


def make_model(kind: str, *, seed: int = 0) -> nn.Module:
    """A randomly initialized model: one of TRANSFORMERS, "t5", "mlp", ..."""
    torch.manual_seed(seed)
    builders = {
        "llama": _llama,
        "llama-100m": _llama_100m,
        "gpt2": _gpt2,
        "vit": _vit,
        "t5": _t5,
        "mlp": Mlp,
        "borrowing": Borrowing,
        "partly_used": PartlyUsed,
    }
    return builders[kind]()


def make_batch(kind: str, number: int, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The keyword arguments of forward for micro-batch ``number``."""
    generator = torch.Generator().manual_seed(1000 + number)
    if kind == "vit":
        images = torch.randn(BATCH, 3, 16, 16, generator=generator)
        labels = torch.randint(0, 10, (BATCH,), generator=generator)
        return {"pixel_values": images.to(device), "labels": labels.to(device)}
    if kind in ("mlp", "borrowing", "partly_used"):
        return {"inputs": torch.randn(BATCH, HIDDEN, generator=generator).to(device)}
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator).to(device)
    return {"input_ids": tokens, "labels": tokens}


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model of this module."""
    return output if isinstance(output, torch.Tensor) else output.loss


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def _llama_100m() -> nn.Module:
    """109 M parameters: large enough that transfers and updates really overlap on a GPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=32,
        n_embd=HIDDEN,
        bos_token_id=0,
        eos_token_id=0,
        n_layer=3,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


class Block(nn.Module):
    """A residual block of an MLP."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Mlp(nn.Module):
    """Layers "before", four blocks, "after"; forward returns the loss."""

    def __init__(self, num_blocks: int = 4, width: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, width)

    def body(self, inputs: torch.Tensor) -> torch.Tensor:
        """Runs all but the head."""
        return self.through(self.embed(inputs.to(self.embed.weight.dtype)))

    def through(self, x: torch.Tensor) -> torch.Tensor:
        """Runs the blocks."""
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(inputs)).float().pow(2).mean()


class PartlyUsed(Mlp):
    """An MLP with an unused parameter in block 1: that layer never has all gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].register_parameter("unused", nn.Parameter(torch.ones(HIDDEN)))


class Borrowing(Mlp):
    """An MLP whose end multiplies by the first module's weight, outside of that module."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.head(self.body(inputs)) @ self.embed.weight.T).pow(2).mean()


class Recomputed(Mlp):
    """An MLP whose block 1 is in ``times`` reentrant segments: its hooks fire once for each."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.times = 1

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs.to(self.embed.weight.dtype))
        for index, block in enumerate(self.blocks):
            for _ in range(self.times if index == 1 else 1):
                x = checkpoint(block, x, use_reentrant=True)
        return self.head(x).pow(2).mean()
