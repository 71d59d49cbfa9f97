"""``initialize``: deepspeed.initialize's arguments and return values, with HyTrainEngine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed

from hytrain._deepspeed import (
    avoid_cpu_communication_build,
    check_version,
    engine_class,
    load_config,
    refuse_unsupported,
    refuse_unsupported_model,
)
from hytrain.config import HyTrainConfig
from hytrain.engine import HyTrainEngine
from hytrain.errors import ConfigError

# Kept: whoever puts hytrain's in the place of ``deepspeed.initialize`` must not call itself.
_deepspeed_initialize = deepspeed.initialize


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: str | Path | Mapping[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | Mapping[str, Any] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Builds the engine. Arguments are those of ``deepspeed.initialize``, by name or position.

    A configuration with a "hytrain" section (see ds_configs/README.md) gives a
    :class:`~hytrain.engine.HyTrainEngine`; without one the call is plain ``deepspeed.initialize``.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)``.

    Raises:
        ConfigError: the section, or its fit to model and job, is wrong; nothing was changed.
        UnsupportedError: the configuration asks for what hytrain does not do.
    """
    avoid_cpu_communication_build()
    keywords: dict[str, Any] = {
        "args": args, "model": model, "optimizer": optimizer,
        "model_parameters": model_parameters, "training_data": training_data,
        "lr_scheduler": lr_scheduler, "mpu": mpu, "dist_init_required": dist_init_required,
        "collate_fn": collate_fn, "config": config, "mesh_param": mesh_param,
        "config_params": config_params,
    }  # fmt: skip
    if distributed_port is not None:
        keywords["distributed_port"] = distributed_port
    given = config if config is not None else config_params
    if given is None and args is not None:
        given = vars(args).get("deepspeed_config")
    if given is None:
        raise ConfigError(
            "no configuration was given: pass config=... (a dict or a file), or start with "
            "--deepspeed_config FILE"
        )
    loaded = load_config(given)
    section = HyTrainConfig.from_deepspeed(loaded)
    if section is None:
        return tuple(_deepspeed_initialize(**keywords))  # type: ignore[return-value]
    check_version()
    section.fixed_gpu_fraction  # noqa: B018 - refuses "solve" before anything is built
    refuse_unsupported(loaded)
    refuse_unsupported_model(model)
    with engine_class(HyTrainEngine):
        built = _deepspeed_initialize(**keywords)
    return tuple(built)  # type: ignore[return-value]
