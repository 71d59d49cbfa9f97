"""What a DeepSpeed JSON says about a step, whatever "hytrain" is to make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from hytrain.errors import ConfigError
from hytrain.formats.dtypes import TORCH_NAMES


@dataclass(frozen=True, slots=True)
class TrainingForm:
    """What the rest of the DeepSpeed JSON says about a step.

    Attributes:
        dtype: of the training copy: "bfloat16", "float16" or "float32".
        gradient_dtype: of the gradients that wait; None: the training copy's.
        clipping: the threshold; 0 for none, None where "auto" leaves it to the trainer.
        check_overflow: whether an inf or NaN skips the step.
        accumulation: micro-batches a step.
        shards_weights: whether each rank keeps its shards of the training copy only (ZeRO-3).
        weights_on_host: whether it keeps them in host memory (``offload_param``).
        gather_keys: values of the ``stage3_*`` keys, where they are numbers.
    """

    dtype: str
    gradient_dtype: str | None
    clipping: float | None
    check_overflow: bool
    accumulation: int
    shards_weights: bool = False
    weights_on_host: bool = False
    gather_keys: Mapping[str, int] = field(default_factory=lambda: {})

    @property
    def is_direct(self) -> bool:
        """Whether updates are committed at once, since nothing about a step is left open."""
        return self.clipping == 0.0 and not self.check_overflow


def read_form(config: Mapping[str, Any]) -> TrainingForm:
    """The keys of a DeepSpeed JSON that decide what a step is.

    Raises:
        ConfigError: a key has a value of the wrong kind.
    """
    bf16, fp16 = _section(config, "bf16"), _section(config, "fp16")
    if not bf16 and "bfloat16" in config:
        bf16 = _section(config, "bfloat16")
    if bf16.get("enabled"):
        dtype, check = "bfloat16", bool(bf16.get("check_grad_overflow", True))
    else:
        dtype, check = ("float16" if fp16.get("enabled") else "float32"), True
    accumulated = _section(config, "data_types").get("grad_accum_dtype")
    clipping = config.get("gradient_clipping", 0.0)
    zero = _section(config, "zero_optimization")
    return TrainingForm(
        dtype=dtype,
        gradient_dtype=TORCH_NAMES.get(str(accumulated)),
        clipping=None if clipping == "auto" else _number("gradient_clipping", clipping),
        check_overflow=check,
        accumulation=_accumulation(config),
        shards_weights=zero.get("stage") == 3,
        weights_on_host=_section(zero, "offload_param").get("device") == "cpu",
        gather_keys={k: v for k, v in zero.items() if k.startswith("stage3_") and type(v) is int},
    )


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f'"{name}" must be a JSON object, got {type(section).__name__}')
    return cast("Mapping[str, Any]", section)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f'"{name}" must be a number, got {value!r}')
    return float(value)


def _accumulation(config: Mapping[str, Any]) -> int:
    value = config.get("gradient_accumulation_steps", 1)
    return 1 if value == "auto" else max(1, int(_number("gradient_accumulation_steps", value)))
