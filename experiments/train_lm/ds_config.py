"""The DeepSpeed JSON of a run: chosen, read, and changed only where an option asks for it."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import hjson
from data import BatchPlan
from options import OptionError

from hytrain.formats.plan_file import read_plan

CONFIG_DIR = Path(__file__).resolve().parents[2] / "ds_configs"
_MICRO, _ACCUMULATION, _TOTAL = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
_SCHEDULERS_WITH_TOTAL = ("WarmupCosineLR", "WarmupDecayLR")


def choose_config(*, on_gpu: bool) -> Path:
    """Picks one of ``ds_configs/`` for this hardware; both solve for k while training."""
    return CONFIG_DIR / ("zero2_solve.json" if on_gpu else "fp32_cpu.json")


def read_config(path: Path) -> dict[str, Any]:
    """Reads a DeepSpeed JSON as DeepSpeed does: comments allowed, no key twice.

    Raises:
        OptionError: no such file, not JSON, or a key that appears twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--deepspeed_config {path} cannot be read: {error}") from error
    try:
        return dict(hjson.loads(text, object_pairs_hook=_without_duplicates))
    except hjson.HjsonDecodeError as error:
        raise OptionError(f"--deepspeed_config {path} is not JSON: {error}") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise OptionError(f"the DeepSpeed JSON has {', '.join(twice)} twice: keep one of them")
    return dict(pairs)


def find_plan(
    config: dict[str, Any], config_path: Path, options: argparse.Namespace
) -> Path | None:
    """Returns the file of `hytrain plan` to train by: the option's, else the JSON's, else None.

    Raises:
        OptionError: there is no such file.
    """
    if options.plan is not None:
        places = [options.plan]
    elif options.engine == "hytrain" and config.get("hytrain", {}).get("plan") is not None:
        name = Path(config["hytrain"]["plan"])
        places = [config_path.parent / name, name]
    else:
        return None
    for place in places:
        if place.is_file():
            return place.resolve()
    tried = " or ".join(dict.fromkeys(map(str, places)))
    raise OptionError(f"no plan {tried}: `hytrain plan --out` makes one, --plan names it")


def planned_batches(path: Path, options: argparse.Namespace) -> BatchPlan:
    """Reads from a plan how much each rank computes; hytrain checks whether it fits the job.

    Raises:
        OptionError: an option says what the plan decides, or sequences are of another length.
    """
    for name in ("micro_batch", "global_batch"):
        if getattr(options, name) is not None:
            raise OptionError(f"--{name.replace('_', '-')}: the plan {path} decides that")
    plan = read_plan(path)
    # hytrain cannot check this: batches may have any length. Memory and times are for the plan's.
    if plan.model.seq_len not in (None, options.seq_len):
        raise OptionError(
            f"--seq-len is {options.seq_len}, but the plan {path} is for {plan.model.seq_len} "
            "tokens a sample: give that, or profile and plan for the other"
        )
    ranks = plan.ranks
    computing = [rank.microbatch_size for rank in ranks if rank.microbatch_size]
    return BatchPlan(
        micro_batch=min(computing),
        accumulation=1,
        world_size=len(ranks),
        sizes=tuple(rank.batch_size for rank in ranks),
        micro_sizes=tuple(rank.microbatch_size for rank in ranks),
    )


def plan_batches(config: dict[str, Any], options: argparse.Namespace, world_size: int) -> BatchPlan:
    """Settles micro-batch and accumulation from the options, else from the JSON.

    Raises:
        OptionError: the global batch is not a multiple of micro-batch times ranks, or neither
            the options nor the JSON give a micro-batch.
    """
    micro = options.micro_batch or config.get("train_micro_batch_size_per_gpu")
    total = options.global_batch or config.get("train_batch_size")
    accumulation = config.get("gradient_accumulation_steps", 1)
    if micro is None and total is not None:
        micro = max(1, total // (accumulation * world_size))
    if micro is None:
        raise OptionError(
            "no micro-batch: give --micro-batch, or train_micro_batch_size_per_gpu in the JSON"
        )
    if total is None:
        total = micro * accumulation * world_size
    accumulation, rest = divmod(total, micro * world_size)
    if rest or accumulation == 0:
        raise OptionError(
            f"a global batch of {total} is no multiple of micro-batch {micro} times "
            f"{world_size} ranks = {micro * world_size}: change --global-batch or --micro-batch"
        )
    return BatchPlan(micro_batch=micro, accumulation=accumulation, world_size=world_size)


def apply_options(
    config: dict[str, Any],
    options: argparse.Namespace,
    plan: BatchPlan,
    plan_path: Path | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Writes the options into a copy of the JSON; with a plan's path, the plan has the batches.

    Returns:
        The changed copy, and one line for each value of the JSON that was replaced.

    Raises:
        OptionError: an option needs a part of the JSON that is not there, or the JSON asks for
            other batches than the plan.
    """
    config = copy.deepcopy(config)
    changes: list[str] = []

    def put(section: dict[str, Any], key: str, value: Any, path: str) -> None:
        if key in section and section[key] != value:
            changes.append(f"{path}{key}: {section[key]} -> {value}")
        section[key] = value

    if plan_path is not None:
        if "hytrain" not in config:
            raise OptionError('--plan needs a "hytrain" section in the DeepSpeed JSON')
        changes += _drop_batches(config, plan, plan_path, in_json=options.plan is None)
        put(config["hytrain"], "plan", str(plan_path), "hytrain.")
    else:
        put(config, _MICRO, plan.micro_batch, "")
        put(config, _ACCUMULATION, plan.accumulation, "")
        put(config, _TOTAL, plan.global_batch, "")
    if options.lr is not None:
        params = config.get("optimizer", {}).get("params")
        if params is None:
            raise OptionError('--lr needs an "optimizer" with "params" in the DeepSpeed JSON')
        put(params, "lr", options.lr, "optimizer.params.")
    scheduler = config.get("scheduler")
    if scheduler is not None:
        params = scheduler.setdefault("params", {})
        for key, value in _schedule(scheduler, options).items():
            put(params, key, value, "scheduler.params.")
    elif options.warmup is not None:
        raise OptionError('--warmup needs a "scheduler" in the DeepSpeed JSON')
    if options.gpu_fraction is not None:
        if "hytrain" not in config:
            raise OptionError('--gpu-fraction needs a "hytrain" section in the DeepSpeed JSON')
        put(config["hytrain"], "gpu_fraction", options.gpu_fraction, "hytrain.")
    return config, changes


def _drop_batches(
    config: dict[str, Any], plan: BatchPlan, plan_path: Path, *, in_json: bool
) -> list[str]:
    """Takes out the JSON's batch keys, which the plan replaces.

    Args:
        config: is changed.
        plan: the plan's batches.
        plan_path: its file.
        in_json: whether the JSON itself names the plan; else an option replaces what it says.

    Returns:
        A line for each value that was not the plan's.

    Raises:
        OptionError: the JSON asks for another global batch, or contradicts its own plan.
    """
    lines: list[str] = []
    for key in (_TOTAL, _MICRO, _ACCUMULATION):
        given = config.pop(key, None)
        # DeepSpeed needs a micro-batch in the JSON even if another batch is used: 1 says nothing.
        if given is None or (given == plan.global_batch if key == _TOTAL else given == 1):
            continue
        if key == _TOTAL or in_json:
            raise OptionError(
                f"{key} is {given} in the DeepSpeed JSON, but the plan {plan_path} has batches of "
                f"its own, {plan.global_batch} sequences a step: leave it out, or plan again"
            )
        lines.append(f"{key}: {given} -> by the plan")
    return lines


def _schedule(scheduler: dict[str, Any], options: argparse.Namespace) -> dict[str, int]:
    """Returns the schedule's lengths for this run, in optimizer steps."""
    values: dict[str, int] = {}
    if scheduler.get("type") in _SCHEDULERS_WITH_TOTAL:
        values["total_num_steps"] = options.steps
    warmup = options.warmup
    if warmup is None and scheduler["params"].get("warmup_num_steps", 0) >= options.steps:
        # A warm-up longer than the run would never reach the learning rate asked for.
        warmup = max(1, options.steps // 10)
    if warmup is not None:
        values["warmup_num_steps"] = warmup
    return values
