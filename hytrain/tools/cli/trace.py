"""`hytrain trace`: report and compare."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hytrain.formats.text_table import fold
from hytrain.tools.cli.arguments import check_outputs

_REPORT = (
    "How well GPU, copies and CPU overlap, what the GPU waits for and why, and what a change would "
    "save at most. FILEs are traces of one run, one per rank, by hytrain or by torch.profiler, or "
    "their folder."
)
_COMPARE = "Two runs on one time axis: GPU, copies and CPU of both, and their differences in words."


def add(trace: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    trace.description = "Where the time of recorded steps goes, in one run or in two side by side."
    commands = trace.add_subparsers(required=True, metavar="{report,compare}")
    report = commands.add_parser("report", help="where the time of a run goes", description=_REPORT)
    words = "trace of a rank (JSON, gzipped or not), or a folder of traces"
    report.add_argument("files", type=Path, nargs="+", metavar="FILE", help=words)
    report.add_argument("--verbose", action="store_true", help="print all tables")
    report.set_defaults(run=_report)
    compare = commands.add_parser("compare", help="two runs side by side", description=_COMPARE)
    for name, words in (("A", "trace before a change"), ("B", "trace after it")):
        compare.add_argument(f"file_{name.lower()}", type=Path, metavar=name, help=words)
    compare.set_defaults(run=_compare)
    for command in (report, compare):
        command.add_argument("--json", action="store_true", help="print JSON instead of text")
        command.add_argument(
            "--html", type=Path, metavar="FILE", help="also write a web page with the timeline"
        )


def _check_page(arguments: argparse.Namespace, read: list[tuple[str, Path]]) -> None:
    check_outputs({"--html": arguments.html}, read, kind="page of `hytrain trace`")


def _write_page(arguments: argparse.Namespace, runs: list[Any], verdict: list[Any]) -> None:
    """Writes the page, if it was asked for; see :func:`~hytrain.tools.trace.viewer.write_page`."""
    if arguments.html is not None:
        from hytrain.tools.trace.viewer import write_page

        write_page(arguments.html, runs, verdict)
        print(f"page: {arguments.html}", file=sys.stderr)


def _report(arguments: argparse.Namespace) -> int:
    # Imported where they are used: `hytrain --help` should not wait for numpy.
    from hytrain.tools.trace.analysis import analyse, as_json
    from hytrain.tools.trace.load import load
    from hytrain.tools.trace.report_text import report, sentences, verdict

    _check_page(arguments, [("FILE", path) for path in arguments.files])
    analysis = analyse(load(arguments.files))
    _write_page(arguments, [("", analysis)], verdict(analysis))
    if arguments.json:
        words = dict(zip(("overlap", "waits", "change"), sentences(analysis), strict=True))
        print(json.dumps({"sentences": words} | as_json(analysis), indent=1))
    else:
        print(fold(report(analysis, verbose=arguments.verbose)))
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from hytrain.tools.trace.analysis import analyse
    from hytrain.tools.trace.compare import compare, compare_text, compare_verdict
    from hytrain.tools.trace.load import load

    paths: list[Path] = [arguments.file_a, arguments.file_b]
    _check_page(arguments, [("A", paths[0]), ("B", paths[1])])
    before, after = (analyse(load([path])) for path in paths)
    comparison = compare(before, after)
    # Files of two runs often have the same name: their folders tell them apart.
    is_same = paths[0].name == paths[1].name
    shown = [path.absolute().parent.name if is_same else path.name for path in paths]
    titled = [(f"A: {shown[0]}", before), (f"B: {shown[1]}", after)]
    _write_page(arguments, titled, compare_verdict(comparison, after))
    if arguments.json:
        print(json.dumps(asdict(comparison), indent=1))
    else:
        print(fold(compare_text(comparison)))
    return 0
