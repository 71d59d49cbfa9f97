"""The `hytrain` command."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence

from hytrain.version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit status.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    arguments = _parser().parse_args(argv)
    return arguments.run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hytrain", description="Offloaded training, measured.")
    parser.add_argument("--version", action="version", version=f"hytrain {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bench = commands.add_parser("bench", help="measure a part of hytrain beside its competitors")
    parts = bench.add_subparsers(required=True, metavar="PART")
    _add_bench_kernel(parts.add_parser("kernel", help="the CPU optimizer's passes"))
    return parser


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _thread_list(text: str) -> tuple[int, ...]:
    return tuple(_positive_int(part) for part in text.split(","))


# ---- hytrain bench ----


def _add_bench_kernel(kernel: argparse.ArgumentParser) -> None:
    kernel.add_argument("--json", action="store_true", help="print JSON instead of a table")
    kernel.add_argument(
        "--elements",
        type=_positive_int,
        help="length of each array (default: four last-level caches, memory allowing)",
    )
    kernel.add_argument(
        "--threads",
        type=_thread_list,
        help="thread counts to try, as in 4,8,16 (default: quarters of the usable cores)",
    )
    kernel.add_argument("--repeats", type=_positive_int, default=7, help="timed rounds (7)")
    kernel.add_argument(
        "--cached-out",
        action="store_true",
        help="write the outgoing copy through the cache (default: non-temporal stores)",
    )
    kernel.add_argument(
        "--variants",
        action="store_true",
        help="for developers: our passes alone, under several prefetch distances and schedules",
    )
    kernel.set_defaults(run=_bench_kernel)


def _bench_kernel(arguments: argparse.Namespace) -> int:
    # Imported here: it needs torch, which `hytrain --help` should not wait for.
    from hytrain.profile import kernel_bench

    options = kernel_bench.BenchOptions(
        num_elements=arguments.elements,
        thread_counts=arguments.threads,
        num_rounds=arguments.repeats,
        non_temporal=not arguments.cached_out,
    )
    if arguments.variants:
        result, to_text = kernel_bench.run_variants(options), kernel_bench.format_variants
    else:
        result, to_text = kernel_bench.run_bench(options), kernel_bench.format_table
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(to_text(result))
        print(json.dumps(result["machine"]))
    return 0
