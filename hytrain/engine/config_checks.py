"""Checks of DeepSpeed's keys for values that DeepSpeed itself would misread or fail on.

They run before anything is built: DeepSpeed's own error would come from torch, without the key's
name, or there would be no error, and training would not be what was asked for.
"""

from __future__ import annotations

import difflib
import inspect
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from pydantic import ValidationError

from hytrain.config import SECTION, HyTrainConfig
from hytrain.engine.deepspeed_internals import (
    keys_of_section,
    keys_that_are_read,
    lr_schedules,
)
from hytrain.engine.sequence_groups import SHARED_DTYPE
from hytrain.errors import ConfigError, did_you_mean, refuse_all, unquoted
from hytrain.kernels.muon import METHODS

BATCH_KEYS = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
)  # fmt: skip
_DEEPSPEEDS_CHECKS = "deepspeed.runtime.config"
_OF_ADAM = (
    "lr", "betas", "eps", "weight_decay", "bias_correction", "adam_w_mode", "torch_adam",
    "fp32_optimizer_states", "amsgrad", "maximize", "foreach", "fused", "capturable",
    "differentiable",
)  # fmt: skip
"""Parameters that DeepSpeed and torch accept for an Adam."""
_OF_MUON = (
    "lr", "muon_lr", "adam_lr", "momentum", "ns_method", "weight_decay", "betas", "eps",
    "adam_w_mode", "fp32_optimizer_states", "per_head_muon",
)  # fmt: skip
"""Parameters that DeepSpeed accepts for Muon; it would ignore any other."""
_CONSTANTS_OF_MUON = {"ns_steps": 5, "nesterov": True}
_FLAGS_OF_ADAM = ("bias_correction", "adam_w_mode", "torch_adam", "amsgrad")
_FLOAT32_MAX = torch.finfo(torch.float32).max
_FLOAT32_TINY = torch.finfo(torch.float32).tiny
_MOST_SAMPLES = 2**31
_DTYPES = ("fp32", "bf16", "fp16")
_LONG_DTYPES = (*_DTYPES, "float32", "bfloat16", "float16", "float", "half")
_OBJECTS = (
    "optimizer", "scheduler", "zero_optimization", "bf16", "bfloat16", "fp16", "torch_autocast",
    "data_types", "checkpoint", "tensorboard", "csv_monitor", "wandb", "comet", "flops_profiler",
    "comms_logger", "activation_checkpointing", "aio", "compile",
)  # fmt: skip
"""DeepSpeed's keys whose value is a section."""
_AUTO = (
    '"auto" is filled in by Hugging Face\'s Trainer and accelerate, and nobody else: write a value'
)


def check_config(config: Mapping[str, Any], *, batches_elsewhere: bool) -> None:
    """Raises a ConfigError with the keys of all values of the wrong type or in the wrong place.

    ``batches_elsewhere``: the "hytrain" section says how large batches are.
    """
    clipping, remedy = config.get("gradient_clipping", 0.0), "write 0 for no clipping"
    accumulated = (config.get("data_types") or {}).get("grad_accum_dtype")
    refuse_all(
        lambda: _check_number("gradient_clipping", clipping, remedy),
        lambda: _check_steps_per_print(config.get("steps_per_print")),
        lambda: _check_batches(config, batches_elsewhere=batches_elsewhere),
        lambda: _check_optimizer(config.get("optimizer")),
        lambda: _check_scheduler(config.get("scheduler")),
        *(
            partial(_check_dtype, key, config.get(key), _DTYPES)
            for key in ("communication_data_type", SHARED_DTYPE)
        ),
        lambda: _check_dtype("data_types.grad_accum_dtype", accumulated, _LONG_DTYPES),
        lambda: _check_precisions(config),
    )


def check_sections(config: Mapping[str, Any]) -> None:
    """Raises a ConfigError if a section of DeepSpeed's is not a JSON object."""
    for name in _OBJECTS:
        section = config.get(name)
        if section is not None and not isinstance(section, Mapping):
            is_switch = isinstance(section, bool)
            remedy = f'{{"enabled": {str(section).lower()}}}' if is_switch else "{...}"
            raise ConfigError(f'"{name}" is {section!r}: write a JSON object, "{name}": {remedy}')


def misspelt_keys(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Returns keys that DeepSpeed would silently ignore, each with the known key closest to it.

    Looks at the top level, in "optimizer" and in "scheduler"; in other sections DeepSpeed refuses
    them. They are not errors: a configuration may have sections of the user's own.
    """
    found: list[tuple[str, str]] = []
    for section, known in keys_that_are_read().items():
        given = (config.get(section) or {}) if section else config
        prefix, cutoff = (f"{section}.", 0.6) if section else ("", 0.85)
        for key in given:
            near = difflib.get_close_matches(str(key), [*known, SECTION], n=1, cutoff=cutoff)
            if near and near[0] != key:
                found.append((f"{prefix}{key}", prefix + near[0]))
            elif not near and not section and key in HyTrainConfig.model_fields:
                found.append((str(key), f"{SECTION}.{key}"))
    return found


def make_folder(key: str, folder: str | None) -> None:
    """Makes a key's folder, which is written to much later; raises a ConfigError if it cannot."""
    if folder is None:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder) / f".probe-{time.monotonic_ns()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f'"{key}" is {folder!r}, where nothing can be written ({error.strerror}): give another '
            "folder"
        ) from None


def explain_deepspeeds(error: ValidationError, config: Mapping[str, Any]) -> ConfigError:
    """Returns DeepSpeed's validation error with the section's name, which DeepSpeed leaves out."""
    lines: list[str] = []
    for item in error.errors():
        section = next((name for name in config if _has(config[name], item)), error.title)
        key = ".".join([str(section), *map(str, item["loc"])])
        if item["type"] == "extra_forbidden":
            known = keys_of_section(error.title, item["loc"][:-1])
            hint = did_you_mean(item["loc"][-1], known) or "remove it"
            lines.append(f'  "{key}" is no key that DeepSpeed knows: {hint.rstrip()}')
        else:
            seen = f" = {item['input']!r}" if item["loc"] else ""
            lines.append(f'  "{key}"{seen}: {item["msg"].removeprefix("Value error, ")}')
    return ConfigError("the configuration cannot be used:\n" + ";\n".join(lines))


def explain_assertion(error: AssertionError, config: Mapping[str, Any]) -> ConfigError | None:
    """Returns DeepSpeed's assertion about contradictory keys as a ConfigError; None for others."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    if place is None or place.tb_frame.f_globals.get("__name__") != _DEEPSPEEDS_CHECKS:
        return None
    given = {key: config[key] for key in BATCH_KEYS if key in config}
    if "batch" not in str(error).lower() or not given:
        return ConfigError(f"the configuration cannot be used: {error}")
    seen = ", ".join(f'"{key}": {value}' for key, value in given.items())
    return ConfigError(
        f"{seen} cannot hold together: train_batch_size must be train_micro_batch_size_per_gpu x "
        f"gradient_accumulation_steps x the number of ranks, all of them at least 1. Leave one of "
        f"the three out, or change it ({error})"
    )


def _has(section: Any, item: Any) -> bool:
    """Whether a section has an error's value at the error's location."""
    for part in item["loc"]:
        if not isinstance(section, Mapping) or part not in section:
            return False
        section = section[part]
    return bool(section == item["input"])


def _check_precisions(config: Mapping[str, Any]) -> None:
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


def _refuse(path: str, value: Any, remedy: str) -> NoReturn:
    raise ConfigError(f'"{path}" is {value!r:.80}: {remedy}{unquoted(value)}')


def _refuse_auto(path: str, value: Any) -> None:
    if value == "auto":
        raise ConfigError(f'"{path}" is "auto": {_AUTO}')


def _check_number(path: str, value: Any, remedy: str) -> None:
    _refuse_auto(path, value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0.0 <= value <= _FLOAT32_MAX:  # NaN, too
        _refuse(path, value, f"give a finite number of at least 0; {remedy}")


def _check_steps_per_print(value: Any) -> None:
    # accelerate sets it to infinity.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is not None and (not is_number or not value >= 1):
        _refuse("steps_per_print", value, "give a whole number above 0, or remove it")


def _check_dtype(path: str, value: Any, known: Sequence[str]) -> None:
    if value is not None and str(value).removeprefix("torch.") not in known:
        _refuse(path, value, f"write {' or '.join(_DTYPES)}")


def _check_batches(config: Mapping[str, Any], *, batches_elsewhere: bool) -> None:
    given = {key: config[key] for key in BATCH_KEYS if config.get(key) is not None}
    if batches_elsewhere:
        return  # they are compared with the section's sizes
    for key, value in given.items():
        _refuse_auto(key, value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < _MOST_SAMPLES:
            _refuse(key, value, "give a whole number above 0 and below 2**31")
    if not any(key in given for key in BATCH_KEYS[:2]):
        raise ConfigError(
            'the configuration does not say how large a batch is: set "train_batch_size" (samples '
            'of a step, all ranks together) or "train_micro_batch_size_per_gpu"'
        )


def _check_optimizer(section: Any) -> None:
    if section is None:
        return
    check = {"adam": _check_adams, "adamw": _check_adams, "muon": _check_muons}.get(
        str(section.get("type", "")).lower()
    )
    if check is None:
        return  # refused elsewhere
    parameters = section.get("params")
    if parameters is None:
        return
    if not isinstance(parameters, Mapping):
        raise ConfigError(f'"optimizer.params" is {parameters!r}: write {{"lr": 1e-4}}')
    refuse_all(*(partial(check, name, value) for name, value in parameters.items()))


def _check_muons(name: str, value: Any) -> None:
    key = f"optimizer.params.{name}"
    if name in _CONSTANTS_OF_MUON:
        _refuse(key, value, f"it is fixed at {_CONSTANTS_OF_MUON[name]!r}: remove it")
    if name not in _OF_MUON:
        raise ConfigError(
            f'"{key}" is no parameter of Muon: '
            f"{did_you_mean(name, _OF_MUON) or 'known are ' + ', '.join(_OF_MUON)}".rstrip()
        )
    if name in ("muon_lr", "adam_lr"):
        _check_number(key, value, "as in 1e-3")
    elif name == "momentum":
        _check_number(key, value, "below 1, as in 0.95")
        if value >= 1.0:
            _refuse(key, value, "give a number in [0, 1), as in 0.95")
    elif name == "ns_method" and value not in METHODS:
        _refuse(key, value, f"write {' or '.join(METHODS)}")
    elif name == "per_head_muon" and not isinstance(value, bool):
        _refuse(key, value, "write true or false")
    elif name in _OF_ADAM:
        _check_adams(name, value)


def _check_adams(name: str, value: Any) -> None:
    key = f"optimizer.params.{name}"
    if name == "max_grad_norm":
        raise ConfigError(f'"{key}" is no parameter of an Adam: set "gradient_clipping"')
    if name not in _OF_ADAM:
        raise ConfigError(
            f'"{key}" is no parameter of an Adam: '
            f"{did_you_mean(name, _OF_ADAM) or 'known are ' + ', '.join(_OF_ADAM)}".rstrip()
        )
    if name in ("lr", "eps", "weight_decay"):
        _check_number(key, value, "as in 1e-4")
        if name == "eps" and value < _FLOAT32_TINY:
            remedy = "since a parameter without gradients is divided by it"
            _refuse(key, value, f"give a number above 0, as in 1e-8, {remedy}")
    elif name in _FLAGS_OF_ADAM and not isinstance(value, bool):
        _refuse(key, value, "write true or false")
    elif name == "betas":
        _check_betas(key, value)


def _check_betas(key: str, value: Any) -> None:
    _refuse_auto(key, value)
    numbers = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
    is_pair = len(numbers) == 2 and all(
        isinstance(beta, (int, float)) and not isinstance(beta, bool) and 0.0 <= beta < 1.0
        for beta in numbers
    )
    if not is_pair:
        _refuse(key, value, "give two numbers in [0, 1), as in [0.9, 0.999]")


def _check_scheduler(section: Any) -> None:
    if section is None or section.get("type") is None:
        return
    kind = _scheduler_class(section["type"])
    parameters = section.get("params") or {}
    if not isinstance(parameters, Mapping):
        raise ConfigError(f'"scheduler.params" is {parameters!r}: write a JSON object, {{...}}')
    known = list(inspect.signature(kind).parameters)[1:]  # the first is the optimizer
    for name, value in parameters.items():
        _refuse_auto(f"scheduler.params.{name}", value)
        if name not in known:
            raise ConfigError(
                f'"scheduler.params.{name}" is no parameter of {section["type"]}: '
                f"{did_you_mean(name, known)}known are {', '.join(known)}"
            )
    try:
        inspect.signature(kind).bind(None, **parameters)
    except TypeError as error:
        raise ConfigError(f'"scheduler.params" of {section["type"]}: {error}') from None


def _scheduler_class(name: Any) -> type:
    """Returns DeepSpeed's schedule of that name, or else torch's, as DeepSpeed looks it up."""
    for home in (lr_schedules, torch.optim.lr_scheduler):
        found = getattr(home, str(name), None)
        if isinstance(found, type):
            return found
    known = lr_schedules.VALID_LR_SCHEDULES
    raise ConfigError(
        f'"scheduler.type" is {name!r}: {did_you_mean(name, known)}DeepSpeed has '
        f"{', '.join(known)}, and those of torch.optim.lr_scheduler"
    )


def refuse_misplaced_section(config: Mapping[str, Any]) -> None:
    """Raises a ConfigError if the "hytrain" section is inside a section of DeepSpeed's."""
    for name, value in config.items():
        if name != SECTION and isinstance(value, Mapping) and SECTION in value:
            raise ConfigError(
                f'the section "{SECTION}" is inside of "{name}": move it to the top level of the '
                f'configuration, beside "{name}"'
            )
