"""Merge the parts' JSON files into a table, a chart and one JSON file.

    python experiments/solve_k/report.py DIR/part_*.json [--results RESULTS]
    python experiments/solve_k/report.py --run 2 DIR2/part_*.json --run 1 DIR1/part_*.json FILE

writes RESULTS/<hardware>_<date>/{results.json, table.md, step_time.png}; RESULTS is the folder
`results` beside this file unless it is given. results.json holds the parts unchanged, so that
`report.py RESULTS/.../results.json` writes the same files again. A run is what one machine measured
in one go; the first sweep is the main one, others are repeats and judged by themselves. Parts of
the experiment offload_step, or its results.json, are the times and the host memory of other
systems; those of the same run as a sweep are compared with it, else with every sweep.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.checks import REFERENCE
from experiments.common.records import GIB, Json
from experiments.common.tables import CHECK_HEADER, check_rows, hardware_lines, markdown, slug_of
from experiments.solve_k.chart import chart
from experiments.solve_k.checks import (
    NAMES,
    check_all,
    clipping_known_errors,
    error_matrix,
    others_host_bytes,
)
from experiments.solve_k.others_report import HEADER as SEARCH_HEADER
from experiments.solve_k.others_report import is_search
from experiments.solve_k.others_report import rows as search_rows
from experiments.solve_k.summary import (
    batch_changes,
    lowerings,
    measured_points,
    part_name,
    reference_seconds,
    solved_errors,
)

RESULTS = Path(__file__).resolve().parent / "results"

EXPERIMENT = "solve_k"
"""What its parts call themselves; offload_step's have no such key."""

HEADER = (
    "part",
    "process",
    "what",
    "GPU layers",
    "step s (windows)",
    "x fwd+bwd",
    "TFLOP/s",
    "6ND TFLOP/s",
    "peak GPU GiB",
    "host GiB",
    "update s",
    "exposed s",
    "clipped",
    "predicted",
)

DECISION_HEADER = ("part", "process", "after step", "GPU layers", "reason")

OTHERS_HEADER = ("model", "system", "host bytes a parameter", "would need, GiB of host memory",
                 "GiB free before", "largest that fits there")  # fmt: skip

EXPLANATION = """\
`x fwd+bwd` is the step over forward and backward only, of the same process, before and after.
`predicted` is the error of the prediction that was made from the costs at the solved k; in brackets
that of the same costs, given how often the steps at that k were clipped. `fixed` k are in the order
of k, not in that of time: every second one was measured going up, the others coming down. Host
memory is the process's resident set. `exposed` is time in which the GPU stood still for weights.
"""

CEILING = """\
`ceiling`, for a claim about another system's time: that system's time over forward and backward
only, of its own run, which is what hytrain would reach if its update took no time at all. A limit
above the ceiling cannot be reached on the machines that were measured.
"""


def load_parts(paths: Sequence[tuple[str | None, Path]]) -> tuple[list[Json], list[Json]]:
    """Read parts; they must be of this schema and of one kind of hardware.

    Args:
        paths: each with the run that it is of, where one was named.

    Returns:
        The parts of this experiment, and those of offload_step.
    """
    parts: list[Json] = []
    for run, path in paths:
        data = records.read_json(path)
        for part in [*data.get("parts", [data]), *data.get("offload_step", [])]:
            if part.get("schema") != records.SCHEMA:
                raise ValueError(f"{path} has schema {part.get('schema')}, not {records.SCHEMA}")
            ours = _machine(parts[0]) if parts else _machine(part)
            if _machine(part) != ours:
                raise ValueError(f"{path} was measured on {_machine(part)}, others on {ours}")
            parts.append(part if run is None else {**part, "run": run})
    own = [part for part in parts if part.get("experiment") == EXPERIMENT]
    if not own:
        raise ValueError("no part of this experiment given")
    return own, [part for part in parts if part.get("experiment") != EXPERIMENT]


def _of_others(part: Json) -> Json:
    """A part of offload_step, less what it says about hytrain."""
    kept = {REFERENCE, *NAMES}
    return {**part, "records": [r for r in part["records"] if r["entry"]["label"] in kept]}


def _machine(part: Json) -> tuple[str, str]:
    return part["hardware"]["gpu"] or "no GPU", part["hardware"]["cpu"]


def _flops(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _gib(value: float | None) -> str:
    return "-" if value is None else f"{value / GIB:.1f}"


def _row(start: list[str], timed: Json, limit: float | None, predicted: str = "") -> list[str]:
    windows = timed["window_seconds"]
    layers = f"{timed['gpu_layers']} of {timed['num_layers']}" if "gpu_layers" in timed else "-"
    share = timed.get("clipped_share")
    return [
        *start,
        layers,
        f"{timed['step_seconds']:.4f} ({min(windows):.4f}-{max(windows):.4f})",
        "-" if limit is None else f"{timed['step_seconds'] / limit:.3f}",
        _flops(timed["tflops"]),
        _flops(timed["plain_tflops"]),
        _gib(timed["gpu"].get("peak_allocated_bytes")),
        _gib(timed.get("host_rss_bytes")),
        f"{timed['update_seconds']:.3f}" if "update_seconds" in timed else "-",
        f"{timed['exposed_seconds']:.3f}" if "exposed_seconds" in timed else "-",
        "-" if share is None else f"{share:.0%}",
        predicted,
    ]


def _predicted(layers: int, found: dict[int, float], known: dict[int, float]) -> str:
    if layers not in found:
        return ""
    more = f" ({known[layers]:+.1%})" if layers in known else ""
    return f"{found[layers]:+.1%}{more}"


def rows_of(part: Json, record: Json) -> list[list[str]]:
    """Everything that a process timed."""
    result = record["result"] or {}
    start = [part_name(part), record["entry"]["label"]]
    limit = reference_seconds(result)
    names = {"reference": "forward and backward only", "solved": "k solved"}
    rows = [
        _row([*start, text], result[key], limit) for key, text in names.items() if key in result
    ]
    for each in lowerings(result):
        rows.append(_row([*start, "cap lowered"], each["followed"], limit))
    for each in batch_changes(result):
        rows.append(_row([*start, f"batch {each['batch']}"], each["timed"], None))
    found = solved_errors(result) or {}
    known = clipping_known_errors(result)
    for point in sorted(measured_points(result), key=lambda p: (p["gpu_layers"], p["at_step"])):
        text = _predicted(point["gpu_layers"], found, known)
        rows.append(_row([*start, "fixed k"], point, limit, text))
    if "reference_again" in result:
        rows.append(_row([*start, "forward and backward only"], result["reference_again"], limit))
    return rows or [[*start, record["status"], *[""] * (len(HEADER) - 3)]]


def _facts(part: Json, record: Json) -> str:
    """One line on a process: size, cap, settling, closed form."""
    result = record["result"] or {}
    words = [f"{part_name(part)}, {record['entry']['label']}: {record['status']}"]
    if "num_parameters" in result:
        words.append(f"{result['num_parameters'] / 1e9:.3f} B parameters")
    if result.get("checkpointing"):
        words.append("activation checkpointing")
    if result.get("cores"):
        words.append(f"{len(result['cores'])} cores")
    if result.get("cap") is not None:
        words.append(f"cap {result['cap']:.3f} of the GPU's memory")
    if "settling" in result:
        settling = result["settling"]
        text = "settled" if settling["is_settled"] else "not settled, last change"
        words.append(f"{text} after {settling['settled_after']} of {settling['steps']} steps")
    for each in lowerings(result):
        cap = "none" if each["cap"] is None else f"{each['cap']:.3f}"
        words.append(f"cap {cap}, followed after {each['following']['settled_after']} steps")
    if result.get("closed_form"):
        published = result["closed_form"]
        words.append(f"closed form k {published['k']:.3f}, {published['gpu_layers']} layers")
    if result.get("left_out"):
        words.append(f"not measured for lack of time: {result['left_out']}")
    if record["log"]:
        words.append(f"last words `{record['log'][-1]}`")
    return "- " + "; ".join(words) + "\n"


def _decision_rows(part: Json, record: Json) -> list[list[str]]:
    result = record["result"] or {}
    # Each stage lists all decisions until its end.
    stages = [result.get("settling", {}), *(each["following"] for each in lowerings(result))]
    return [
        [
            part_name(part),
            record["entry"]["label"],
            str(decision["step"]),
            f"{decision['gpu_layers_before']} to {decision['gpu_layers_target']}",
            decision["reason"].replace("|", "/"),
        ]
        for decision in stages[-1].get("decisions", [])
    ]


def _matrix_text(parts: list[Json]) -> str:
    """Where costs were taken, and the largest error of what was predicted from them."""
    rows = [
        [part_name(part), record["entry"]["label"], str(at), f"{error:+.1%}", str(layers)]
        for part in parts
        for record in part["records"]
        if record["result"]
        for at, (layers, error) in error_matrix(record["result"]).items()
    ]
    header = ("part", "process", "costs taken at GPU layers", "largest error", "at GPU layers")
    return f"\n## Predictions by where costs were taken\n\n{markdown(header, rows)}"


def _others_text(parts: list[Json], offload: list[Json]) -> str:
    """What other systems would need for the large models: computed, not run."""
    rows = []
    for name, each in sorted(others_host_bytes(offload).items()):
        for part in parts:
            if part["part"] not in ("ten_b", "largest"):
                continue
            for record in part["records"]:
                result = record["result"] or {}
                count = result.get("num_parameters")
                if not count:
                    continue
                free = result.get("host", {}).get("before building", {}).get("available_bytes")
                fits = "-" if free is None else f"{free / each / 1e9:.1f} B"
                start = [f"{count / 1e9:.2f} B", name, f"{each:.1f}"]
                rows.append([*start, _gib(each * count), _gib(free), fits])
    if not rows:
        return ""
    return (
        "\n## Other systems on these models: computed from their measured bytes, not run\n\n"
        f"{markdown(OTHERS_HEADER, rows)}"
    )


def _search_text(parts: list[Json]) -> str:
    """Growing models of other systems, until one did not fit."""
    rows = search_rows(parts)
    title = "\n## Other systems, with growing models until one does not fit\n\n"
    return f"{title}{markdown(SEARCH_HEADER, rows)}" if rows else ""


def _hardware_text(parts: list[Json], note: str) -> str:
    hardware = parts[0]["hardware"]
    lines = hardware_lines(hardware)
    for part in parts:
        load = part["workload"]
        text = f"{load['model']}, {load['batch']} x {load['seq']} tokens"
        commit = part["hardware"]["commit"] or "not recorded"
        lines.append(f"Part {part_name(part)}: {text}; commit {commit}; `{part['command']}`")
    lines += [f"Note: {note}"] if note else []
    return "".join(f"- {line}\n" for line in lines)


def table(parts: list[Json], offload: list[Json], note: str = "") -> str:
    """The whole text of table.md."""
    pairs = [(part, record) for part in parts for record in part["records"]]
    timed = [(part, record) for part, record in pairs if not is_search(part)]
    rows = [row for part, record in timed for row in rows_of(part, record)]
    decisions = [row for part, record in pairs for row in _decision_rows(part, record)]
    date = max(part["hardware"]["date"] for part in parts)
    return (
        f"# k solved at run time, {date}\n\n{_hardware_text(parts, note)}\n"
        f"## Claims\n\n{markdown(CHECK_HEADER, check_rows(check_all(parts, offload)))}\n"
        f"{CEILING}\n"
        f"## Processes\n\n{''.join(_facts(part, record) for part, record in pairs)}\n"
        f"## Measured\n\n{markdown(HEADER, rows)}\n{EXPLANATION}"
        f"{_matrix_text(parts)}{_others_text(parts, offload)}"
        f"{_search_text(parts)}"
        f"\n## Decisions\n\n{markdown(DECISION_HEADER, decisions)}"
    )


def write_report(
    parts: list[Json], results: Path, offload: Sequence[Json] = (), note: str = ""
) -> Path:
    """Write the three files; returns their folder, named by hardware and date."""
    others = [_of_others(part) for part in offload]
    date = max(part["hardware"]["date"] for part in parts)
    folder = results / f"{slug_of(parts[0]['hardware']['gpu'])}_{date}"
    checks = [{**dataclasses.asdict(c), "verdict": c.verdict} for c in check_all(parts, others)]
    data = {"schema": records.SCHEMA, "note": note, "checks": checks, "parts": parts}
    data["offload_step"] = others
    records.write_json(folder / "results.json", data)
    (folder / "table.md").write_text(table(parts, others, note))
    chart(parts, folder / "step_time.png")
    return folder


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", type=Path, help="part_*.json files, or a results.json")
    parser.add_argument(
        "--run",
        nargs="+",
        action="append",
        default=[],
        metavar=("NAME", "FILE"),
        help="files of one machine, measured in one go",
    )
    parser.add_argument("--results", default=RESULTS, type=Path)
    parser.add_argument("--note", default="", help="what a reader has to know about these runs")
    options = parser.parse_args(arguments)
    named = [(name, Path(file)) for name, *files in options.run for file in files]
    try:
        parts, offload = load_parts([*((None, path) for path in options.parts), *named])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = write_report(parts, options.results, offload, options.note)
    print((folder / "table.md").read_text())
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
