"""`hytrain bench`."""

from __future__ import annotations

import argparse
import json

from hytrain.formats.text_table import fold
from hytrain.tools.cli.arguments import positive_int, positive_ints


def add(bench: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parts = bench.add_subparsers(required=True, metavar="{kernel}")
    words = "the passes of the CPU optimizer"
    kernel = parts.add_parser("kernel", help=words, description=f"Measures {words}.")
    kernel.add_argument("--json", action="store_true", help="print JSON instead of a table")
    kernel.add_argument(
        "--elements",
        type=positive_int,
        metavar="N",
        help="length of each array (default: four last-level caches, memory allowing)",
    )
    kernel.add_argument(
        "--threads",
        type=positive_ints,
        metavar="N[,N...]",
        help="thread counts to try, as in 4,8,16 (default: quarters of the usable cores)",
    )
    kernel.add_argument(
        "--repeats", type=positive_int, default=7, metavar="N", help="timed rounds (default: 7)"
    )
    kernel.add_argument(
        "--beside",
        action="store_true",
        help="also measure DeepSpeed's and torch's optimizers; DeepSpeed compiles its own "
        "the first time",
    )
    kernel.set_defaults(run=_kernel)


def _kernel(arguments: argparse.Namespace) -> int:
    # Imported here: it needs torch, which `hytrain --help` should not wait for.
    from hytrain.kernels.host_memory import taking_host_memory
    from hytrain.tools.kernel_bench.run import format_table, headline, run_bench

    with taking_host_memory("the benchmark's arrays", remedy="give fewer --elements"):
        result = run_bench(
            num_elements=arguments.elements,
            thread_counts=arguments.threads,
            num_rounds=arguments.repeats,
            with_others=arguments.beside,
        )
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        print(f"{fold(headline(result))}\n\n{format_table(result)}")
        deepspeed = of_sweep = ""
        if result["machine"]["beyond_caches"]:
            of_sweep = "of read_write: of the rate of plain reads and writes of as many bytes; "
        if result["deepspeed_path"] is not None:
            deepspeed = "; deepspeed_path: with what ZeRO offload does around its Adam"
        print(
            fold(
                f"Gparam/s: billion parameters a second; {of_sweep}over fp32: speed over the same "
                "pass with fp32 moments. commit: an update; preview: of the weights alone, as long "
                f"as the gradient's norm is not known{deepspeed}."
            )
        )
        missing = [name for name, figures in result.items() if figures is None]
        if missing and arguments.beside:
            print(f"not measured, since it could not be built: {', '.join(missing)}")
        machine = result["machine"]
        versions = ", ".join(f"{name} {it}" for name, it in machine["versions"].items() if it)
        print(f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}; {versions}")
    return 0
