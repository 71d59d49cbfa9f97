"""Merge the parts' JSON files into a table, a chart and one JSON file.

    python experiments/offload_step/report.py DIR/part_*.json [--results RESULTS] [--note TEXT]

writes RESULTS/<hardware>_<date>/{results.json, table.md, step_time.png}; RESULTS is the folder
`results` beside this file unless it is given. results.json holds the parts unchanged, so that
`report.py RESULTS/.../results.json` writes the same files again.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path

# Run as a script, Python puts this folder on the path, and the package lies two levels above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.common import records
from experiments.common.checks import REFERENCE, host_bytes, measured, step_seconds
from experiments.common.records import GIB, Json
from experiments.common.tables import CHECK_HEADER, check_rows, hardware_lines, markdown, slug_of
from experiments.offload_step.checks import check_all, gpu_peak

RESULTS = Path(__file__).resolve().parent / "results"

HEADER = (
    "part",
    "system",
    "clipping",
    "runs",
    "step s (median; windows)",
    "x fwd+bwd",
    "TFLOP/s",
    "peak GPU GiB",
    "host GiB",
    "host B/param",
    "CPU worker busy",
    "update hidden",
    "steps clipped",
    "J/step GPU, CPU",
    "tokens/J",
    "loss first, last",
)

EXPLANATION = """\
One line a system and part; where a part measured a system several times, `runs` says how often, and
the line is made of all of them (memory: the most). `x fwd+bwd` is the step over forward and
backward only, both of the same part. Host memory is the process's, or the growth of the machine's
use if that is more, here over all parameters, wherever their state is. FSDP2 runs without clipping,
which is in its favour. Compare systems within a part only. Energy is the GPU's (NVML) and that of
the host's processors (RAPL), whatever else ran there included; `-` where it cannot be read, and
`tokens/J` is over what is known.
"""

CEILING = """\
`ceiling`, for a claim about another system's time: that system's time over forward and backward
only, which is what hytrain would reach if its update took no time at all. A limit above the ceiling
cannot be reached on the machine that was measured.
"""


def load_parts(paths: list[Path]) -> list[Json]:
    """Read the parts; they must be of this schema, one workload and one kind of hardware."""
    if not paths:
        raise ValueError("no part files given")
    found: list[tuple[Path, Json]] = []
    for path in paths:
        data = records.read_json(path)
        # A results.json holds the parts that it was made from.
        found += [(path, part) for part in data.get("parts", [data])]
    for path, part in found:
        if part.get("schema") != records.SCHEMA:
            raise ValueError(f"{path} has schema {part.get('schema')}, not {records.SCHEMA}")
        for key in ("workload", "hardware"):
            ours, theirs = _identity(found[0][1], key), _identity(part, key)
            if ours != theirs:
                raise ValueError(f"{path} has {key} {theirs}, but {found[0][0]} has {ours}")
    return [part for _, part in found]


def _identity(part: Json, key: str) -> Json | list[str]:
    """What has to be equal for parts to share a table; dates and commits may differ."""
    if key == "hardware":
        return [part["hardware"]["gpu"] or "no GPU", part["hardware"]["cpu"]]
    return part["workload"]


def clipping_text(entry: Json) -> str:
    """How the entry clips, for the table."""
    variant = entry["options"].get("variant")
    words = {"never": "on, never active", "always": "active at every step", "direct": "none"}
    if variant in words:
        return words[variant]
    if entry["clip"] is not None:
        return f"{entry['clip']:g}"
    return "no update" if entry["system"] == REFERENCE else "none"


def _share_text(shares: list[float]) -> str:
    return f"{statistics.mean(shares):.0%}" if shares else "-"


def observed_texts(results: list[Json]) -> tuple[str, str]:
    """What hytrain says about its timed steps: the share of the update that was hidden behind
    other work, and the share of steps in which clipping was active."""
    rows = [row for result in results for row in result["timing"]["observations"]]
    # Where the CPU updated nothing there was nothing to hide.
    hidden = [
        row["hidden_share"]
        for row in rows
        if row.get("hidden_share") is not None and row.get("update_seconds", 1.0) > 0.0
    ]
    coefficients = [row.get("clip_coefficient") for row in rows]
    clipped = [float(c < 1.0) for c in coefficients if c is not None]
    return _share_text(hidden), _share_text(clipped)


def energy_texts(results: list[Json], workload: Json) -> tuple[str, str]:
    """Joules a step of the GPU and of the processors, and tokens a joule; means of the results."""
    means: list[float | None] = []
    for key in ("gpu_joules", "cpu_joules"):
        # Results of before they were measured have none.
        found = [result["timing"].get(key) for result in results]
        known = [joules for joules in found if joules is not None]
        means.append(statistics.mean(known) if known else None)
    total = sum(joules for joules in means if joules is not None)
    if total <= 0.0:
        return "-", "-"
    texts = ["-" if joules is None else f"{joules:.3g}" for joules in means]
    return ", ".join(texts), f"{workload['batch'] * workload['seq'] / total:.3g}"


def busy_text(results: list[Json]) -> str:
    """The share of the timed steps in which hytrain's worker was busy."""
    shares = [r["worker_busy_share"] for r in results if r["worker_busy_share"] is not None]
    return _share_text(shares)


def _row(part: Json, label: str) -> list[str]:
    """One line of the table: everything that the part measured under a label."""
    repeats = [record for record in part["records"] if record["entry"]["label"] == label]
    results = measured(part, label)
    entry = repeats[0]["entry"]
    start = [part["part"], label, clipping_text(entry)]
    seconds = step_seconds(part, label)
    if seconds is None:
        return [*start, "0", repeats[0]["status"], *[""] * (len(HEADER) - 5)]
    windows = [s for result in results for s in result["timing"]["window_seconds"]]
    limit = step_seconds(part, REFERENCE)
    losses = results[0]["timing"]["losses"]
    tflops = statistics.median(result["tflops"] for result in results)
    peak = gpu_peak(part, label)
    in_use = max(host_bytes(result) for result in results)
    return [
        *start,
        str(len(results)),
        f"{seconds:.3f} ({min(windows):.3f}-{max(windows):.3f})",
        "-" if limit is None else f"{seconds / limit:.2f}",
        f"{tflops:.0f}" if tflops >= 10 else f"{tflops:.2g}",
        "-" if peak is None else f"{peak / GIB:.1f}",
        f"{in_use / GIB:.1f}",
        f"{in_use / results[0]['num_parameters']:.1f}",
        busy_text(results),
        *observed_texts(results),
        *energy_texts(results, part["workload"]),
        f"{losses[0]:.3f}, {losses[-1]:.3f}",
    ]


def _threads_text(part: Json) -> list[str]:
    """The CPU threads of the systems that are given a number, as 'label: chosen of those tried'."""
    texts = []
    for record in part["records"]:
        chosen = (record["result"] or {}).get("threads", {}).get("threads")
        if chosen is not None:
            given = ", ".join(map(str, record["entry"]["options"].get("threads", [])))
            texts.append(f"{part['part']} {record['entry']['label']} {chosen} (of {given})")
    return texts


def _hardware_text(parts: list[Json], note: str) -> str:
    """Machine, versions, workload, and how often was measured."""
    hardware, workload = parts[0]["hardware"], parts[0]["workload"]
    commits = sorted({str(part["hardware"]["commit"] or "not recorded") for part in parts})
    machine, software = hardware_lines(hardware)
    lines = [
        machine,
        f"{software}; commit {', '.join(commits)}",
        f"Workload: {workload['model']}, {workload['batch']} x {workload['seq']} tokens",
    ]
    plans = {
        f"{m['windows']} windows of {m['steps']} steps after {m['warmup']} of warm-up"
        for m in (part["measurement"] for part in parts if "measurement" in part)
    }
    lines += [f"Measured: {'; '.join(sorted(plans))}"] if plans else []
    threads = [text for part in parts for text in _threads_text(part)]
    lines += [f"CPU threads: {'; '.join(threads)}; hytrain chooses its own"] if threads else []
    lines += [f"Note: {note}"] if note else []
    return "".join(f"- {line}\n" for line in lines)


def _labels(part: Json) -> list[str]:
    return list(dict.fromkeys(record["entry"]["label"] for record in part["records"]))


def _failures(parts: list[Json]) -> list[str]:
    """What was asked for and not measured; of repeats, only those that failed."""
    lines = []
    for part in parts:
        for record in part["records"]:
            entry, status = record["entry"], record["status"]
            skipped_repeat = (
                status == records.SKIPPED
                and entry.get("optional")
                and measured(part, entry["label"])
            )
            if status == records.OK or skipped_repeat:
                continue
            last_words = f": `{record['log'][-1]}`" if record["log"] else ""
            lines.append(f"- part {part['part']}, {entry['label']}: {status}{last_words}")
    return lines


def table(parts: list[Json], note: str = "") -> str:
    """The whole text of table.md."""
    rows = [_row(part, label) for part in parts for label in _labels(part)]
    failures = _failures(parts)
    date = max(part["hardware"]["date"] for part in parts)
    return (
        f"# Step time of offloaded training, {date}\n\n"
        f"{_hardware_text(parts, note)}\n{markdown(HEADER, rows)}\n{EXPLANATION}\n"
        f"## Claims\n\n{markdown(CHECK_HEADER, check_rows(check_all(parts)))}\n{CEILING}"
        + ("\n## Not measured\n\n" + "\n".join(failures) + "\n" if failures else "")
    )


COLORS = {
    "no CPU update": "#888888",
    "hytrain, by gpu_fraction": "#1f77b4",
    "other systems": "#d08770",
}


def _kind(label: str) -> str:
    if label in (REFERENCE, "all_gpu"):
        return "no CPU update"
    return "hytrain, by gpu_fraction" if label.startswith("hytrain") else "other systems"


def chart(parts: list[Json], path: Path) -> None:
    """Bars of the step time, one group a part."""
    # Imported here, so that the table can be made where there is no matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    positions: list[float] = []
    names: list[str] = []
    top = 0.0
    figure, axes = pyplot.subplots()
    for part in parts:
        times = {label: step_seconds(part, label) for label in _labels(part)}
        first = top
        for label, seconds in times.items():
            if seconds is None:
                continue
            axes.barh(top, seconds, color=COLORS[_kind(label)], height=0.75)
            axes.text(seconds, top, f" {seconds:.3f}", va="center", fontsize=8)
            positions.append(top)
            names.append(f"{label}  [{part['part']}]")
            top += 1.0
        limit = times.get(REFERENCE)
        if limit is not None:
            axes.plot([limit, limit], [first - 0.5, top - 0.5], ":", color="#444444", linewidth=1)
        top += 0.6
    figure.set_size_inches(9, 1.4 + 0.27 * top)
    axes.set_yticks(positions, names, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.02)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("seconds a step; dotted: forward and backward only, of the same part")
    if positions:
        handles = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
        axes.legend(handles=handles, loc="best", fontsize=8, frameon=False)
    workload, hardware = parts[0]["workload"], parts[0]["hardware"]
    axes.set_title(
        f"{workload['model']}, {workload['batch']} x {workload['seq']} tokens, "
        f"{hardware['gpu'] or 'no GPU'}, {hardware['cores']} CPU cores, {hardware['date']}",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def write_report(parts: list[Json], results: Path, note: str = "") -> Path:
    """Write the three files; returns their folder, named by hardware and date."""
    date = max(part["hardware"]["date"] for part in parts)
    folder = results / f"{slug_of(parts[0]['hardware']['gpu'])}_{date}"
    checks = [{**dataclasses.asdict(c), "verdict": c.verdict} for c in check_all(parts)]
    data = {"schema": records.SCHEMA, "note": note, "checks": checks, "parts": parts}
    records.write_json(folder / "results.json", data)
    (folder / "table.md").write_text(table(parts, note))
    chart(parts, folder / "step_time.png")
    return folder


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="+", type=Path, help="part_*.json files, or a results.json")
    parser.add_argument("--results", default=RESULTS, type=Path)
    parser.add_argument("--note", default="", help="what a reader has to know about these runs")
    options = parser.parse_args(arguments)
    try:
        parts = load_parts(options.parts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = write_report(parts, options.results, options.note)
    print((folder / "table.md").read_text())
    print(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
