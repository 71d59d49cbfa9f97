"""Merge the parts' JSON files into a table, a chart and one JSON file.

    python experiments/offload_step/report.py DIR/part_*.json [--results RESULTS]

writes RESULTS/<hardware>_<date>/{results.json, table.md, step_time.png}; RESULTS is the folder
`results` beside this file unless it is given.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.offload_step import records
from experiments.offload_step.checks import GIB, Check, check_all, host_bytes, step_seconds
from experiments.offload_step.parts import REFERENCE
from experiments.offload_step.records import Json

RESULTS = Path(__file__).resolve().parent / "results"

HEADER = (
    "part",
    "system",
    "clipping",
    "step s (median; windows)",
    "x limit",
    "TFLOP/s",
    "peak GPU GiB",
    "host GiB",
    "host B/param",
    "CPU worker busy",
    "update hidden",
    "steps clipped",
    "loss first, last",
)


def load_parts(paths: list[Path]) -> list[Json]:
    """Read the parts; they must be of this schema, one workload and one kind of hardware."""
    if not paths:
        raise ValueError("no part files given")
    parts = [records.read_json(path) for path in paths]
    for path, part in zip(paths, parts, strict=True):
        if part.get("schema") != records.SCHEMA:
            raise ValueError(f"{path} has schema {part.get('schema')}, not {records.SCHEMA}")
        for key in ("workload", "hardware"):
            ours, theirs = _identity(parts[0], key), _identity(part, key)
            if ours != theirs:
                raise ValueError(f"{path} has {key} {theirs}, but {paths[0]} has {ours}")
    return parts


def _identity(part: Json, key: str) -> Json | str:
    """What has to be equal for parts to share a table; dates and commits may differ."""
    return part["hardware"]["slug"] if key == "hardware" else part["workload"]


def clipping_text(entry: Json) -> str:
    """How the entry clips, for the table."""
    variant = entry["options"].get("variant")
    words = {"never": "on, never active", "always": "active at every step", "direct": "none"}
    if variant in words:
        return words[variant]
    if entry["clip"] is not None:
        return f"{entry['clip']:g}"
    return "no update" if entry["system"] == REFERENCE else "none"


def _gpu_text(result: Json) -> str:
    peak = result["gpu"].get("peak_allocated_bytes")
    return "-" if peak is None else f"{peak / GIB:.1f}"


def _share_text(shares: list[float]) -> str:
    return f"{statistics.mean(shares):.0%}" if shares else "-"


def _observed_texts(result: Json) -> tuple[str, str]:
    """What hytrain says about its timed steps: the share of the update that was hidden behind
    other work, and the share of steps in which clipping was active."""
    rows = result["timing"]["observations"]
    hidden = [row["hidden_share"] for row in rows if row.get("hidden_share") is not None]
    coefficients = [row.get("clip_coefficient") for row in rows]
    clipped = [float(c < 1.0) for c in coefficients if c is not None]
    return _share_text(hidden), _share_text(clipped)


def _row(part: Json, record: Json) -> list[str]:
    """One line of the table."""
    entry, result = record["entry"], record["result"]
    start = [part["part"], entry["label"], clipping_text(entry)]
    if result is None:
        return [*start, record["status"], *[""] * (len(HEADER) - 4)]
    seconds = result["step_seconds"]
    windows = result["timing"]["window_seconds"]
    limit = step_seconds(part, REFERENCE)
    losses = result["timing"]["losses"]
    busy = result["worker_busy_share"]
    in_use = host_bytes(result)
    return [
        *start,
        f"{seconds:.3f} ({min(windows):.3f}-{max(windows):.3f})",
        "-" if limit is None else f"{seconds / limit:.2f}",
        f"{result['tflops']:.0f}" if result["tflops"] >= 10 else f"{result['tflops']:.2g}",
        _gpu_text(result),
        f"{in_use / GIB:.1f}",
        f"{in_use / result['num_parameters']:.1f}",
        "-" if busy is None else f"{busy:.0%}",
        *_observed_texts(result),
        f"{losses[0]:.3f}, {losses[-1]:.3f}",
    ]


def _markdown(header: tuple[str, ...], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _check_rows(checks: list[Check]) -> list[list[str]]:
    rows = []
    for check in checks:
        value = "-" if check.value is None else f"{check.value:.3g}"
        sign = ">=" if check.at_least else "<="
        limit = "-" if check.limit is None else f"{sign} {check.limit:g}"
        rows.append([check.claim, value, limit, check.verdict, check.part])
    return rows


def _hardware_text(parts: list[Json]) -> str:
    """Machine, versions, workload."""
    hardware, workload = parts[0]["hardware"], parts[0]["workload"]
    versions = ", ".join(f"{k} {v}" for k, v in hardware["versions"].items() if v)
    commits = ", ".join(sorted({str(part["hardware"]["commit"]) for part in parts}))
    return (
        f"- Machine: {hardware['gpu'] or 'no GPU'}; {hardware['cores']} cores of {hardware['cpu']}"
        f"\n- Software: Python {hardware['python']}, {versions}; commit {commits}"
        f"\n- Workload: {workload['model']}, {workload['batch']} x {workload['seq']} tokens\n"
    )


def table(parts: list[Json]) -> str:
    """The whole text of table.md."""
    rows = [_row(part, record) for part in parts for record in part["records"]]
    failures = [
        f"- part {part['part']}, {record['entry']['label']}: {record['status']}"
        + (f": `{record['log'][-1]}`" if record["log"] else "")
        for part in parts
        for record in part["records"]
        if record["status"] != records.OK
    ]
    date = max(part["hardware"]["date"] for part in parts)
    return (
        f"# Step time of offloaded training, {date}\n\n"
        f"{_hardware_text(parts)}\n{_markdown(HEADER, rows)}\n"
        "`x limit` is the step over forward and backward only, both of the same part. Host memory "
        "is the process's, or the growth of the machine's use if that is more. FSDP2 runs without "
        "clipping, which is in its favour. Compare systems within a part only.\n\n"
        "## Claims\n\n"
        + _markdown(
            ("claim", "measured", "limit", "verdict", "part"), _check_rows(check_all(parts))
        )
        + ("\n## Not measured\n\n" + "\n".join(failures) + "\n" if failures else "")
    )


def chart(parts: list[Json], path: Path) -> None:
    """Bars of the step time, one group a part, the limit as a line."""
    # Imported here, so that the table can be made where there is no matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = []
    for part in parts:
        labels = dict.fromkeys(record["entry"]["label"] for record in part["records"])
        for label in labels:
            seconds = step_seconds(part, label)
            if seconds is not None:
                bars.append((f"{part['part']}: {label}", seconds, label))
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.3 * len(bars)))
    colors = {REFERENCE: "#888888", "all_gpu": "#888888"}
    for position, (_, seconds, label) in enumerate(bars):
        color = "#1f77b4" if label.startswith("hytrain") else colors.get(label, "#d08770")
        axes.barh(position, seconds, color=color)
        axes.text(seconds, position, f" {seconds:.3f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("seconds a step")
    workload = parts[0]["workload"]
    machine = parts[0]["hardware"]["gpu"] or "CPU"
    axes.set_title(f"{workload['model']}, {workload['batch']} x {workload['seq']}, {machine}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_report(parts: list[Json], results: Path) -> Path:
    """Write the three files; returns their folder, named by hardware and date."""
    date = max(part["hardware"]["date"] for part in parts)
    folder = results / f"{parts[0]['hardware']['slug']}_{date}"
    checks = [{**dataclasses.asdict(c), "verdict": c.verdict} for c in check_all(parts)]
    data = {"schema": records.SCHEMA, "checks": checks, "parts": parts}
    records.write_json(folder / "results.json", data)
    (folder / "table.md").write_text(table(parts))
    chart(parts, folder / "step_time.png")
    return folder


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", type=Path, help="part_*.json files")
    parser.add_argument("--results", default=RESULTS, type=Path)
    options = parser.parse_args(arguments)
    try:
        parts = load_parts(options.parts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = write_report(parts, options.results)
    print((folder / "table.md").read_text())
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
