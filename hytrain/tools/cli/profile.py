"""`hytrain profile`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from hytrain.errors import ConfigError
from hytrain.formats.dtypes import TORCH_NAMES
from hytrain.formats.moment_kinds import FP32, MOMENTS
from hytrain.formats.text_table import fold
from hytrain.tools.cli.arguments import (
    DTYPES,
    check_outputs,
    flag,
    given_flags,
    positive_float,
    positive_floats,
    positive_int,
    positive_ints,
)

_PROFILE = (
    "Measures the GPUs and hosts of all ranks with a model, for `hytrain plan`: times and memory "
    "of a layer against micro-batch sizes, updates on GPU and CPU, copies, collectives. Start it "
    "with the launcher that starts training (deepspeed --module hytrain profile ...), or alone for "
    "one GPU. It takes a minute or two."
)
_SECONDS = 40.0
# ``dest`` of the options that say what to measure, and how.
_MEASURED = (
    *("model", "seq_len", "dtype", "block_class", "micro_batches", "seconds"),
    *("device_memory_fraction", "moments", "settings"),
)


def add(profile: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    profile.description = _PROFILE
    profile.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="file for the profile, a JSON"
    )
    profile.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="measure nothing: merge these profiles; the newest measurement of a device counts",
    )
    model = profile.add_argument_group("the model")
    model.add_argument(
        "--model",
        metavar="MODEL",
        help="a transformers config.json or its folder; or FILE.py:FUNCTION or MODULE:FUNCTION, a "
        "function of (num_layers, seq_len) that returns a model, and a function of a micro-batch "
        "size that returns the model's arguments",
    )
    model.add_argument("--seq-len", type=positive_int, metavar="N", help="tokens of a sample")
    model.add_argument(
        "--dtype", choices=DTYPES, help=f"dtype of the weights (default: {DTYPES[0]})"
    )
    model.add_argument(
        "--block-class", metavar="NAME", help="class of the transformer blocks (default: detected)"
    )
    how = profile.add_argument_group("measuring")
    how.add_argument(
        "--micro-batches",
        type=positive_ints,
        metavar="N,N,...",
        help="micro-batch sizes to measure (default: 1, 2, 4, ... until memory is full or speed "
        "stays equal)",
    )
    how.add_argument(
        "--seconds",
        type=positive_float,
        metavar="S",
        help=f"about how long layers are measured (default: {_SECONDS:.0f} s); the rest takes "
        "about 30 s",
    )
    how.add_argument(
        "--device-memory-fraction",
        type=positive_floats,
        metavar="F[,F...]",
        help="share of each GPU's memory that may be used: one number, or one for each rank "
        "(default: all of it)",
    )
    how.add_argument(
        "--moments",
        choices=MOMENTS,
        help=f'how updates keep Adam\'s moments, as "hytrain.moments" (default: {FP32})',
    )
    how.add_argument(
        "--settings", metavar="WORDS", help="a note to keep in the profile, as of clocks"
    )
    profile.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    read = [("--merge", path) for path in arguments.merge or ()]
    check_outputs({"--out": arguments.out}, read, kind="profile")
    if arguments.merge is not None:
        return _merge(arguments)
    missing = [name for name in ("model", "seq_len") if getattr(arguments, name) is None]
    if missing:
        names = " and ".join(map(flag, missing))
        raise ConfigError(f"--model and --seq-len say what is measured: give {names} too")
    return _measure(arguments)


def _merge(arguments: argparse.Namespace) -> int:
    # Imported here, as below: `hytrain --help` should not wait for pydantic and torch.
    from hytrain.formats.profile_file import merge_profiles, read_profile

    given = given_flags(arguments, _MEASURED)
    if given:
        raise ConfigError(f"--merge measures nothing: leave {', '.join(given)} out")
    _write(arguments, merge_profiles([read_profile(path) for path in arguments.merge]))
    return 0


_MORE_HOST_MEMORY = "free some, or profile fewer ranks of a host at once"


def _measure(arguments: argparse.Namespace) -> int:
    import torch

    from hytrain.kernels.host_memory import taking_host_memory
    from hytrain.tools.profiler.measured_model import read_subject
    from hytrain.tools.profiler.profile_options import ProfileOptions, Progress
    from hytrain.tools.profiler.profile_report import profile_table
    from hytrain.tools.profiler.ranks import Ranks, joined, limit_memory, local_device
    from hytrain.tools.profiler.run import profile_ranks

    options = ProfileOptions(
        micro_batches=arguments.micro_batches,
        seconds=arguments.seconds or _SECONDS,
        settings=arguments.settings or "",
        moments=arguments.moments or FP32,
    )
    subject = read_subject(
        arguments.model,
        seq_len=arguments.seq_len,
        dtype=getattr(torch, TORCH_NAMES[arguments.dtype or DTYPES[0]]),
        block_class=arguments.block_class,
    )
    device = local_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if arguments.device_memory_fraction is not None:
        limit_memory(device, arguments.device_memory_fraction)
    with joined(device), taking_host_memory("measuring", remedy=_MORE_HOST_MEMORY):
        ranks = Ranks()
        progress = Progress(sys.stderr if ranks.rank == 0 else None)
        profile = profile_ranks(subject, device, options, ranks=ranks, progress=progress)
        if ranks.rank == 0:
            _write(arguments, profile)
            print(fold(profile_table(profile)))
        ranks.close()
    return 0


def _write(arguments: argparse.Namespace, profile: Any) -> None:
    from hytrain.formats.profile_file import write_profile

    write_profile(arguments.out, profile)
    print(f"profile: {arguments.out}", file=sys.stderr)
