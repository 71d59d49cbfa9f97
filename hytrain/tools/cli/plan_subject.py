"""The ranks that `hytrain plan` plans for, from its arguments, and the plan or what it lacks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from hytrain.errors import ConfigError
from hytrain.tools.cli.arguments import DTYPES, given_flags
from hytrain.tools.cli.plan_options import moments_of

_GIB = 1024**3
SHEET_SEQ_LEN = 1024
# ``dest`` of the options for data sheets only.
_FOR_SHEETS = (
    *("gpus", "hosts", "model", "seq_len", "dtype", "moments"),
    *("cores", "host_memory", "host_bandwidth"),
)


def profile_of(arguments: argparse.Namespace, config: Mapping[str, Any]) -> tuple[Any, bool]:
    """The profile of the ranks to plan for, and whether it is from data sheets, not measured.

    Args:
        arguments: the command's.
        config: DeepSpeed's; empty if none is given.
    """
    from hytrain.formats.profile_file import merge_profiles, read_profile
    from hytrain.tools.planner.device_sheets import estimated_cluster, expand, hosts_of

    if arguments.profile is not None:
        known = "model" if config.get("sequence_parallel_size") else ""  # for its heads
        given = given_flags(arguments, (name for name in _FOR_SHEETS if name != known))
        if given:
            raise ConfigError(
                f"{', '.join(given)}: for data sheets, --profile has its own: leave it out"
            )
        return merge_profiles([read_profile(path) for path in arguments.profile]), False
    if arguments.gpus is None:
        raise ConfigError("hytrain plan needs --profile FILE..., or --gpus NAME...")
    groups = hosts_of(expand(arguments.gpus), arguments.hosts)
    if arguments.model is None:
        raise ConfigError(
            "--gpus are planned from data sheets, which need a --model: give it, or --profile "
            "instead"
        )
    from hytrain.tools.profiler.language_model import check_length, read_config
    from hytrain.tools.profiler.measured_model import read_model_shape

    seq_len = arguments.seq_len or SHEET_SEQ_LEN
    check_length(read_config(arguments.model), arguments.model, seq_len)
    moments = arguments.moments or moments_of(config)
    shape = read_model_shape(
        arguments.model, seq_len=seq_len, dtype=arguments.dtype or DTYPES[0], moments=moments
    )
    given_hosts = {
        "cores": arguments.cores,
        "memory_bytes": arguments.host_memory and int(arguments.host_memory * _GIB),
        "bandwidth": arguments.host_bandwidth and arguments.host_bandwidth * 1e9,
    }
    known = {name: value for name, value in given_hosts.items() if value is not None}
    return estimated_cluster(groups, shape, **known), True


def planned(profile: Any, options: Any) -> tuple[Any, Any]:
    """The problem, and its plan or what it lacks."""
    from hytrain.tools.planner.plan import make_plan_without_spare
    from hytrain.tools.planner.profile_problem import problem_from

    return make_plan_without_spare(problem_from(profile, options))
