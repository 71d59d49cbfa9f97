"""Engines of plain DeepSpeed's ZeRO, their state, and arguments to convert their checkpoints."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn


def plain_engine(model: nn.Module, stage: int, lr: float = 1e-2, **config: Any) -> Any:
    """An engine with torch's AdamW on the trained parameters; ``config``: further keys."""
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=base | config)
    return engine


def plain_state(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The state, as in hytrain's ``fp32_state_dict``: name -> kind -> a copy on the host."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            kinds = {"fp32": safe_get_full_fp32_param(parameter)}
            for kind in ("exp_avg", "exp_avg_sq"):
                kinds[kind] = safe_get_full_optimizer_state(parameter, kind)
            found[name] = {kind: tensor.detach().cpu().clone() for kind, tensor in kinds.items()}
    return found


def conversion(source: Path, target: Path, *, inject: bool = True) -> argparse.Namespace:
    """The arguments of DeepSpeed's ``ds_to_universal``."""
    return argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        strict=True,
        inject_missing_state=inject,
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
    )
