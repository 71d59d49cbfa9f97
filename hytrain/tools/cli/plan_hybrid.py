"""`hytrain plan hybrid`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hytrain.errors import ConfigError
from hytrain.formats.text_table import fold
from hytrain.tools.cli.arguments import (
    check_outputs,
    positive_float,
    positive_int,
    refuse_flags_of_plan,
    share,
)

_DESCRIPTION = (
    "Which GPUs of several types form which pipeline stage, with which data and tensor parallel "
    "degrees, layers and micro-batches: the plan of least cost, and the proof that it is. Costs "
    "are simulated from profiles."
)


def add(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """Adds the command's arguments; ``defaults``: values of those of `hytrain plan`."""
    parser.description = _DESCRIPTION
    case = parser.add_mutually_exclusive_group(required=True)
    case.add_argument(
        "--case", type=Path, metavar="DIR", help="folder with args.json, hostfile, clusterfile.json"
    )
    case.add_argument(
        "--hytrain-profile",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="files of `hytrain profile`; several are merged; needs --gbs and --bandwidth",
    )
    parser.add_argument(
        "--gbs", type=positive_int, metavar="N", help="samples of a step, with --hytrain-profile"
    )
    parser.add_argument(
        "--bandwidth",
        type=positive_float,
        nargs=2,
        metavar=("INTRA", "INTER"),
        help="GB/s within and between nodes, with --hytrain-profile",
    )
    _add_model(parser.add_argument_group("what the cost model counts"))
    search = parser.add_argument_group("the search")
    search.add_argument(
        "--gap",
        type=share,
        default=0.0,
        metavar="F",
        help="stop at a plan proven to be within this share of the cheapest (default: 0)",
    )
    search.add_argument(
        "--seconds",
        type=positive_float,
        metavar="S",
        help="stop after S seconds, with the best plan so far",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--top",
        type=positive_int,
        default=1,
        metavar="K",
        help="print K plans: the best of each of the K best combinations of order, micro-batches "
        "and range of stage counts (default: 1)",
    )
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--out", type=Path, metavar="PLAN", help="file for the plan, a JSON")
    output.add_argument(
        "--export", type=Path, metavar="DIR", help="new folder for what a launcher needs"
    )
    parser.set_defaults(run=partial(_hybrid, defaults))


def _add_model(group: Any) -> None:
    group.add_argument(
        "--tp-speed",
        choices=("first", "slowest"),
        default="slowest",
        help="a tensor parallel group of unequal GPUs is as fast as its first GPU, as published, "
        "or its slowest (default)",
    )
    group.add_argument(
        "--inter-node",
        action="store_true",
        help="use the bandwidth between nodes for traffic between them",
    )
    group.add_argument(
        "--per-gpu-memory",
        action="store_true",
        help="check the memory of each GPU, not the sum over a stage's GPUs",
    )
    group.add_argument(
        "--host-state",
        type=positive_float,
        nargs=3,
        metavar=("GB", "RATE", "COPY"),
        help="allow optimizer state on hosts: GB for it on each node, parameters a second that the "
        "node's CPU updates, GB/s between a GPU and its host",
    )


def _hybrid(defaults: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    _check(defaults, arguments)
    # Imported here: `hytrain --help` should not wait for numpy.
    from hytrain.formats.record import write_record
    from hytrain.tools.hybrid import report, search
    from hytrain.tools.hybrid.plan_record import plan_record, write_export

    problem = _problem(arguments)
    seconds = float("inf") if arguments.seconds is None else arguments.seconds
    result = search.plan(problem, top=arguments.top, gap=arguments.gap, seconds=seconds)
    record = plan_record(problem, result.plan, result.bound)
    # Before anything is printed: whoever reads it may stop (`| head`).
    if arguments.out is not None:
        write_record(arguments.out, record, what="plan")
    if arguments.json:
        print(json.dumps(report.result_json(problem, result), indent=2))
    else:
        print(fold(report.result_text(problem, result)))
    if arguments.out is not None:
        sys.stdout.flush()
        print(f"plan: {arguments.out}", file=sys.stderr)
    # Last: a plan that cannot be run is worth seeing, too.
    if arguments.export is not None:
        for note in write_export(arguments.export, record):
            print(note, file=sys.stderr)
    return 0


def _check(defaults: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    """Refuses arguments that mean nothing here, and files that cannot be written.

    Raises:
        ConfigError: such an argument or file.
    """
    refuse_flags_of_plan(defaults, arguments, "hybrid", own=("run", "json", "out"))
    if arguments.case is not None and (arguments.gbs or arguments.bandwidth):
        raise ConfigError("--gbs and --bandwidth are for --hytrain-profile: a case has its own")
    read = [("--hytrain-profile", path) for path in arguments.hytrain_profile or ()]
    if arguments.case is not None:
        names = ("args.json", "hostfile", "clusterfile.json")
        read += [("--case", arguments.case / name) for name in names]
    check_outputs({"--out": arguments.out}, read, kind="hybrid plan")


def _problem(arguments: argparse.Namespace) -> Any:
    from hytrain.tools.hybrid.case_files import read_case
    from hytrain.tools.hybrid.problem import Host, Options

    options = Options(
        tp_speed=arguments.tp_speed,
        inter_node=arguments.inter_node,
        per_gpu_memory=arguments.per_gpu_memory,
        host=Host(*arguments.host_state) if arguments.host_state is not None else None,
    )
    if arguments.case is not None:
        return read_case(arguments.case, options)
    from hytrain.formats.profile_file import merge_profiles, read_profile
    from hytrain.tools.hybrid.profile_problem import problem_from

    if arguments.gbs is None or arguments.bandwidth is None:
        raise ConfigError("--hytrain-profile needs --gbs and --bandwidth INTRA INTER, too")
    profile = merge_profiles([read_profile(path) for path in arguments.hytrain_profile])
    intra, inter = arguments.bandwidth
    return problem_from(profile, gbs=arguments.gbs, intra=intra, inter=inter, options=options)
