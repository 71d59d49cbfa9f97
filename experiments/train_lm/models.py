"""Models with random weights: Llama and GPT-2 presets, or any transformers config on disk.

A model is created directly on its device and in its training dtype, so a 13 B model costs
26 GB there and nothing on the host: the optimizer makes the fp32 master copy itself.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class ModelError(ValueError):
    """``--model`` and the options that shape a model ask for one that cannot be built."""


# layers, hidden size, feed-forward size, heads, vocabulary
_LLAMA: dict[str, tuple[int, int, int, int, int]] = {
    "llama-3m": (4, 256, 688, 4, 512),
    "llama-10m": (6, 384, 1024, 6, 512),
    "llama-100m": (12, 640, 1728, 10, 32000),
    "llama-1b": (18, 2048, 5504, 16, 32000),
    "llama-3b": (24, 3072, 8192, 24, 32000),
    "llama-7b": (32, 4096, 11008, 32, 32000),
    "llama-10b": (30, 5120, 13824, 40, 32000),
    "llama-13b": (40, 5120, 13824, 40, 32000),
}
# layers, hidden size, heads; 1024 positions, vocabulary 50257, input and output embedding tied
_GPT2: dict[str, tuple[int, int, int]] = {
    "gpt2": (12, 768, 12),
    "gpt2-medium": (24, 1024, 16),
    "gpt2-large": (36, 1280, 20),
    "gpt2-xl": (48, 1600, 25),
}

PRESETS: tuple[str, ...] = (*_LLAMA, *_GPT2)


def model_config(
    name: str, *, seq_len: int, min_vocab: int = 0, vocab_size: int | None = None
) -> PretrainedConfig:
    """Makes the transformers config of a preset or reads one from disk.

    Args:
        name: a preset of ``PRESETS``, a ``config.json``, or a folder that holds one.
        seq_len: tokens a sequence; positions of a Llama preset are raised to it.
        min_vocab: the tokenizer's number of ids; the model's vocabulary must hold them.
        vocab_size: the model's vocabulary; None keeps the config's own.

    Raises:
        ModelError: unknown name, unreadable config, too few positions, too small a vocabulary.
    """
    config = _named_config(name, seq_len)
    if vocab_size is not None:
        config.vocab_size = vocab_size
    if config.vocab_size < min_vocab:
        raise ModelError(
            f"--model {name} has a vocabulary of {config.vocab_size}, but the tokenizer makes "
            f"{min_vocab} different ids: give --vocab-size {-(-min_vocab // 64) * 64} or more, "
            "or another --tokenizer"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and seq_len > positions:
        raise ModelError(
            f"--seq-len {seq_len} is more than the {positions} positions of --model {name}: "
            f"give --seq-len {positions} or less, or a Llama preset"
        )
    return config


def _named_config(name: str, seq_len: int) -> PretrainedConfig:
    from transformers import GPT2Config, LlamaConfig

    if name in _LLAMA:
        layers, hidden, feed_forward, heads, vocab = _LLAMA[name]
        return LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=hidden,
            intermediate_size=feed_forward,
            num_attention_heads=heads,
            vocab_size=vocab,
            max_position_embeddings=max(4096, seq_len),
            rms_norm_eps=1e-5,
            tie_word_embeddings=False,
            use_cache=False,
        )
    if name in _GPT2:
        layers, hidden, heads = _GPT2[name]
        # No dropout, as is usual when each token is seen about once.
        return GPT2Config(
            n_layer=layers,
            n_embd=hidden,
            n_head=heads,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            use_cache=False,
        )
    return _config_from_disk(name)


def _config_from_disk(name: str) -> PretrainedConfig:
    from transformers import AutoConfig

    if not Path(name).exists():
        raise ModelError(
            f"--model {name} is neither a preset nor a transformers config on this machine: give "
            f"one of {', '.join(PRESETS)}, a config.json, or the folder that holds it"
        )
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{name} is no transformers config ({type(error).__name__}: {error}): it must be a "
            'JSON object with a "model_type" that transformers knows'
        ) from error
    config.use_cache = False
    return config


def build_model(
    config: PretrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    activation_checkpointing: bool,
    attention: str = "sdpa",
) -> PreTrainedModel:
    """Creates a causal language model with random weights, in ``dtype``, on ``device``.

    The weights depend on ``seed``, the config, the device's kind and the dtype alone: every
    rank makes the same. Attention is torch's scaled_dot_product_attention, or transformers' own
    of plain operations ("eager"). Activation checkpointing is torch's non-reentrant one, of every
    transformer block.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.train()
    if activation_checkpointing:
        with warnings.catch_warnings():
            # Renamed in late releases of transformers 5, which warn; older ones lack the new name.
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def count_parameters(model: torch.nn.Module) -> int:
    """Counts the trainable elements of a model; a tied tensor counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def flops_per_token(num_parameters: int) -> int:
    """Useful floating-point operations that training spends on a token: 6 a parameter.

    Kaplan et al., "Scaling Laws for Neural Language Models" (arXiv 2001.08361), section 2.1:
    2 operations a parameter forward and 4 backward. Left out are attention's own products and
    what activation checkpointing computes twice.
    """
    return 6 * num_parameters


def parameter_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Splits trainable parameters into two optimizer groups: matrices, and the rest undecayed.

    Weight decay pulls norms and biases to 0 without regularising anything, so the vectors get
    a group of their own. The matrices take the weight decay of the DeepSpeed JSON.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    return groups
