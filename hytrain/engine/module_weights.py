"""The module's weights, wherever the ranks keep them: names, and DeepSpeed's keys of ZeRO-3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hytrain.engine.deepspeed_internals import DeepSpeedEngine
from hytrain.optimizer.layer_guards import LayerGuards
from hytrain.zero3.plan import GatherSettings


def module_tensors(module: nn.Module, guards: LayerGuards) -> Mapping[str, Any]:
    """The module's state dict as it is, with nothing waited for: for names and shapes."""
    with guards.reading_names():
        return module.state_dict(keep_vars=True)


def gather_settings(engine: DeepSpeedEngine) -> GatherSettings:
    """DeepSpeed's keys of ZeRO-3."""
    config: Any = vars(engine)["_config"]
    zero = config.zero_config
    return GatherSettings(
        prefetch=int(zero.prefetch_bucket_size),
        max_live=int(zero.max_live_parameters),
        max_reuse=int(zero.max_reuse_distance),
        persistence=int(zero.param_persistence_threshold),
        max_persistent=int(zero.model_persistence_threshold),
    )


def offloads_weights(engine: DeepSpeedEngine) -> bool:
    """Whether the training copy is kept in host memory."""
    offload: Any = engine.zero_offload_param()
    return offload is not None and bool(offload.device == "cpu")
