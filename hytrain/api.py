"""``initialize``: deepspeed.initialize's arguments and return values, with HyTrainEngine."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from pydantic import ValidationError

from hytrain.config import HyTrainConfig
from hytrain.engine.build_agreement import require_one_job, tell_of_plain_engine
from hytrain.engine.build_arguments import checked_arguments, refuse_unknown
from hytrain.engine.config_checks import (
    check_config,
    check_sections,
    explain_assertion,
    explain_deepspeeds,
    misspelt_keys,
    refuse_misplaced_section,
)
from hytrain.engine.deepspeed_internals import (
    ForcedOptimizerError,
    avoid_cpu_communication_build,
    engine_class,
    join_ranks,
    load_config,
)
from hytrain.engine.engine import HyTrainEngine
from hytrain.engine.foreign_checkpoints import offer_conversions
from hytrain.engine.run_report import show_lines
from hytrain.engine.sequence_groups import mesh_of, refuse_dealt_batches, sequence_degree_of
from hytrain.engine.trainer_reuse import TrainerReuse
from hytrain.engine.training_plan import adopt_plan
from hytrain.engine.unsupported import (
    refuse_miscounted_ranks,
    refuse_unsupported,
    refuse_unsupported_model,
)
from hytrain.errors import ConfigError
from hytrain.hardware.compile_locks import find_locks
from hytrain.model.discovery import find_layers
from hytrain.model.partition import partition
from hytrain.optimizer.hyper import check_optimizer

logger = logging.getLogger(__name__)

# Kept: hytrain's function, in place of ``deepspeed.initialize``, must not call itself.
_original_initialize = deepspeed.initialize
_building = threading.local()
_untrained: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Any]] = (
    weakref.WeakKeyDictionary()
)
"""Engines without an optimizer that were built here, keyed by model."""
_evaluated: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models that a Trainer says it will only evaluate."""
_trainers = TrainerReuse(_evaluated.add)


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
    **unknown: Any,
) -> tuple[Any, Any, Any, Any]:
    """Builds the engine. Arguments are those of ``deepspeed.initialize``, by name or position.

    A configuration with a "hytrain" section (its keys: docs/configuration.md) gives a
    :class:`~hytrain.engine.HyTrainEngine`; without one the call is plain ``deepspeed.initialize``.
    With neither ``optimizer`` nor an "optimizer" section the engine is plain DeepSpeed's too, with
    a warning, in ZeRO stage 3 or 0: for evaluation before training and for reference models.

    Args:
        args: an object with ``deepspeed_config``, the path of a JSON, in place of ``config``.
        model: the ``nn.Module`` to train, on the host or the device.
        optimizer: a torch optimizer of a supported kind (Adam, AdamW; others: docs/muon.md), whose
            groups are taken over, or a callable that makes one from the parameters; None: the one
            that the configuration names.
        model_parameters: parameters, or groups of them, if ``optimizer`` is None.
        training_data: a dataset, for which a loader is made.
        lr_scheduler: a scheduler, or a function that makes one from the optimizer.
        distributed_port: port of torch's store, if the process group is started here.
        mpu: describes the groups of ranks, as returned by ``UlyssesSPAttentionHF``.
        dist_init_required: whether to start the process group; None: if there is none yet.
        collate_fn: for the loader of ``training_data``.
        config: path of a JSON file, or a mapping with its content.
        mesh_param: numbers of ``(data, sequence)`` ranks, in place of an ``mpu``.
        config_params: DeepSpeed's older name for ``config``.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)``.

    Raises:
        ConfigError: the section is wrong or does not fit model and job, an argument is of the wrong
            kind, ranks differ, or there is no optimizer in ZeRO stage 1 or 2; nothing was changed.
        PlanError: ``"hytrain.plan"`` is for another job; nothing was changed.
        UnsupportedError: the configuration asks for something that hytrain does not support.
    """
    Registration.was_used = True
    show_lines()
    avoid_cpu_communication_build()
    _warn_of_stale_locks()
    keywords: dict[str, Any] = {
        "args": args, "model": model, "optimizer": optimizer,
        "model_parameters": model_parameters, "training_data": training_data,
        "lr_scheduler": lr_scheduler, "mpu": mpu, "dist_init_required": dist_init_required,
        "collate_fn": collate_fn, "config": config, "mesh_param": mesh_param,
        "config_params": config_params,
    }  # fmt: skip
    if distributed_port is not None:
        keywords["distributed_port"] = distributed_port
    refuse_unknown(unknown, (*keywords, "distributed_port"))
    loaded = load_config(_given_config(args, config, config_params))
    refuse_misplaced_section(loaded)
    section = HyTrainConfig.from_deepspeed(loaded)
    if section is None:
        tell_of_plain_engine('the configuration has no section "hytrain"')
        return _deepspeed_initialize(**keywords)  # type: ignore[return-value]
    check_sections(loaded)
    for key, meant in misspelt_keys(loaded):
        logger.warning('"%s" is no key of DeepSpeed, and is ignored: "%s"?', key, meant)
    offer_conversions()
    if deepspeed.initialize is initialize:
        _trainers.install()  # in case transformers was imported after register()
    if optimizer is None and not _names_optimizer(loaded):
        return _initialize_untrained(loaded, section, keywords)
    keywords = checked_arguments(keywords)
    check_config(
        loaded, batches_elsewhere=section.batch_sizes is not None or section.plan is not None
    )
    refuse_unsupported(loaded)
    _end_untrained(model)
    refuse_unsupported_model(model, loaded["zero_optimization"]["stage"])
    _check_forced(loaded, optimizer)
    _check_fit(section, model, optimizer, mpu)
    device = join_ranks(
        args, distributed_port=distributed_port, dist_init_required=dist_init_required
    )
    refuse_miscounted_ranks(dist.get_world_size())
    keywords["mesh_param"] = mesh = mesh_of(loaded, mpu, mesh_param, dist.get_world_size())
    refuse_dealt_batches(section, sequence_degree_of(mpu) if mesh is None else mesh[1])
    require_one_job(loaded, section, model, optimizer, mpu)
    if section.plan is not None:
        section = _with_plan(loaded, section, keywords, device)
    if section.batch_sizes is not None:
        keywords["config"] = _with_unequal_batches(loaded, section.batch_sizes)
        keywords["config_params"] = None
    return _build(loaded, section, keywords)


def _build(
    loaded: Mapping[str, Any], section: HyTrainConfig, keywords: Mapping[str, Any]
) -> tuple[Any, Any, Any, Any]:
    """Calls DeepSpeed's initialize with hytrain's engine; errors say what to change."""
    try:
        with engine_class(partial(HyTrainEngine, section)):
            return _deepspeed_initialize(**keywords)  # type: ignore[return-value]
    except ValidationError as error:  # of DeepSpeed's sections, before anything is built
        raise explain_deepspeeds(error, loaded) from None
    except AssertionError as error:
        explained = explain_assertion(error, loaded)
        if explained is None:
            raise
        raise explained from None


def _initialize_untrained(
    loaded: dict[str, Any], section: HyTrainConfig, keywords: dict[str, Any]
) -> tuple[Any, Any, Any, Any]:
    """Builds plain DeepSpeed's engine for a model without an optimizer."""
    model, reason = keywords["model"], "no optimizer was given"
    is_module = isinstance(model, torch.nn.Module)
    if is_module and model in _evaluated:
        _evaluated.discard(model)
        loaded = _for_evaluation(loaded)
        reason = "the Trainer evaluates before it trains"
    config = _without_training(loaded, section, reason)
    tell_of_plain_engine(reason)
    untrained = _deepspeed_initialize(**(keywords | {"config": config, "config_params": None}))
    if is_module:
        _untrained[model] = weakref.ref(untrained[0])
    return untrained  # type: ignore[return-value]


def _warn_of_stale_locks() -> None:
    for lock in find_locks():
        if lock.is_stale and os.environ.get("RANK", "0") == "0":
            logger.warning(
                "%s is %.0f minutes old: a start of DeepSpeed that compiles the extension there "
                "waits for it for ever; delete it unless another process compiles right now",
                lock.path,
                lock.seconds / 60,
            )


def _given_config(args: Any, *named: Any) -> Any:
    """The configuration, or the name of its file.

    Raises:
        ConfigError: there is none, or more than one.
    """
    # The second is DeepSpeed's old name, which it still accepts.
    names = ("deepspeed_config", "deepscale_config")
    every = [*named, *(getattr(args, name, None) for name in names)]
    given = [each for each in every if each is not None]
    if len(given) != 1:
        seen = f"{len(given)} configurations were" if given else "no configuration was"
        raise ConfigError(
            f"{seen} given: pass config=... (a dict or a file), or start with "
            "--deepspeed_config FILE"
        )
    return given[0]


def _deepspeed_initialize(**keywords: Any) -> tuple[Any, ...]:
    """Calls DeepSpeed's own ``initialize``.

    Raises:
        ConfigError: the function found under that name calls hytrain's again.
    """
    if getattr(_building, "depth", 0):
        raise ConfigError(
            "deepspeed.initialize was replaced by a function that calls hytrain.initialize before "
            "hytrain had seen DeepSpeed's own: the two would call each other for ever. Replace it "
            "by `with hytrain.register():`, or `import hytrain.api` before"
        )
    _building.depth = 1
    try:
        return tuple(_original_initialize(**keywords))
    finally:
        _building.depth = 0


def _names_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether DeepSpeed would build an optimizer from the configuration."""
    section = config.get("optimizer")
    return isinstance(section, Mapping) and section.get("type") is not None


def _for_evaluation(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration, with ZeRO stages 1 and 2 made 0: there is no optimizer state to shard."""
    is_whole = _stage(config) in (1, 2)
    return {**config, "zero_optimization": {"stage": 0}} if is_whole else dict(config)


def _stage(config: Mapping[str, Any]) -> Any:
    """The ZeRO stage as configured, unchecked; 0 if there is none."""
    zero = config.get("zero_optimization")
    return zero.get("stage", 0) if isinstance(zero, Mapping) else 0


def _without_training(
    config: Mapping[str, Any], section: HyTrainConfig, reason: str
) -> dict[str, Any]:
    """The configuration for plain DeepSpeed's engine without an optimizer; logs the reason.

    Raises:
        ConfigError: DeepSpeed has no such engine in this ZeRO stage.
    """
    stage = _stage(config)
    if stage in (1, 2):
        raise ConfigError(
            'no optimizer was given: add an "optimizer" section to the configuration or pass '
            "optimizer=torch.optim.AdamW(...). A model that is not trained needs another "
            f'"zero_optimization.stage" than {stage}: 3, where its weights are to be sharded, or 0'
        )
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s: this is an engine of plain DeepSpeed, for a model that is not trained (ZeRO stage "
            '%s), and "hytrain" is not used. To train, call train(); in a loop of your own, add an '
            '"optimizer" section to the configuration or pass optimizer=torch.optim.AdamW(...)',
            reason,
            stage,
        )
    if section.plan is None and section.batch_sizes is None:
        return dict(config)
    # The plan or batch_sizes give each rank's batch in training; DeepSpeed always wants one.
    rest = {key: value for key, value in config.items() if key != "train_batch_size"}
    return {**rest, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}


def _end_untrained(model: Any) -> None:
    """Destroys the engine without an optimizer, if one has this model, which is to be trained.

    Example: one Trainer evaluates it before another one trains it; in ZeRO-3 both would gather.
    """
    found = _untrained.pop(model, None) if isinstance(model, torch.nn.Module) else None
    engine = None if found is None else found()
    if engine is not None:
        logger.info("an engine without an optimizer had this model: it is destroyed")
        engine.destroy()


def _check_forced(config: Mapping[str, Any], optimizer: Any) -> None:
    """Refuses torch's optimizer, as DeepSpeed would, if the configuration forces DeepSpeed's.

    Only if the key is written: DeepSpeed's default, true, does not count here.

    Raises:
        ForcedOptimizerError: ``zero_force_ds_cpu_optimizer`` is true and the optimizer is torch's.
    """
    # DeepSpeed's own optimizers are not subclasses of these.
    is_torchs = isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))
    if is_torchs and config.get("zero_force_ds_cpu_optimizer") is True:
        raise ForcedOptimizerError(
            '"zero_force_ds_cpu_optimizer" is true and the optimizer a '
            f"torch.optim.{type(optimizer).__name__}: hytrain updates in the place of either, so "
            'set it to false, or write the optimizer as a section "optimizer"'
        )


def _check_fit(section: HyTrainConfig, model: Any, optimizer: Any, mpu: Any) -> None:
    """Checks what can be checked of model, optimizer and job before DeepSpeed converts the model.

    Raises:
        ConfigError: the section does not fit them.
        UnsupportedError: the optimizer, or one of its options, is not supported.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        check_optimizer(optimizer)
    if isinstance(model, torch.nn.Module):
        find_layers(model, model.parameters(), section.layers.block_class)
    world = os.environ.get("WORLD_SIZE", "")
    ranks = dist.get_world_size() if dist.is_initialized() else int(world or 0)
    if mpu is None and section.shard_fractions is not None and ranks:
        partition([], ranks, section.shard_fractions)
    shares = section.batch_shares()
    if shares is not None and ranks:
        shares.check_ranks(ranks)


def _with_plan(
    config: Mapping[str, Any],
    section: HyTrainConfig,
    keywords: Mapping[str, Any],
    device: torch.device,
) -> HyTrainConfig:
    """The section with what its plan decides; a collective.

    Raises:
        PlanError: the plan is for another job.
        ConfigError: a key sets what the plan decides.
    """
    source = keywords["config"] if keywords["config"] is not None else keywords["config_params"]
    if source is None:
        source = vars(keywords["args"]).get("deepspeed_config")
    # Not Path.is_file(), which raises if the "name" is a long base64 configuration.
    is_file = isinstance(source, (str, Path)) and os.path.isfile(source)
    return adopt_plan(config, section, keywords["model"], device, Path(source) if is_file else None)


def _with_unequal_batches(config: Mapping[str, Any], sizes: Sequence[int]) -> dict[str, Any]:
    """The configuration without DeepSpeed's own batch keys, which can only express equal batches.

    Raises:
        ConfigError: its ``train_batch_size`` is not the sum of the sizes.
    """
    given = config.get("train_batch_size")
    if given is not None and given != sum(sizes):
        raise ConfigError(
            f'"train_batch_size" is {given} but "hytrain.batch_sizes" sums to {sum(sizes)}: make '
            "them equal, or leave the former out"
        )
    rest = {k: v for k, v in config.items() if k != "train_batch_size"}
    # DeepSpeed requires both; 1 is neutral.
    instead = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    unused = [f'"{key}" {rest[key]}' for key in instead if rest.get(key, 1) not in (1, "auto")]
    if unused and os.environ.get("RANK", "0") == "0":
        logger.warning(
            '%s is not used: "hytrain.batch_sizes", or the plan, says how much each rank computes. '
            "Leave the key out",
            " and ".join(unused),
        )
    return {**rest, **instead}


class Registration:
    """hytrain's ``initialize`` in DeepSpeed's place, until :meth:`undo` or the block's end."""

    was_used: ClassVar[bool] = False
    """Whether ``initialize`` was called in this process."""

    def __init__(self) -> None:
        self._replaced = deepspeed.initialize
        offer_conversions()
        deepspeed.initialize = initialize
        _trainers.install()

    def undo(self) -> None:
        """Puts back what was there before. May be called twice."""
        if deepspeed.initialize is initialize:
            deepspeed.initialize = self._replaced
        if deepspeed.initialize is not initialize:
            _trainers.undo()

    def __enter__(self) -> Registration:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()
        if not Registration.was_used and not any(exception):
            logger.warning(
                "nothing in the block of hytrain.register() called deepspeed.initialize: hytrain "
                "is not used. Put the call that builds the engine inside (train(), prepare()), and "
                "start with DeepSpeed (`deepspeed ...`, `accelerate launch --use_deepspeed ...`)"
            )


def register() -> Registration:
    """Makes ``deepspeed.initialize`` build hytrain's engine, for code that calls it itself.

    transformers' Trainer and accelerate look the name up when they prepare a model: call this
    before, or run them inside ``with hytrain.register():``. Configurations without a "hytrain"
    section still give plain DeepSpeed, and so do models without an optimizer: see
    :func:`initialize`.

    Returns:
        A handle that undoes it.
    """
    return Registration()
