"""`hytrain plan pools`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hytrain.formats.text_table import fold
from hytrain.tools.cli.arguments import check_outputs, positive_float
from hytrain.tools.cli.plan_hybrid import refuse_others

_DESCRIPTION = (
    "Which GPUs of which zones form which pipeline stage, where links between zones are slow and "
    "GPUs may stay unused: the fastest plan found, and what no plan can be below. Times are "
    "simulated from profiles, by the model of Sailor (SOSP 2025)."
)


def add(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """The command's arguments.

    Args:
        parser: of the command.
        defaults: what the arguments of `hytrain plan` are where they are not given.
    """
    parser.description = _DESCRIPTION
    parser.add_argument(
        "--case", type=Path, required=True, metavar="FILE", help="pools, profiles and bandwidths"
    )
    parser.add_argument(
        "--seconds",
        type=positive_float,
        default=30.0,
        metavar="S",
        help="stop then with the best plan so far (30)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--out", type=Path, metavar="PLAN", help="the same JSON as a file")
    parser.set_defaults(run=partial(_pools, defaults))


def _pools(defaults: Mapping[str, Any], arguments: argparse.Namespace) -> int:
    refuse_others(defaults, arguments, "pools")
    check_outputs({"--out": arguments.out}, [("--case", arguments.case)])
    # Imported here: `hytrain --help` should not wait for numpy.
    from hytrain.formats.record import write_json
    from hytrain.tools.hybrid.pools import report
    from hytrain.tools.hybrid.pools.pools_file import read_pools
    from hytrain.tools.hybrid.pools.search import plan_pools

    problem = read_pools(arguments.case)
    result = plan_pools(problem, max_seconds=arguments.seconds)
    values = report.result_json(problem, result)
    if arguments.out is not None:
        write_json(arguments.out, values, what="plan")
    print(json.dumps(values, indent=2) if arguments.json else fold(report.text_of(values)))
    return 0
