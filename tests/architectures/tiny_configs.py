"""Every architecture of transformers, so small that a training step takes a fraction of a second.

A configuration's defaults show which keys it has; those that are in :data:`SMALL` become small, in
the configurations inside it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto

TABLES: dict[str, Mapping[str, Any]] = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "classes": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}
"""Purpose of a model -> architecture -> class names."""
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
VOCABULARY = 96
MOST_PARAMETERS = 8_000_000

_WIDTH, _INNER, _HEADS, _LAYERS = 32, 48, 4, 3
SMALL: dict[str, Any] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "word_embed_proj_dim",
         "embedding_size"),
        _WIDTH,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"),
        _INNER,
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
         "shared_intermediate_size", "ffn_hidden_size"),
        16,
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads",
         "decoder_attention_heads"),
        _HEADS,
    ),
    "num_key_value_heads": 2,
    "head_dim": 8,
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size"), VOCABULARY),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 64),
    **dict.fromkeys(_EXPERTS, 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
    "v_head_dim": 8, "rotary_dim": 4,
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("linear_num_heads", "linear_num_value_heads"), _HEADS),
    "linear_num_key_heads": 2,
    "state_size": 4, "mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_chunk_size": 8, "chunk_size": 8, "attention_window": 8,
    "image_size": 32, "patch_size": 8,
    # Which layers are skipped is drawn at random: the reference would skip others.
    "layerdrop": 0.0, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
# Elements of lists, whose lengths stay.
SMALL_LISTS: dict[str, int] = {
    **dict.fromkeys(("hidden_sizes", "conv_dim", "embed_dims", "dims"), _WIDTH),
    **dict.fromkeys(("depths", "num_blocks"), 1),
}
# Values that only one architecture has, or needs to be a mixture of experts at all.
OF_ONE: dict[str, dict[str, Any]] = {
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0, "kv_n_heads": 2},
        "ffn_config": {
            "hidden_size": _WIDTH, "ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2
        },
    },
    "doge": {"is_moe": True, "num_experts": 16},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        "num_attention_heads": _HEADS, "num_key_value_heads": _HEADS, "kv_lora_rank": 16,
        "qk_nope_head_dim": 4, "index_n_heads": 2, "index_head_dim": 8, "swa_head_dim": 8,
        "swa_num_attention_heads": _HEADS, "swa_num_key_value_heads": _HEADS, "swa_v_head_dim": 8,
        "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_qk_nope_head_dim": 4,
        "shared_experts_intermediate_size": 16,
    },
    "gemma4_text": {
        "enable_moe_block": True, "top_k_experts": 2, "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4, "zero_expert_num": 4},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 16,
        "indexer_compress_ratio": 1,
    },
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
}  # fmt: skip
# Keys that keep their defaults, tried in turn: all small values together may not make a model.
_LEFT_ALONE: tuple[tuple[str, ...], ...] = (
    (), ("head_dim",), ("num_key_value_heads",), ("n_group", "topk_group"),
    ("head_dim", "num_key_value_heads"), tuple(SMALL_LISTS), ("depths", "num_blocks"),
    ("layer_types",), ("layer_types", "num_hidden_layers"), ("embed_dim", "image_size"),
    ("embed_dim", "num_heads", "depths", "num_attention_heads", "image_size"),
    ("num_attention_heads", "num_heads"), ("num_hidden_layers", "num_layers"),
    ("num_experts_per_tok",), ("hidden_size_per_layer_input",),
)  # fmt: skip


class NoTinyModelError(Exception):
    """Plain torch does not train the architecture with these sizes and inputs."""


def architectures() -> Iterator[tuple[str, str]]:
    """Yields (purpose, architecture) of each that this version of transformers has."""
    for purpose, table in TABLES.items():
        for name in sorted(table):
            yield purpose, name


def mixtures() -> Iterator[tuple[str, str]]:
    """Yields (purpose, architecture) of each that has experts, for models that generate text."""
    for purpose, name in architectures():
        if purpose not in ("causal", "seq2seq"):
            continue
        config_class = transformers.CONFIG_MAPPING[name]
        classes = [config_class, *(getattr(config_class, "sub_configs", None) or {}).values()]
        # One that contains a text model has that model's class, which takes no other config.
        if f"{name}_text" in TABLES[purpose]:
            continue
        if any(hasattr(each, key) for each in classes for key in _EXPERTS):
            yield purpose, name


def make_model(purpose: str, name: str, **changes: Any) -> nn.Module:
    """Returns the architecture's model, in fp32, the same at every call.

    Args:
        purpose: see :data:`TABLES`.
        name: the architecture's.
        changes: values of its configuration.

    Raises:
        NoTinyModelError: there is none; the message says why.
    """
    found = TABLES[purpose][name]
    model_class = getattr(transformers, found if isinstance(found, str) else found[0], None)
    if model_class is None:
        raise NoTinyModelError(f"transformers has no {found}")
    reasons: list[str] = []
    for config in _configs(name, changes):
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in model_class(config).parameters())
            if size > MOST_PARAMETERS:
                reasons.append(f"it still has {size} parameters")
                continue
            torch.manual_seed(0)
            model = model_class(config).float().train()
            _settle(model)
            loss_of(model, make_batch(purpose, 0)).backward()
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}")
            continue
        model.zero_grad()
        return model
    raise NoTinyModelError(reasons[0] if reasons else "its configuration cannot be made small")


def _settle(model: nn.Module) -> None:
    """Keeps roundings from mattering, where values are zero or differ by nothing else."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eps = 0.5  # samples so few and small have next to no variance
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 and parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))


def make_batch(purpose: str, number: int, *, one_token: bool = False) -> dict[str, torch.Tensor]:
    """Two samples with labels, the same for a number.

    ``one_token``: a single token repeated, which goes to the same experts everywhere.
    """
    drawn = torch.Generator().manual_seed(number)
    classes = torch.randint(0, 2, (2,), generator=drawn)
    if purpose == "image":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=drawn), "labels": classes}
    if purpose == "audio":
        return {"input_values": torch.randn(2, 4000, generator=drawn), "labels": classes}
    ids = torch.randint(3, VOCABULARY - 1, (2, 16), generator=drawn)
    if one_token:
        ids = ids[:1, :1].expand(2, 16).clone()
    return {"input_ids": ids, "labels": classes if purpose == "classes" else ids.clone()}


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Returns the model's loss, or its first output.

    Raises:
        NoTinyModelError: that is no finite number with a gradient.
    """
    output = model(**batch)
    loss = output["loss"] if "loss" in output else output[0]
    if not (isinstance(loss, torch.Tensor) and loss.requires_grad and torch.isfinite(loss).all()):
        raise NoTinyModelError(f"its loss is {loss}")
    return loss


def _configs(name: str, changes: Mapping[str, Any]) -> Iterator[Any]:
    config_class = transformers.CONFIG_MAPPING[name]
    for left_alone in _LEFT_ALONE:
        try:
            values = _small_values(config_class, left_alone) | OF_ONE.get(name, {})
            config = config_class(**values, **changes)
        except Exception:  # whatever a configuration raises for sizes that do not fit together
            continue
        if not _has(config, "decoder_start_token_id"):
            config.decoder_start_token_id = 0
        yield config


def _small_values(config_class: Any, left_alone: tuple[str, ...]) -> dict[str, Any]:
    defaults = config_class()
    values = {k: v for k, v in SMALL.items() if k not in left_alone and _has(defaults, k)}
    for name, size in SMALL_LISTS.items():
        if name not in left_alone and isinstance(found := getattr(defaults, name, None), list):
            values[name] = [size] * len(found)
    for inner in getattr(config_class, "sub_configs", None) or {}:
        if (found := getattr(defaults, inner, None)) is not None:
            values[inner] = _small_values(type(found), left_alone)
    if "layer_types" not in left_alone and "num_hidden_layers" in values:
        for key in ("layer_types", "mlp_layer_types"):
            if _has(defaults, key) and (types := getattr(defaults, key)):
                values[key] = _some_of_each(list(types))
    return values


def _some_of_each(types: list[str]) -> list[str]:
    """Returns the kinds of the small model's layers, the last ones those otherwise missing."""
    first = types[:_LAYERS]
    missing = [kind for kind in dict.fromkeys(types) if kind not in first]
    return first[: len(first) - len(missing)] + missing


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # some raise for values that differ between layers
        return False
