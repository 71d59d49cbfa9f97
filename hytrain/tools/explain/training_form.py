"""What a DeepSpeed JSON says about a step, apart from its "hytrain" section."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from hytrain.errors import ConfigError
from hytrain.formats.dtypes import TORCH_NAMES

BATCH_WORDS = {
    "train_batch_size": "samples of a step on all ranks",
    "train_micro_batch_size_per_gpu": "samples of a micro-batch on each rank",
    "gradient_accumulation_steps": "micro-batches a step",
}


@dataclass(frozen=True, slots=True)
class TrainingForm:
    """What the rest of the DeepSpeed JSON says about a step.

    Attributes:
        dtype: the training copy's: "bfloat16", "float16" or "float32".
        dtype_from: the keys that say so, or what is assumed of them.
        gradient_dtype: that of the gradients that wait; None: the training copy's.
        clipping: the threshold; 0 for none, None if "auto" leaves it to the trainer.
        check_overflow: whether an inf or NaN skips the step.
        accumulation: micro-batches a step.
        shards_weights: whether each rank keeps its shards of the training copy only (ZeRO-3).
        weights_on_host: whether it keeps them in host memory (``offload_param``).
        sequence_ranks: ranks that share each sequence.
        gather_keys: values of the ``stage3_*`` keys that are whole numbers.
        stage: the ZeRO stage.
        optimizer: which one, in words.
        batch: the batch keys that have a number.
    """

    dtype: str
    dtype_from: str
    gradient_dtype: str | None
    clipping: float | None
    check_overflow: bool
    accumulation: int
    shards_weights: bool = False
    weights_on_host: bool = False
    sequence_ranks: int = 1
    gather_keys: Mapping[str, int] = field(default_factory=lambda: {})
    stage: int = 2
    optimizer: str = "AdamW"
    batch: Mapping[str, int] = field(default_factory=lambda: {})

    @property
    def is_direct(self) -> bool:
        """Whether updates are committed at once, since nothing about a step is left to decide."""
        return self.clipping == 0.0 and not self.check_overflow

    @property
    def is_muon(self) -> bool:
        """Whether matrices are updated by Muon, on the GPU wherever their state is."""
        return self.optimizer.lower() == "muon"


def read_form(config: Mapping[str, Any]) -> TrainingForm:
    """Reads the keys of a DeepSpeed JSON that decide what a step is.

    Raises:
        ConfigError: a key has a value of the wrong kind.
    """
    bf16 = _section(config, "bf16") or _section(config, "bfloat16")
    fp16 = _section(config, "fp16")
    dtype, check_overflow, enabled = "float32", True, None
    if bf16.get("enabled"):
        dtype, check_overflow = "bfloat16", bool(bf16.get("check_grad_overflow", True))
        enabled = bf16
    elif fp16.get("enabled"):
        dtype, enabled = "float16", fp16
    dtype_from = 'neither "bf16" nor "fp16" is enabled'
    if enabled is not None:
        key = "fp16.enabled" if enabled is fp16 else "bf16.enabled"
        dtype_from = f'"{key}" is {json.dumps(enabled["enabled"])}'
        if enabled["enabled"] == "auto":
            dtype_from = f"assumed: {dtype_from}, which the trainer fills in"
    accumulated = _section(config, "data_types").get("grad_accum_dtype")
    zero = _section(config, "zero_optimization")
    steps = _number(config, "gradient_accumulation_steps", 1)
    return TrainingForm(
        dtype=dtype,
        dtype_from=dtype_from,
        gradient_dtype=TORCH_NAMES.get(str(accumulated)),
        clipping=_number(config, "gradient_clipping", 0.0),
        check_overflow=check_overflow,
        accumulation=max(1, int(steps or 1)),
        shards_weights=zero.get("stage") == 3,
        weights_on_host=_section(zero, "offload_param").get("device") == "cpu",
        sequence_ranks=max(1, int(_number(config, "sequence_parallel_size", 1) or 1)),
        gather_keys={k: v for k, v in zero.items() if k.startswith("stage3_") and type(v) is int},
        stage=zero.get("stage", 0),
        optimizer=str(
            _section(config, "optimizer").get("type", "the optimizer that training passes")
        ),
        batch={key: config[key] for key in BATCH_WORDS if type(config.get(key)) is int},
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{name}" must be a JSON object, got {type(section).__name__}')
    return cast("Mapping[str, Any]", section)


def _number(config: Mapping[str, Any], name: str, default: float) -> float | None:
    """A number; None if "auto" leaves it to the trainer."""
    value = config.get(name, default)
    if value == "auto":
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= sys.float_info.max:  # NaN is not
        raise ConfigError(f'"{name}" must be a finite number, got {value!r}')
    return float(value)
