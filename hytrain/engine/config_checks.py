"""Values of DeepSpeed's keys that DeepSpeed itself would take for something else, or stumble over.

Checked before anything is built: its own error would come out of torch, without the key's name, or
there would be none, and the training another one.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hytrain.config import SECTION
from hytrain.errors import ConfigError

_BATCH_KEYS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
)  # fmt: skip
_OF_ADAM = (
    "lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode", "torch_adam",
    "fp32_optimizer_states", "amsgrad", "maximize", "foreach", "fused", "capturable",
    "differentiable",
)  # fmt: skip
"""What DeepSpeed and torch take as parameters of an Adam."""
_COMMUNICATED = ("fp32", "bf16", "fp16")
_AUTO = (
    '"auto" is filled in by Hugging Face\'s Trainer and accelerate, and nobody else: write a value'
)


def check_config(config: Mapping[str, Any], *, batches_elsewhere: bool) -> None:
    """Refuses what has the wrong type or place, naming the key.

    Args:
        config: the DeepSpeed configuration as the user wrote it, with a "hytrain" section.
        batches_elsewhere: the "hytrain" section says how large batches are.

    Raises:
        ConfigError: a value cannot be used.
    """
    _check_number(config, "gradient_clipping", low=0.0, remedy="write 0 for no clipping")
    _check_batches(config, batches_elsewhere=batches_elsewhere)
    _check_optimizer(config.get("optimizer"))
    _check_scheduler(config.get("scheduler"))
    communicated = config.get("communication_data_type")
    if communicated not in (None, *_COMMUNICATED):
        raise ConfigError(
            f'"communication_data_type" is {communicated!r}: write {" or ".join(_COMMUNICATED)}'
        )
    given: list[str] = []
    for name in ("bf16", "bfloat16", "fp16", "torch_autocast"):
        section = config.get(name)
        if name != "torch_autocast" and isinstance(section, Mapping) and section.get("enabled"):
            given.append(f'"{name}.enabled"')
        if isinstance(section, Mapping) and not isinstance(section.get("enabled", False), bool):
            raise ConfigError(f'"{name}.enabled" is {section["enabled"]!r}: write true or false')
    if '"fp16.enabled"' in given and len(given) > 1:
        raise ConfigError(
            f"{' and '.join(reversed(given))} are both true: the training copy has one dtype; set "
            "one of them to false"
        )


def _check_number(
    config: Mapping[str, Any], path: str, *, low: float, remedy: str, value: Any = None
) -> None:
    found = config.get(path) if value is None else value
    if found is None:
        return
    if found == "auto":
        raise ConfigError(f'"{path}" is "auto": {_AUTO}')
    is_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    if not is_number or not math.isfinite(found) or found < low:
        raise ConfigError(f'"{path}" is {found!r}: give a number of at least {low:g}; {remedy}')


def _check_batches(config: Mapping[str, Any], *, batches_elsewhere: bool) -> None:
    given = {key: config[key] for key in _BATCH_KEYS if config.get(key) is not None}
    if batches_elsewhere:
        return  # compared with what the section says
    for key, value in given.items():
        if value == "auto":
            raise ConfigError(f'"{key}" is "auto": {_AUTO}')
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f'"{key}" is {value!r}: give a whole number above 0')
    if not any(key in given for key in _BATCH_KEYS[:2]):
        raise ConfigError(
            'the configuration does not say how large a batch is: set "train_batch_size" (samples '
            'of a step, all ranks together) or "train_micro_batch_size_per_gpu"'
        )


def _check_optimizer(section: Any) -> None:
    if section is None:
        return
    if not isinstance(section, Mapping):
        raise ConfigError(f'"optimizer" is {section!r}: write {{"type": "AdamW", "params": {{}}}}')
    if str(section.get("type", "")).lower() not in ("adam", "adamw"):
        return  # said elsewhere
    parameters = section.get("params")
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise ConfigError(f'"optimizer.params" is {parameters!r}: write {{"lr": 1e-4}}')
    for name, value in parameters.items():
        key = f"optimizer.params.{name}"
        if name == "max_grad_norm":
            raise ConfigError(f'"{key}" is no parameter of an Adam: set "gradient_clipping"')
        if name not in _OF_ADAM:
            near = difflib.get_close_matches(str(name), _OF_ADAM, n=1)
            hint = f'did you mean "{near[0]}"? ' if near else ""
            raise ConfigError(
                f'"{key}" is no parameter of an Adam: {hint}known are {", ".join(_OF_ADAM)}'
            )
        if name in ("lr", "eps", "weight_decay"):
            _check_number({}, key, low=0.0, remedy="as in 1e-4", value=value)
        elif name == "betas":
            _check_betas(key, value)


def _check_betas(key: str, value: Any) -> None:
    if value == "auto":
        raise ConfigError(f'"{key}" is "auto": {_AUTO}')
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    is_pair = len(numbers) == 2 and all(
        isinstance(beta, (int, float)) and not isinstance(beta, bool) and 0.0 <= beta < 1.0
        for beta in numbers
    )
    if not is_pair:
        raise ConfigError(f'"{key}" is {value!r}: give two numbers in [0, 1), as in [0.9, 0.999]')


def _check_scheduler(section: Any) -> None:
    if not isinstance(section, Mapping) or not isinstance(section.get("params"), Mapping):
        return
    for name, value in section["params"].items():
        if value == "auto":
            raise ConfigError(f'"scheduler.params.{name}" is "auto": {_AUTO}')


def refuse_misplaced_section(config: Mapping[str, Any]) -> None:
    """The "hytrain" section is beside DeepSpeed's own, not inside of one.

    Raises:
        ConfigError: it is inside of one.
    """
    for name, value in config.items():
        if name != SECTION and isinstance(value, Mapping) and SECTION in value:
            raise ConfigError(
                f'the section "{SECTION}" is inside of "{name}": move it to the top level of the '
                f'configuration, beside "{name}"'
            )
