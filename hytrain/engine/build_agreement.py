"""Compares what must be equal on all ranks, before an engine is built.

Ranks whose configurations differ would silently train their parts of the model in different ways,
or hang in collectives that do not match.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hytrain.comm.agreement import compare, stay_away
from hytrain.comm.collectives import ShardCollectives
from hytrain.config import SECTION, HyTrainConfig
from hytrain.engine.deepspeed_internals import (
    deepspeed_version,
    is_partitioned,
    shape_partitioned,
    state_group_of,
)
from hytrain.errors import ConfigError
from hytrain.model.discovery import find_layers
from hytrain.version import __version__

logger = logging.getLogger(__name__)

_DECIDES_TRAINING = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    "optimizer", "scheduler", "zero_optimization", "bf16", "bfloat16", "fp16", "torch_autocast",
    "data_types", "checkpoint", "compile", "gradient_clipping", "communication_data_type",
    "gradient_allreduce_op", "activation_checkpointing", "data_efficiency", "curriculum_learning",
    "dataloader_drop_last", "seed", "sequence_parallel_size", "data_parallel_size",
    "seq_parallel_communication_data_type",
)  # fmt: skip
"""DeepSpeed's sections and keys that are compared; others print, log or measure, or are unknown."""
_OF_A_RANK = (
    f"{SECTION}.gpu_fraction", f"{SECTION}.solver", f"{SECTION}.trace", f"{SECTION}.metrics",
    f"{SECTION}.wait_in_stream",
    f"{SECTION}.offload.chunk_elements", "zero_optimization.offload_optimizer.pin_memory",
    "zero_optimization.offload_param.pin_memory",
)  # fmt: skip
"""Keys whose values may differ between ranks."""
_GIVEN_OR_NOT = (
    f"{SECTION}.plan", f"{SECTION}.checkpoint.sigterm_dir", f"{SECTION}.offload.cpu_threads"
)  # fmt: skip
"""Keys that all ranks or none must give; their values are a host's."""
_ENGINE = "the engine"
_SAMPLED = 4
"""Elements of each parameter that tell whether ranks begin with the same weights."""


def require_one_job(
    config: Mapping[str, Any],
    section: HyTrainConfig,
    model: nn.Module,
    optimizer: Any,
    mpu: Any,
) -> None:
    """Compares this rank's build with that of the others, before anything is touched.

    Raises:
        ConfigError: they differ; the message names keys, values, ranks and hosts, the same on all.
        RankFailedError: a rank did not take part.
    """
    if dist.get_world_size() == 1:
        return
    facts = {
        _ENGINE: "one of hytrain's",
        "the version of hytrain": __version__,
        "the version of torch": str(torch.__version__),
        "the version of DeepSpeed": deepspeed_version(),
        **_of_config(config, section),
        **_of_model(model, section),
    }
    if isinstance(optimizer, torch.optim.Optimizer):
        facts |= _of_groups(model, optimizer)
    group = state_group_of(mpu)
    found = compare(facts, group, sample=_sample(model))
    _refuse(found.differences)
    if found.other_samples and dist.get_rank(group) == 0:
        logger.warning(
            "the model's weights on ranks %s are not those of rank %d, whose are used (another "
            "seed, or another checkpoint?)",
            found.other_samples,
            dist.get_rank(),
        )


def require_one_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, ranks: ShardCollectives
) -> None:
    """Compares the parameter groups, which a callable or DeepSpeed has made only now.

    Raises:
        ConfigError: they differ; no state has been built.
    """
    if ranks.world_size > 1:
        _refuse(compare(_of_groups(model, optimizer), ranks.group).differences)


def tell_of_plain_engine(why: str) -> None:
    """Tells the others that this rank builds plain DeepSpeed's engine, which does not compare."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        stay_away({_ENGINE: f"DeepSpeed's own ({why})"}, None)


def _refuse(differences: Sequence[str]) -> None:
    if differences:
        raise ConfigError(
            "the ranks do not build the same engine: make it alike on all of them. Nothing was "
            "built:\n  " + "\n  ".join(differences)
        )


def _of_config(config: Mapping[str, Any], section: HyTrainConfig) -> dict[str, str]:
    compared = {key: config[key] for key in _DECIDES_TRAINING if key in config}
    compared[SECTION] = section.model_dump(mode="json", by_alias=True)
    facts = dict(_leaves(compared, ""))
    for key in _GIVEN_OR_NOT:
        facts[f'"{key}"'] = "given" if f'"{key}"' in facts else "not there"
    return facts


def _leaves(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yields the paths of keys and their values as JSON; null counts as not given."""
    if path in _OF_A_RANK or value is None:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
        return
    # 1 and 1.0 are equal.
    is_whole = isinstance(value, float) and value.is_integer()
    yield f'"{path}"', json.dumps(int(value) if is_whole else value, default=str)


def _of_model(model: nn.Module, section: HyTrainConfig) -> dict[str, str]:
    layers = find_layers(model, model.parameters(), section.layers.block_class)
    facts = {"the number of layers found": str(len(layers))}
    for name, parameter in model.named_parameters():
        shape = shape_partitioned(parameter) if is_partitioned(parameter) else parameter.shape
        kind = "trained" if parameter.requires_grad else "frozen"
        facts[f"parameter '{name}'"] = f"{tuple(shape)}, {parameter.dtype}, {kind}"
    return facts


def _of_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    facts = {"the optimizer": type(optimizer).__name__}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for index, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params":
                facts[f'parameter group {index}: "{key}"'] = json.dumps(value, default=str)
        for at, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"number {at}, which is not the model's")
            facts[f"the parameter group of '{name}'"] = str(index)
    return facts


def _sample(model: nn.Module) -> str:
    """Returns checksums of a few elements of each parameter that can be read directly."""
    pieces: list[torch.Tensor] = []
    for parameter in model.parameters():
        if is_partitioned(parameter) or type(parameter.data) is not torch.Tensor:
            continue
        row = torch.view_as_real(parameter) if parameter.is_complex() else parameter
        row = row.detach()
        while row.dim() > 1 and row.shape[0]:
            row = row[0]
        pieces.append(row.reshape(-1)[:_SAMPLED].double())
    devices = {piece.device for piece in pieces}
    values = [torch.cat([p for p in pieces if p.device == device]).cpu() for device in devices]
    return str([zlib.crc32(value.numpy().tobytes()) for value in values])
