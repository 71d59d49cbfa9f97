"""Refuses the configurations that training refuses, without a model or ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from hytrain.config import SECTION, HyTrainConfig
from hytrain.engine.config_checks import (
    BATCH_KEYS,
    check_config,
    check_sections,
    explain_assertion,
    explain_deepspeeds,
    misspelt_keys,
    refuse_misplaced_section,
)
from hytrain.engine.deepspeed_internals import DeepSpeedConfig
from hytrain.engine.training_plan import (
    asked,
    check_keys,
    find_plan,
    planned_section,
    refuse_other_job,
)
from hytrain.engine.unsupported import refuse_unsupported
from hytrain.errors import ConfigError, UnsupportedError, refuse_all
from hytrain.formats.plan_file import Actual, ActualRank, read_plan
from hytrain.placement.costs import num_blocks
from hytrain.tools.explain.model_report import ModelSizes

NO_BATCH = (
    f'Warning: no batch size: Lightning\'s strategy adds one, else set "{BATCH_KEYS[1]}", without '
    "which training refuses this."
)
_FORCED = "zero_force_ds_cpu_optimizer"
_NEEDS_COMPILER = (
    f'Warning: "{_FORCED}" is not false: Trainer and accelerate then make DeepSpeed\'s CPU Adam, '
    "which takes a compiler and which hytrain does not use."
)


def read_as_training(config: Mapping[str, Any]) -> tuple[HyTrainConfig | None, list[str]]:
    """The "hytrain" section, None without one, and lines about keys that training ignores.

    Values "auto", which a trainer fills in, are skipped.

    Raises:
        ConfigError: values are wrong, or keys unknown in a section that is checked.
        UnsupportedError: hytrain does not support what is asked for.
    """
    sections: list[HyTrainConfig | None] = []
    warnings = [
        f'Warning: "{key}" is no key of DeepSpeed, which ignores it: did you mean "{meant}"?'
        for key, meant in (misspelt_keys(config) if SECTION in config else ())
    ]
    section = config.get(SECTION)
    if isinstance(section, Mapping) and not {"batch_sizes", "plan"} & {*section}:
        warnings += [NO_BATCH] if _has_no_batch(config) else []
        if not config.get("optimizer") and config.get(_FORCED, True) is not False:
            warnings.append(_NEEDS_COMPILER)
    try:
        refuse_all(
            lambda: sections.append(HyTrainConfig.from_deepspeed(config)),
            lambda: _check_deepspeeds(config) if SECTION in config else None,
        )
    except (ConfigError, UnsupportedError) as error:
        raise type(error)(";\n".join([str(error), *warnings])) from error
    return sections[0], warnings


def _has_no_batch(config: Mapping[str, Any]) -> bool:
    meant = {near for _, near in misspelt_keys(config)}
    return not any(key in config or key in meant for key in BATCH_KEYS)


def _check_deepspeeds(config: Mapping[str, Any]) -> None:
    """Checks everything outside of the section."""
    refuse_misplaced_section(config)
    check_sections(config)
    given = _without_auto(config)
    own = config[SECTION]
    is_elsewhere = isinstance(own, Mapping) and ("batch_sizes" in own or "plan" in own)
    # Trainers fill "auto" in; Lightning's strategy adds keys of its own.
    is_elsewhere |= any(config.get(key) == "auto" for key in BATCH_KEYS[:2]) or _has_no_batch(
        config
    )
    ours = (
        lambda: check_config(given, batches_elsewhere=is_elsewhere),
        lambda: refuse_unsupported(given),
    )
    try:
        refuse_all(*ours, lambda: _check_deepspeeds_own(given, config))
    except (AttributeError, TypeError):
        refuse_all(*ours)  # DeepSpeed continued with a value that is refused here
        raise
    total, micro, steps = (given.get(key, 1) for key in BATCH_KEYS)
    if not is_elsewhere and BATCH_KEYS[0] in given and total % (micro * steps):
        raise ConfigError(
            f'"train_batch_size" is {total}: make it a multiple of the samples of a rank and step, '
            f"{micro * steps} (train_micro_batch_size_per_gpu x gradient_accumulation_steps)"
        )


def _check_deepspeeds_own(given: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    # Sizes of batches depend on the number of ranks, which is not known here.
    given = {key: value for key, value in given.items() if key not in BATCH_KEYS}
    zero = given.get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("stage", 0) not in (0, 1, 2, 3):
        given["zero_optimization"] = {**zero, "stage": 2}  # it is refused already
    try:
        DeepSpeedConfig({**given, "train_micro_batch_size_per_gpu": 1})
    except ValidationError as error:
        raise explain_deepspeeds(error, config) from None
    except AssertionError as error:
        raise explain_assertion(error, config) or error from None


def with_plan(
    config: Mapping[str, Any], section: HyTrainConfig, file: Path, ranks: int | None
) -> tuple[list[HyTrainConfig], Callable[[ModelSizes], None]]:
    """Each rank's section with the plan's values, and a function that refuses another model.

    Args:
        config: DeepSpeed's.
        section: its "hytrain" section, which names a plan.
        file: the configuration's.
        ranks: number of ranks that will train; None: as planned.

    Raises:
        PlanError: the plan cannot be read, or is for another job.
        ConfigError: there is no plan, or a key sets what the plan decides.
    """
    check_keys(config, section)
    path = find_plan(str(section.plan), file)
    plan = read_plan(path)
    of_config = asked(_without_auto(config), section)
    of_config["global_batch"] = of_config["global_batch"] or plan.global_batch
    if any(_switch(config, name) == "auto" for name in ("bf16", "fp16")):
        of_config["dtype"] = None
    found = [ActualRank(r.host, r.device, r.memory_bytes) for r in plan.ranks]
    job = Actual(
        ranks=found if ranks in (None, len(found)) else found[:1] * ranks,
        num_layers=plan.model.num_layers,
        parameters=plan.model.parameters,
        frozen=plan.model.frozen,
        **of_config,
    )
    refuse_other_job(plan, job, path)

    def check_model(sizes: ModelSizes) -> None:
        blocks, parameters = num_blocks(sizes.state.layers), sum(sizes.parameters)
        model = replace(job, num_layers=blocks, parameters=parameters, frozen=0)
        refuse_other_job(plan, model, path)

    sections = [planned_section(config[SECTION], section, plan, one, path) for one in plan.ranks]
    return sections, check_model


def _switch(config: Mapping[str, Any], name: str) -> Any:
    return dict(config.get(name) or {}).get("enabled")


def _without_auto(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drops values "auto", but not in "zero_optimization", where DeepSpeed itself skips them."""
    kept = {key: value for key, value in config.items() if value != "auto"}
    return {
        key: _without_auto(cast("Mapping[str, Any]", value))
        if isinstance(value, Mapping) and key != "zero_optimization"
        else value
        for key, value in kept.items()
    }
