"""`hytrain bench`."""

from __future__ import annotations

import argparse
import json

from hytrain.tools.cli.arguments import positive_int, positive_ints


def add(bench: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parts = bench.add_subparsers(required=True, metavar="PART")
    _add_kernel(parts.add_parser("kernel", help="the CPU optimizer's passes"))


def _add_kernel(kernel: argparse.ArgumentParser) -> None:
    kernel.add_argument("--json", action="store_true", help="print JSON instead of a table")
    kernel.add_argument(
        "--elements",
        type=positive_int,
        help="length of each array (default: four last-level caches, memory allowing)",
    )
    kernel.add_argument(
        "--threads",
        type=positive_ints,
        help="thread counts to try, as in 4,8,16 (default: quarters of the usable cores)",
    )
    kernel.add_argument("--repeats", type=positive_int, default=7, help="timed rounds (7)")
    kernel.add_argument(
        "--cached-out",
        action="store_true",
        help="write the outgoing copy through the cache (default: non-temporal stores)",
    )
    kernel.add_argument(
        "--ours",
        action="store_true",
        help="without DeepSpeed's and torch's optimizers (DeepSpeed compiles its own at first)",
    )
    kernel.add_argument(
        "--variants",
        action="store_true",
        help="for developers: our passes alone, under several prefetch distances and schedules",
    )
    kernel.set_defaults(run=_kernel)


def _kernel(arguments: argparse.Namespace) -> int:
    # Imported here: it needs torch, which `hytrain --help` should not wait for.
    from hytrain.kernels.host_memory import taking_host_memory
    from hytrain.tools.kernel_bench import run as kernel_bench

    options = kernel_bench.BenchOptions(
        num_elements=arguments.elements,
        thread_counts=arguments.threads,
        num_rounds=arguments.repeats,
        non_temporal=not arguments.cached_out,
        with_others=not arguments.ours,
    )
    with taking_host_memory("the benchmark's arrays", remedy="give fewer --elements"):
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
