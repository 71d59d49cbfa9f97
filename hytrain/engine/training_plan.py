"""Training by a plan: checks that it is for this job, and turns it into configuration.

All ranks exchange what they found before anything is touched, and come to one verdict: a
plan for other devices, another model or another batch is refused on all of them, with the
difference.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hytrain.comm.collectives import ShardCollectives
from hytrain.config import SECTION, HyTrainConfig
from hytrain.engine.deepspeed_internals import is_partitioned, shape_partitioned, use_checkpointing
from hytrain.errors import ConfigError, HyTrainError, PlanError
from hytrain.formats.moment_kinds import FP32
from hytrain.formats.plan_file import (
    Actual,
    ActualRank,
    PlanFile,
    PlannedRank,
    difference,
    parse_plan,
)
from hytrain.formats.policies import LAYER_MAJOR
from hytrain.hardware.device_facts import device_facts
from hytrain.hardware.host_share import machine_identity, share_host
from hytrain.model.discovery import can_be_sharded, find_layers
from hytrain.placement.allocator_watch import advise_on_gaps

logger = logging.getLogger(__name__)

_DECIDED = ("batch_sizes", "micro_batch_sizes", "shard_fractions", "accumulation", "activations")
# Share of the state: a configuration does not allow ranks without any.
_LEAST_SHARD = 1e-6


_Found = tuple[str, Actual]
"""What a rank found: the plan's digest, and its device, its model and its configuration."""


def find_plan(name: str, config_file: Path | None) -> Path:
    """Finds the plan that a configuration names, also beside its own file; else a ConfigError."""
    path = Path(name)
    places = [Path.cwd() / path]
    if config_file is not None and not path.is_absolute():
        places.insert(0, config_file.resolve().parent / path)
    for place in places:
        if place.is_file():
            return place
    tried = " and ".join(dict.fromkeys(str(place) for place in places))
    raise ConfigError(
        f'"{SECTION}.plan" is "{name}", but there is no file {tried}: `hytrain plan --out` makes '
        "one"
    )


def adopt_plan(
    config: Mapping[str, Any],
    section: HyTrainConfig,
    model: nn.Module,
    device: torch.device,
    config_file: Path | None,
) -> HyTrainConfig:
    """Returns the section with its plan's decisions for this rank; a collective.

    If the plan counts on recomputed activations, checkpointing is turned on in a model that has a
    switch for it; nothing else of the model is touched.

    Raises:
        PlanError: the plan cannot be read, or is for another job; raised on all ranks.
        ConfigError: a key sets what the plan decides.
    """
    check_keys(config, section)
    collectives = ShardCollectives(None)
    share = share_host(collectives)
    texts: list[str] = []
    paths: list[Path] = []

    def find() -> _Found:
        assert section.plan is not None, "there is one"
        paths.append(find_plan(section.plan, config_file))
        texts.append(paths[0].read_text(encoding="utf-8"))
        facts = device_facts(device, ranks_on_host=share.ranks)
        rank = ActualRank(machine_identity(), facts.name, facts.limit_bytes, facts.multiprocessors)
        trained = [p for p in model.parameters() if p.requires_grad]
        layers = find_layers(model, trained, section.layers.block_class)
        return hashlib.sha256(texts[0].encode()).hexdigest(), Actual(
            ranks=[rank],
            num_layers=sum(layer.block is not None for layer in layers),
            parameters=sum(_numel(p) for p in trained),
            frozen=sum(_numel(p) for p in model.parameters() if _is_frozen(p)),
            **asked(config, section),
        )

    found = _tell_all(find, collectives)
    if len({digest for digest, _ in found}) > 1:
        raise PlanError(
            f'ranks read different files for "{SECTION}.plan" ({paths[0]} here): copy one to all '
            "hosts"
        )
    plan = parse_plan(texts[0], paths[0])
    ranks = [rank for _, actual in found for rank in actual.ranks]
    # Models and configurations have been compared: they are alike.
    first = found[0][1]
    batch = first.global_batch or plan.global_batch
    refuse_other_job(plan, replace(first, ranks=ranks, global_batch=batch), paths[0])
    own = plan.ranks[collectives.rank]
    _use_activations(model, own, collectives.rank)
    if device.type == "cuda":
        advise_on_gaps(own.gpu_bytes, ranks[collectives.rank].memory_bytes)
    return planned_section(config[SECTION], section, plan, own, paths[0])


def refuse_other_job(plan: PlanFile, actual: Actual, path: Path) -> None:
    """Raises a PlanError if the plan is not for this job."""
    if words := difference(plan, actual):
        raise PlanError(
            f"the plan {path} is for another job: {'; '.join(words)}. Nothing was touched: "
            "plan again with `hytrain plan`, or train what was planned"
        )


def asked(config: Mapping[str, Any], section: HyTrainConfig) -> dict[str, Any]:
    """Returns a configuration's part of :class:`Actual`; ``global_batch`` is 0 if not set."""
    return {
        "stage": int(config.get("zero_optimization", {}).get("stage", 0)),
        "global_batch": config.get("train_batch_size") or 0,
        "dtype": _dtype(config),
        "offload_param": _offload_param(config),
        "moments": section.moments,
    }


def check_keys(config: Mapping[str, Any], section: HyTrainConfig) -> None:
    """Refuses keys that do not go with a plan.

    Raises:
        PlanError: master weights are split.
        ConfigError: a key sets what the plan decides.
    """
    if section.master != FP32:
        raise PlanError(
            f'"{SECTION}.plan" with "{SECTION}.master": "{section.master}": plans are made for '
            "fp32 master weights alone; remove one of the two keys"
        )
    given = [key for key in _DECIDED if config[SECTION].get(key) is not None]
    if dict(config[SECTION].get("solver") or {}).get("start") is not None:
        given.append("solver.start")
    if given:
        names = ", ".join(f'"{SECTION}.{key}"' for key in given)
        raise ConfigError(
            f'"{SECTION}.plan" decides what {names} would: leave these out, or the plan'
        )


def _tell_all(find: Callable[[], _Found], collectives: ShardCollectives) -> list[_Found]:
    """Returns what every rank found; a failure on one rank is raised on all."""
    answer: _Found | str
    try:
        answer = find()
    except Exception as error:
        # The others wait for an answer, whatever it is.
        answer = str(error) if isinstance(error, HyTrainError) else repr(error)
    answers: list[_Found | str] = collectives.gather_objects(answer, "the ranks' plans")
    failures = {rank: one for rank, one in enumerate(answers) if isinstance(one, str)}
    if failures:
        words = {
            text: [r for r, own in failures.items() if own == text] for text in failures.values()
        }
        raise PlanError(
            "; ".join(
                text if len(ranks) == len(answers) else f"rank {', '.join(map(str, ranks))}: {text}"
                for text, ranks in words.items()
            )
        )
    return [one for one in answers if not isinstance(one, str)]


def _numel(parameter: nn.Parameter) -> int:
    """Returns the elements of the whole parameter, also if ``zero.Init`` has partitioned it."""
    is_part = is_partitioned(parameter)
    return shape_partitioned(parameter).numel() if is_part else parameter.numel()


def _is_frozen(parameter: nn.Parameter) -> bool:
    return not parameter.requires_grad and (is_partitioned(parameter) or can_be_sharded(parameter))


def _dtype(config: Mapping[str, Any]) -> str:
    for name in ("bf16", "fp16"):
        if dict(config.get(name) or {}).get("enabled") is True:
            return name
    return "fp32"


def _offload_param(config: Mapping[str, Any]) -> str | None:
    section = dict(config.get("zero_optimization") or {}).get("offload_param")
    device = dict(section or {}).get("device")
    return None if device in (None, "none") else str(device)


def _use_activations(model: nn.Module, own: PlannedRank, rank: int) -> None:
    """Turns recomputation on if it is planned and the model has a switch."""
    if own.activations in LAYER_MAJOR or own.batch_size == 0:
        return  # train_batch recomputes by itself
    is_planned = own.activations == "recompute"
    found = use_checkpointing(model, wanted=is_planned)
    if found is None and is_planned:
        logger.warning(
            "rank %d: the plan counts on activations that are computed again, and the model has no "
            "gradient_checkpointing_enable(): turn checkpointing on in it",
            rank,
        )
    elif found and not is_planned:
        logger.warning(
            "rank %d: the model computes activations again, the plan counts on stored ones: the "
            "step will be longer than predicted",
            rank,
        )


def planned_section(
    given: Mapping[str, Any],
    section: HyTrainConfig,
    plan: PlanFile,
    own: PlannedRank,
    path: Path,
) -> HyTrainConfig:
    """Returns the "hytrain" section with the plan's decisions."""
    fractions = [max(rank.shard_fraction, _LEAST_SHARD) for rank in plan.ranks]
    decided: dict[str, Any] = {
        "plan": str(path),
        "batch_sizes": [rank.batch_size for rank in plan.ranks],
        "micro_batch_sizes": [max(1, rank.microbatch_size) for rank in plan.ranks],
        "shard_fractions": [fraction / sum(fractions) for fraction in fractions],
    }
    if section.gpu_fraction == "solve":
        start = [rank.gpu_layers for rank in plan.ranks]
        decided["solver"] = {**dict(given.get("solver") or {}), "start": start}
    if own.activations in LAYER_MAJOR:
        decided |= {"accumulation": "layer_major", "activations": own.activations}
    return HyTrainConfig.model_validate({**given, **decided})
