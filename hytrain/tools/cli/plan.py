"""`hytrain plan`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hytrain.errors import ConfigError
from hytrain.formats.moment_kinds import FP32, MOMENTS, SPLIT
from hytrain.formats.policies import ACCUMULATION_MODES
from hytrain.formats.text_table import fold
from hytrain.tools.cli import plan_hybrid
from hytrain.tools.cli.arguments import (
    DTYPES,
    check_outputs,
    gibibytes,
    positive_float,
    positive_int,
    refuse_flags_of_plan,
    share,
)
from hytrain.tools.cli.plan_advice import misfit_words
from hytrain.tools.cli.plan_options import STAGES, assumed_words, plan_options, read_deepspeed
from hytrain.tools.cli.plan_subject import SHEET_SEQ_LEN, planned, profile_of

_DESCRIPTION = (
    "Divides the samples of a batch and the optimizer state over GPUs of unlike speed and memory, "
    "on hosts that differ in cores and memory: from profiles of `hytrain profile`, or, for GPUs "
    "that are only named, from data sheets."
)


def add(plan: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    plan.description = _DESCRIPTION
    plan.usage = (
        "hytrain plan (--profile FILE... | --gpus NAME... --model PATH) --batch B [OPTION...]"
    )
    _add_subject(plan.add_argument_group("GPUs, model and batch"))
    _add_choices(plan.add_argument_group("what the plan may use"))
    _add_hosts(plan.add_argument_group("hosts"))
    output = plan.add_argument_group("output")
    output.add_argument(
        "--out", type=Path, metavar="PLAN", help='file for the plan, to be named by "hytrain.plan"'
    )
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    plan.set_defaults(run=_plan)
    own = dict(vars(plan.parse_args([])))
    subjects = plan.add_subparsers(metavar="[uneven | hybrid]", prog="hytrain plan")
    _add_uneven(subjects.add_parser("uneven", help="solve a folder of published cases"), own)
    words = "pipeline x data x tensor parallel over GPUs of several types"
    plan_hybrid.add(subjects.add_parser("hybrid", help=words), own)


def _add_subject(group: Any) -> None:
    group.add_argument(
        "--profile",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files of `hytrain profile`; several are merged",
    )
    group.add_argument(
        "--gpus",
        nargs="+",
        metavar="NAME",
        help="instead of --profile: GPUs by name, from data sheets, as in l4 l4 a6000, or 2xl4 "
        "a6000",
    )
    group.add_argument(
        "--hosts",
        type=positive_int,
        nargs="+",
        metavar="N",
        help="how many of --gpus each host has, in order (default: one host)",
    )
    group.add_argument(
        "--batch",
        type=positive_int,
        metavar="B",
        help="samples of a step, all ranks together; required",
    )
    group.add_argument(
        "--model",
        type=Path,
        metavar="PATH",
        help="a transformers config.json or its folder; required with --gpus. With --profile only "
        "where ranks share sequences, for the heads of their attention",
    )
    group.add_argument(
        "--seq-len",
        type=positive_int,
        metavar="N",
        help=f"with --gpus: tokens of a sample (default: {SHEET_SEQ_LEN})",
    )
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help=f"with --gpus: dtype of the weights (default: {DTYPES[0]})",
    )
    group.add_argument(
        "--moments",
        choices=MOMENTS,
        help="with --gpus: how Adam's moments are kept (default: as in --deepspeed-config, else "
        "fp32)",
    )
    group.add_argument(
        "--master",
        choices=(FP32, SPLIT),
        help="how master weights are kept (default: as in --deepspeed-config, else fp32)",
    )


def _add_choices(group: Any) -> None:
    group.add_argument(
        "--stage",
        type=int,
        choices=STAGES,
        help="ZeRO stage (default: as in --deepspeed-config, else 2)",
    )
    group.add_argument(
        "--offload-param",
        choices=("cpu",),
        help="in stage 3: keep the weights in host memory, too, and copy them to the GPU for every "
        "use, for models that do not fit otherwise (default: as in --deepspeed-config, else not)",
    )
    group.add_argument(
        "--deepspeed-config",
        type=Path,
        metavar="JSON",
        help="the DeepSpeed JSON to train with: gives the stage, offload_param, moments, master, "
        "accumulation, how many ranks share each sequence and, in stage 3, how many layers are "
        "gathered at once (default: DeepSpeed's defaults)",
    )
    group.add_argument(
        "--accumulation",
        choices=tuple(ACCUMULATION_MODES),
        help="micro-batches one after another (activations are stored or recomputed; the only way "
        "in Trainer), or layer by layer (inputs are kept on the GPU or offloaded to the host). "
        'Default: as in --deepspeed-config; if that has "auto" values, one after another; else '
        "the faster, in stages 1 and 2 for each rank",
    )
    group.add_argument(
        "--no-idle",
        action="store_true",
        help="give every rank at least one sample (default: a slow GPU may get none)",
    )
    group.add_argument(
        "--clipped-share",
        type=share,
        metavar="F",
        help="share of the steps that are clipped, from 0 to 1: they take the CPU longer (default: "
        "1, as at the beginning of a training)",
    )
    group.add_argument(
        "--device-memory-fraction",
        type=positive_float,
        default=1.0,
        metavar="F",
        help="share of each GPU's memory that may be used (default: 1)",
    )
    group.add_argument(
        "--gpu-memory-reserve",
        type=gibibytes,
        metavar="GIB",
        help="memory that stays free on each GPU (default: 4 %% of it, at least 1 GiB)",
    )
    group.add_argument(
        "--host-memory-reserve",
        type=gibibytes,
        metavar="GIB",
        help="memory that stays free on each host (default: 3 %% of it, at least 1 GiB)",
    )


def _add_hosts(group: Any) -> None:
    group.add_argument(
        "--cores",
        type=positive_int,
        metavar="N",
        help="with --gpus: cores of each host (default: 16)",
    )
    group.add_argument(
        "--host-memory",
        type=gibibytes,
        metavar="GIB",
        help="with --gpus: memory of each host (default: 64 GiB)",
    )
    group.add_argument(
        "--host-bandwidth",
        type=positive_float,
        metavar="GB/S",
        help="with --gpus: memory bandwidth of each host (default: 100 GB/s)",
    )
    group.add_argument(
        "--interconnect",
        type=positive_float,
        metavar="GB/S",
        help="bandwidth of a collective between the ranks (default: as measured; with --gpus: "
        "NVLink's where all are GPUs of one host that have it, else that of the slowest GPU's "
        "copies to its host)",
    )


def _plan(arguments: argparse.Namespace) -> int:
    # Imported here: `hytrain --help` should not wait for numpy.
    from hytrain.formats.plan_file import write_plan
    from hytrain.tools.infeasible import Infeasible
    from hytrain.tools.planner.plan import beside_micro_batch_major, make_plan
    from hytrain.tools.planner.profile_problem import problem_from
    from hytrain.tools.planner.result import plan_file

    _check_batch(arguments)
    _check_files(arguments)
    config = read_deepspeed(arguments)
    profile, is_estimated = profile_of(arguments, config)
    options = plan_options(arguments, config, profile, is_estimated=is_estimated)
    problem, plan = planned(profile, options)
    if isinstance(plan, Infeasible):
        given = arguments, config, profile, options
        assumed = assumed_words(*given, is_refused=True) if is_estimated else ""
        print(fold(f"{misfit_words(*given, plan)}\n{assumed}"), file=sys.stderr)
        return 2
    if is_estimated and plan.other_mode is None and plan.accumulation != "micro_batch_major":
        plan = beside_micro_batch_major(problem, plan)
    without: Any = None
    if problem.offload_param:
        found = make_plan(problem_from(profile, replace(options, offload_param=False)))
        without = None if isinstance(found, Infeasible) else found
    # Before anything is printed: whoever reads it may stop (`| head`).
    replaced = ""
    if arguments.out is not None:
        replaced = ", in place of an earlier plan" if arguments.out.is_file() else ""
        write_plan(arguments.out, plan_file(problem, plan))
    subject = problem, plan, without, options
    if arguments.json:
        print(_as_json(*subject, assumed=profile.hosts[0] if is_estimated else None))
    else:
        words = assumed_words(arguments, config, profile, options) if is_estimated else ""
        print(_as_text(*subject, assumed=words))
    if arguments.out is not None:
        sys.stdout.flush()
        print(f"plan: {arguments.out}{replaced}", file=sys.stderr)
    return 0


def _as_json(problem: Any, plan: Any, without: Any, options: Any, *, assumed: Any) -> str:
    """The plan for other programs; ``assumed``: the host of a profile that was never measured."""
    from hytrain.tools.planner import plan_report

    head: dict[str, Any] = {"estimated": assumed is not None}
    if options.master != FP32:
        head["late_layers"] = plan.late_layers
    if assumed is not None:
        names = ("cores", "memory_bytes", "bandwidth")
        head["assumed"] = {name: getattr(assumed, name) for name in names} | {
            "interconnect": options.interconnect
        }
    return json.dumps(head | plan_report.plan_json(problem, plan, without), indent=2)


def _as_text(problem: Any, plan: Any, without: Any, options: Any, *, assumed: str) -> str:
    """The plan for people; ``assumed``: what a profile that was never measured assumes."""
    from hytrain.tools.planner import plan_report

    lines = [plan_report.headline(problem, plan)]
    lines += [plan_report.trust_words(problem, plan), assumed] if assumed else []
    if options.master != FP32:
        lines.append(_split_words(problem, plan))
    lines += ["", plan_report.plan_text(problem, plan, without)]
    return "\n".join(fold(line) for line in lines)


def _split_words(problem: Any, plan: Any) -> str:
    """Which master weights of layers on the CPU are split."""
    if not any(plan.late_layers):
        return "Split master weights: those of layers on the CPU are whole."
    counts = {
        number: f"{late} of {problem.model.num_updates - rank.gpu_layers}"
        for number, (rank, late) in enumerate(zip(plan.ranks, plan.late_layers, strict=True))
        if late
    }
    if len(counts) == len(plan.ranks) and len(set(counts.values())) == 1:
        which = f"the last {counts[0]}"
    else:
        which = ", ".join(f"the last {words} of rank {rank}" for rank, words in counts.items())
    return (
        f"Split master weights: of layers on the CPU those of {which} are split, too, and updated "
        "after backward: the host has no room for whole ones."
    )


def _check_batch(arguments: argparse.Namespace) -> None:
    from hytrain.formats.profile_file import MOST_SAMPLES

    if arguments.batch is None:
        message = "plan needs --batch: the samples of a step, all ranks together"
        if arguments.gpus and not arguments.model:
            message += "; and --model, a transformers config.json, to plan from data sheets"
        raise ConfigError(message)
    if arguments.batch > MOST_SAMPLES:
        raise ConfigError(
            f"--batch {arguments.batch}: at most {MOST_SAMPLES} samples are planned for: plan a "
            "part of the batch; each rank's share of the whole is the same"
        )


def _check_files(arguments: argparse.Namespace) -> None:
    """Refuses an output that is also an input or that cannot be written.

    Raises:
        ConfigError: it is such a file.
    """
    model = arguments.model
    if model is not None and model.is_dir():
        model = model / "config.json"
    read = [("--profile", path) for path in arguments.profile or ()]
    read += [("--deepspeed-config", arguments.deepspeed_config), ("--model", model)]
    check_outputs({"--out": arguments.out}, read, kind="plan")


# -- published cases ---------------------------------------------------------------------------


def _add_uneven(uneven: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    uneven.add_argument(
        "--cases",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder with latencies.json, memory.json, gpu_memory_gb.json, expected.json",
    )
    uneven.add_argument("--json", action="store_true", help="print JSON instead of a table")
    uneven.set_defaults(run=partial(_uneven, defaults))


def _uneven(defaults: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    """Solves published cases; ``defaults``: the values of a plan's arguments if not given."""
    refuse_flags_of_plan(defaults, arguments, "uneven", own=("run", "json"))
    # Imported here: `hytrain --help` should not wait for numpy.
    from hytrain.tools.uneven import report
    from hytrain.tools.uneven.problem import read_cases

    solved = report.solve_cases(read_cases(arguments.cases))
    if arguments.json:
        print(json.dumps(report.cases_json(solved), indent=2))
    else:
        print(fold(report.cases_table(solved)))
    return 0
