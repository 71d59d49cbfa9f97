"""What commands print fits 100 columns, with usual values and with very large ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.placement_runs import costs, decision, text_of, typical_run
from support.plan_profiles import a_device, a_host, a_profile
from support.trace_schedule import Schedule, write

from hytrain.formats.profile_file import ProfileFile, UpdateLaunches
from hytrain.formats.text_table import WIDTH, align, fold
from hytrain.placement.costs import LayerBytes
from hytrain.placement.memory import table
from hytrain.tools import cli
from hytrain.tools.explain.candidates import CandidateRow, candidate_rows
from hytrain.tools.explain.history import Median, read_history
from hytrain.tools.explain.report import candidates_text, run_text
from hytrain.tools.kernel_bench.run import format_table
from hytrain.tools.planner.plan import make_plan
from hytrain.tools.planner.plan_report import plan_text
from hytrain.tools.planner.profile_problem import PlanOptions, problem_from
from hytrain.tools.planner.result import Plan
from hytrain.tools.profiler.profile_report import profile_table
from hytrain.tools.trace.analysis import analyse
from hytrain.tools.trace.compare import compare, compare_text
from hytrain.tools.trace.load import load
from hytrain.tools.trace.report_text import report
from hytrain.tools.uneven.cases import UnevenCase
from hytrain.tools.uneven.problem import UnevenGpu, UnevenProblem
from hytrain.tools.uneven.report import cases_table, solve_cases

GIB = 1024**3


def check_width(text: str, longest: int = WIDTH) -> None:
    assert [line for line in text.splitlines() if len(line) > longest] == []


# -- the helpers -------------------------------------------------------------------------------


def test_a_table_that_fits_is_not_folded() -> None:
    rows = [("a name", "two words"), ("x", "1"), ("longer", "22")]
    assert align(rows) == ["a name  two words", "x               1", "longer         22"]


def test_words_of_the_heading_are_folded_first_then_cells_that_hold_words() -> None:
    rows = [("n", "two words", "why"), ("1", "12345", "some words and more"), ("2", "1", "none")]
    heading, first, second = align(rows, left=(0, 2), width=30)
    assert heading.splitlines() == ["     two", "n  words  why"]
    assert first == "1  12345  some words and more"
    assert second == "2      1  none"
    _, first, second = align(rows, left=(0, 2), width=22)
    assert first.splitlines() == ["1  12345  some words", "          and more"]
    assert second == "2      1  none"


def test_numbers_stay_whole_where_nothing_else_can_be_folded() -> None:
    heading, row = align([("a", "b"), ("x", "9" * 30)], width=20)
    assert row == f"x  {'9' * 30}"
    assert heading.split() == ["a", "b"]
    assert align([("a", "b")]) == ["a  b"], "a heading alone"


def test_long_lines_are_folded_at_spaces() -> None:
    path = "/a/folder" * 12
    text = fold(f"short\n  {'word ' * 30}\n\n{path}")
    first, *folded, empty, last = text.splitlines()
    assert (first, empty, last) == ("short", "", path)
    assert folded[0].startswith("  word")
    assert all(line.startswith("    word") and len(line) <= WIDTH for line in folded[1:])
    assert " ".join(text.split()).count("word") == 30


def test_a_number_keeps_its_percent_sign() -> None:
    assert fold("a word of 3.6 %.", 14).splitlines() == ["a word of", "  3.6 %."]


# -- plan --------------------------------------------------------------------------------------

EXTREME = "NVIDIA GeForce RTX 4090 Laptop GPU with a name that nobody has given to any GPU as yet"


def profile(name: str, host: str, *, layers: int, gigabytes: float) -> ProfileFile:
    devices = [a_device(host, name, speed=speed, gigabytes=gigabytes) for speed in (1.0, 0.25)]
    made = a_profile(host, *devices)
    hosts = (a_host(host, *devices, gigabytes=2000),)
    model = made.model.model_copy(update={"num_layers": layers})
    return made.model_copy(update={"hosts": hosts, "model": model})


@pytest.mark.parametrize(
    ("name", "host", "layers", "gigabytes", "batch"),
    [("NVIDIA H200", "node-0", 32, 139.8, 256), (EXTREME, "a-host-of-" * 9, 999, 9999.9, 64)],
    ids=["realistic", "extreme"],
)
def test_plan(
    name: str, host: str, layers: int, gigabytes: float, batch: int, tmp_path: Path, capsys: Any
) -> None:
    made = profile(name, host, layers=layers, gigabytes=gigabytes)
    path = tmp_path / "profile.json"
    path.write_text(made.model_dump_json(), encoding="utf-8")
    assert cli.main(["plan", "--profile", str(path), "--batch", str(batch)]) == 0
    text = capsys.readouterr().out
    check_width(text)
    assert text.count("limited by") == 3, "the plan, an even split, one by speed"
    check_width(fold(profile_table(made)))


@pytest.mark.parametrize("limit", ["gpu", "cpu", "copies", "host", "weights"])
def test_plan_with_the_widest_cells(limit: str) -> None:
    options = PlanOptions(batch=64, gpu_reserve=lambda _: 0, host_reserve=lambda _: 0)
    problem = problem_from(profile("L4", "node-0", layers=12, gigabytes=80.0), options)
    plan = make_plan(problem)
    assert isinstance(plan, Plan)
    widest: dict[str, Any] = {
        **{"batch_size": 65535, "microbatch_size": 4096, "activations": "recompute"},
        **{"step_seconds": 99999.9, "gpu_bytes": 10000 * GIB - 1, "host_bytes": 10**5 * GIB - 1},
        **{"shard_fraction": 1.0, "gpu_layers": 999, "limit": limit},
    }
    ranks = tuple(rank.model_copy(update=widest) for rank in plan.ranks)
    text = plan_text(problem, replace(plan, ranks=ranks), ())
    check_width(fold(text))
    check_width(text.split("\nplan\n")[1].split("\npredicted")[0])  # the table is not cut later
    assert "65535 by 4096    recompute" in text


# -- profile -----------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1e4])
def test_profile(factor: float) -> None:
    made = profile("NVIDIA H200", "node-0", layers=32, gigabytes=139.8)
    devices = [
        device.model_copy(
            update={
                "settings": "words about clocks and power limits " * 5,
                "launch_slowdown": 2.0 * factor,
                "launch_spread": 2.0 * factor,
                "update_launches": UpdateLaunches(
                    gpu_step_ms=0.1 * factor,
                    launch_ms=0.1 * factor,
                    gpu_layer_ms=0.1 * factor,
                    cpu_layer_ms=0.1 * factor,
                ),
                "layer": tuple(
                    type(row)(
                        **{
                            name: type(value)(value * (1 if name == "samples" else factor))
                            for name, value in (
                                row.model_dump() | {"launch_ms": 100.0, "device_ms": 50.0}
                            ).items()
                        }
                    )
                    for row in device.layer
                ),
            }
        )
        for device in made.devices
    ]
    text = fold(profile_table(made.model_copy(update={"devices": tuple(devices)})))
    check_width(text)
    assert "launch-bound up to" in text
    (heading, *_) = [line for line in text.splitlines() if line.startswith("  samples")]
    assert heading.split()[-2:] == ["ms", "MiB"]


# -- explain -----------------------------------------------------------------------------------


def test_explain_a_run() -> None:
    records = typical_run(clipped_share=0.5)
    text = run_text(read_history(text_of(records)))
    check_width(fold(text))
    table = text.split("Candidates\n\n")[1].split("worker:")[0]
    check_width(table)
    assert "<- chosen" in table


def test_explain_a_run_with_a_long_reason(tmp_path: Path, capsys: Any) -> None:
    record = decision(10, 0, 13, measured=costs()).metrics_record()
    record["placement"]["reason"] = "a reason that takes many words to be told, " * 6
    path = tmp_path / "metrics.jsonl"
    path.write_text(text_of([record]), encoding="utf-8")
    assert cli.main(["explain", str(path)]) == 0
    check_width(capsys.readouterr().out)


@pytest.mark.parametrize("seconds", [0.35, 999.999])
def test_explain_candidates(seconds: float) -> None:
    rows = candidate_rows(decision(10, 0, 13, measured=costs()), lambda _: Median(seconds, 7))
    widest = [_wide(row, seconds) for row in rows]
    check_width(candidates_text(rows))
    check_width(candidates_text(widest))
    both = candidates_text([replace(row, marks=("chosen", "closed form")) for row in rows])
    check_width(both)
    assert "<- chosen" in both


def _wide(row: CandidateRow, seconds: float) -> CandidateRow:
    return replace(
        row,
        gpu_layers=row.gpu_layers + 9000,
        predicted_seconds=seconds,
        worker_seconds=seconds,
        exposed_seconds=seconds,
        gpu_bytes=9999 * GIB,
        host_bytes=99999 * GIB,
        error=-0.999,
        marks=("chosen", "closed form"),
    )


def test_explain_a_configuration(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "config.json"
    section = {"gpu_fraction": 0.5, "solver": {"method": "closed_form", "alpha": 0.1}}
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    text = json.dumps({"hytrain": section, "zero_optimization": zero})
    path.write_text(text, encoding="utf-8")
    assert cli.main(["explain", str(path)]) == 0
    check_width(capsys.readouterr().out.replace(f"{tmp_path}/", ""))


def test_what_memory_takes() -> None:
    layers = tuple(LayerBytes(f"layer {n}", 10**11) for n in range(2000))
    limits = decision(0, 0, 0).limits
    limits = replace(limits, gpu=9999 * GIB, host=99999 * GIB)
    check_width(table(layers, limits, 999 * GIB, [0, 1000, 2000]))


# -- trace -------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 10**4])
def test_trace(factor: int, tmp_path: Path) -> None:
    schedule = Schedule(layers=12, ranks=2, steps=3, clipped=(2,), sync_line="a_module.py:1234")
    schedule = schedule.taking(**{name: time * factor for name, time in schedule.times.items()})
    schedule = replace(schedule, user_function="a function with a long name (module.py:99)")
    runs = [
        analyse(load(write(tmp_path / name, one, first=2, predicted_step_s=1.0)))
        for name, one in (("a", schedule), ("b", schedule.fault("cpu", 900 * factor)))
    ]
    check_width(fold(report(runs[1])))
    check_width(fold(compare_text(compare(*runs))))
    tables = [line for line in report(runs[1]).splitlines() if line[:1].isdigit()]
    check_width("\n".join(tables))


# -- bench and uneven --------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.0, 1e5])
def test_bench(factor: float) -> None:
    figures = {
        "gparams_per_s": 5.1234 * factor,
        "gbytes_per_s": 143.256 * factor,
        "num_threads": int(16 * factor),
        "of_read_write": 0.95 * factor,
        "over_fp32": 1.5 * factor,
    }
    names = ["commit", "commit_then_preview_8bit"]
    check_width(format_table(dict.fromkeys(names, figures) | {"deepspeed_adam": None}))


def _case(name: str, capacity: float, factor: float) -> UnevenCase:
    sizes = range(1, 17)
    times = tuple(3.0 * factor * size for size in sizes), tuple(6.0 * factor * n for n in sizes)
    gpu = UnevenGpu("GPU", *times, memory=tuple(2.0 + n for n in sizes), capacity=capacity)
    problem = UnevenProblem(gpus=(gpu,) * 2, batch=16, parameters=2**26)
    return UnevenCase(name, ("GPU",) * 2, problem, 100.0 * factor)


@pytest.mark.parametrize("factor", [1.0, 1e6])
@pytest.mark.parametrize("name", ["a model", "a model with a name of many words " * 5])
def test_uneven(name: str, factor: float) -> None:
    text = cases_table(solve_cases([_case(name, 64.0, factor), _case(name, 1.0, factor)]))
    check_width(fold(text))
    assert "none fits" in text
    table = [line for line in text.splitlines() if not line.startswith(("    ", "*"))]
    check_width("\n".join(table))
