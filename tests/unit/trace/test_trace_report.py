"""The report's numbers are exact on a schedule whose every span is known; what is printed fits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.trace_schedule import (
    CPU,
    D2H,
    DATA,
    FORWARD,
    Schedule,
    rewrite,
    write,
)

from hytrain.tools import cli
from hytrain.tools.trace import causes, kinds
from hytrain.tools.trace.analysis import Analysis, analyse, energy
from hytrain.tools.trace.load import load
from hytrain.tools.trace.report_text import sentences, verdict
from hytrain.tools.trace.step_times import PARTS

US = 1000
"""Nanoseconds."""
Capture = pytest.CaptureFixture[str]


def run(folder: Path, schedule: Schedule, first: int = 1, **header: Any) -> Analysis:
    return analyse(load(write(folder, schedule, first=first, **header)))


# -- exact numbers -----------------------------------------------------------------------------


def test_every_number_of_a_step_worked_out_by_hand(tmp_path: Path) -> None:
    """4 layers of 1 ms and 2 ms. After backward of layer 0 come 200 us D2H, 300 us Adam, 200 us
    H2D, then forward of layer 0: a step takes 12.7 ms."""
    one = run(tmp_path, Schedule(steps=5)).steps[0][3]
    assert one.step.length == 12_700 * US
    expected = {
        **{"forward": 4000, "backward": 8000, "gradients to host": 200, "CPU Adam": 300},
        "weights to GPU": 200,
    }
    assert one.parts == dict.fromkeys(PARTS, 0) | {k: v * US for k, v in expected.items()}
    by_name = {
        name: (o.total // US, o.hidden // US, o.exposed // US, o.blocking // US)
        for name, o in one.activities.items()
    }
    assert by_name == {
        "forward": (4000, 0, 4000, 0),
        "backward": (8000, 0, 8000, 0),
        # Of 4 layers only layer 0's is not under backward.
        "update on the CPU": (1200, 900, 300, 300),
        "gradients to host": (800, 600, 200, 200),
        "weights to GPU": (800, 600, 200, 200),
    }
    assert {n: o["update on the CPU"].blocking // US for n, o in one.layers.items()} == {
        **{0: 300, 1: 0, 2: 0, 3: 0}
    }


def test_exposed_is_not_blocking(tmp_path: Path) -> None:
    """The GPU waits for data; a copy that runs meanwhile is exposed, and nobody waits for it."""
    schedule = Schedule(steps=5, gpu_layers=(0,), sync_line="a.py:1").taking(**{DATA: 2000})
    one = run(tmp_path, schedule.fault(D2H, 2300, layer=1)).steps[0][2]
    copies = one.activities["gradients to host"]
    # 2.5 ms, of which 2 are under backward of layer 0 and 0.1 under the update on the GPU.
    assert (copies.exposed, copies.blocking) == (400 * US, 0)
    assert one.parts["data loading"] == 2000 * US


def test_spans_are_united_and_not_summed(tmp_path: Path) -> None:
    """Two threads of CPU Adam beside each other take the time of one."""
    (path,) = write(tmp_path, Schedule(steps=4))
    doubled = rewrite(path, lambda e: [e, e | {"tid": 99}] if e.get("cat") == "cpu_update" else [e])
    one, two = (analyse(load([p])).steps[0] for p in (path, doubled))
    for before, after in zip(one, two, strict=True):
        assert before.parts == after.parts
        assert before.activities == after.activities


def test_the_critical_path_sums_to_the_step(tmp_path: Path) -> None:
    for schedule in (Schedule(steps=5), Schedule(steps=5, ranks=2).taking(**{CPU: 2500})):
        analysis = run(tmp_path, schedule)
        for rank, parts in analysis.critical.items():
            assert sum(parts.values()) == pytest.approx(analysis.step_seconds(rank), rel=1e-9)
    # Bound by CPU Adam, which runs from the first gradient to the last.
    assert analysis.critical[0]["CPU Adam"] > 0.5 * analysis.step_seconds(0)


def test_rates_energy_and_what_was_predicted(tmp_path: Path, capsys: Capture) -> None:
    peaks = {"dram_bytes_per_s": 2e11, "d2h_bytes_per_s": 4e10, "cores": 16}
    schedule = Schedule(steps=4, peaks=peaks, gpu_joules=6.5)
    analysis = run(tmp_path, schedule, first=2, tokens_per_step=1000, predicted_step_s=0.01)
    rates = {rate.name: rate for rate in analysis.rates[0]}
    # 30 MB in 300 us; 2 MB in 200 us; 8 threads.
    assert rates["DRAM, CPU Adam"].achieved == pytest.approx(1e11)
    assert rates["DRAM, CPU Adam"].share == pytest.approx(0.5)
    assert rates["copies to host"].achieved == pytest.approx(1e10)
    assert rates["copies to GPU"].share is None
    assert rates["cores, CPU Adam"].achieved == pytest.approx(8.0)
    power = analysis.energy[0]
    assert power is not None
    assert (power.gpu, power.cpu) == (6.5, None)
    assert power.tokens_per_joule == pytest.approx(1000 / 6.5)
    # Those of processors are all ranks', and so may not be told with one rank's tokens.
    (rank,) = analysis.ranks
    steps = tuple(replace(step, cpu_joules=3.5) for step in rank.steps)
    for ranks, tokens in ((1, pytest.approx(100.0)), (2, None)):
        counted = energy(replace(rank, steps=steps, world_size=ranks))
        assert counted is not None
        assert (counted.gpu, counted.cpu, counted.tokens_per_joule) == (6.5, 3.5, tokens)
    assert cli.main(["trace", "report", str(tmp_path / "trace_rank0.json"), "--verbose"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert " ms; predicted (10.00 ms); " in text
    assert "of peak" in text
    assert "6.5 J a step on the GPU" in text


def test_other_ranks_in_a_ranks_file_are_not_its_own(tmp_path: Path) -> None:
    """As `viztracer --combine` joins files: with the first one's header."""
    paths = write(tmp_path, Schedule(steps=4, ranks=2).fault(CPU, 900, rank=1), first=2)
    first, second = (json.loads(path.read_text()) for path in paths)
    joined = tmp_path / "joined.json"
    events = first["traceEvents"] + second["traceEvents"]
    joined.write_text(json.dumps(first | {"traceEvents": events}))
    assert analyse(load([joined])).causes == analyse(load(paths[:1])).causes


def test_reports_missing_ranks(tmp_path: Path) -> None:
    paths = write(tmp_path, Schedule(steps=3, ranks=2))
    (alone,) = load(paths[:1])
    assert "traces of 1 of 2 ranks were given" in alone.unknown[-1]
    assert not any("were given" in words for rank in load(paths) for words in rank.unknown)


def test_clocks_are_brought_together(tmp_path: Path) -> None:
    """A rank whose clock is 7 ms behind: its file says so."""
    paths = write(tmp_path, Schedule(steps=4, ranks=2).fault(CPU, 900, rank=1), first=2)
    apart = analyse(load(paths))
    values = json.loads(paths[1].read_text())
    for event in values["traceEvents"]:
        for key in {"ts"} & event.keys():
            event[key] -= 7000.0
        if "launched" in event.get("args", {}):
            event["args"]["launched"] -= 7000.0
    values["hytrain"]["clock_offset_us"] = 7000.0
    paths[1].write_text(json.dumps(values))
    assert analyse(load(paths)).causes == apart.causes


def test_kernels_in_place_of_layers(tmp_path: Path) -> None:
    """Four kernels a layer, 5 us apart: the gaps are told, the chain stays what it was."""
    (path,) = write(tmp_path, Schedule(steps=5), first=2)

    def quarters(event: dict[str, Any]) -> list[dict[str, Any]]:
        if event.get("cat") != "gpu":
            return [event]
        length = event["dur"] / 4
        return [
            event | {"name": "gemm", "ts": event["ts"] + n * length, "dur": length - 5.0 * (n < 3)}
            for n in range(4)
        ]

    layers, kernels = (analyse(load([p])).steps[0][2] for p in (path, rewrite(path, quarters)))
    # 8 passes of 3 gaps.
    assert kernels.parts[causes.KERNEL_GAPS] == 8 * 3 * 5 * US
    assert kernels.busy == layers.busy - 8 * 3 * 5 * US
    for cause in (causes.CPU_ADAM, kinds.D2H, kinds.H2D):
        assert kernels.parts[cause] == layers.parts[cause] > 0


# -- properties --------------------------------------------------------------------------------


# -- the command -------------------------------------------------------------------------------


def test_three_sentences_come_first(tmp_path: Path, capsys: Capture) -> None:
    (path,) = write(tmp_path, Schedule(steps=5).taking(**{CPU: 900}), first=2)
    assert cli.main(["trace", "report", str(path)]) == 0
    text = capsys.readouterr().out
    first = " ".join(text.split("\n\n")[0].split())
    assert first.startswith("The GPU computes ")
    assert "It waits for CPU Adam of layer 0 (6.8 %)" in first
    assert "Try first: more GPU layers, which saves at most " in first
    assert "1 of the 4 CPU layers moved to the GPU, updates there cost nothing" in first
    assert not [line for line in text.splitlines() if len(line) > 100]
    assert "what is assumed" in text
    assert "Critical path" not in text
    assert cli.main(["trace", "report", str(path), "--verbose"]) == 0
    text = capsys.readouterr().out
    assert "Critical path" in text
    assert not [line for line in text.splitlines() if len(line) > 100]


@pytest.mark.parametrize(("scale", "is_compared"), [(1, False), (10, True)])
def test_short_steps_are_not_compared(
    tmp_path: Path, capsys: Capture, scale: int, is_compared: bool
) -> None:
    schedule = Schedule(steps=5).taking(backward=2000 * scale, forward=1000 * scale)
    (path,) = write(tmp_path, schedule, predicted_step_s=0.1, recording_overhead=0.1)
    assert cli.main(["trace", "report", str(path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "predicted (100.00 ms)" in text
    assert ("recorded ones are 10.0 % longer" in text) == is_compared
    assert (" % shorter than predicted" in text) == is_compared


def test_layers_are_in_order_and_late_copies_in_words(tmp_path: Path, capsys: Capture) -> None:
    (path,) = write(tmp_path, Schedule(steps=4).fault("late_d2h", 900, layer=0), first=2)
    assert cli.main(["trace", "report", str(path), "--verbose"]) == 0
    text = capsys.readouterr().out
    rows = text.partition("blocking\n")[2].partition("\n\n")[0]
    assert "late gradient copies of layer 0 (" in " ".join(text.split())
    layers = [int(line.split()[0]) for line in rows.splitlines() if line[:1].isdigit()]
    assert layers == sorted(layers) == [0, 1, 2, 3]


def test_json_sums_exactly(tmp_path: Path, capsys: Capture) -> None:
    paths = write(tmp_path, Schedule(steps=5, ranks=2), first=2)
    assert cli.main(["trace", "report", *map(str, paths), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    for rank in found["ranks"]:
        for step in rank["steps"]:
            assert sum(step["parts_ns"].values()) == step["length_ns"]
            idle = sum(part["length_ns"] for part in step["idle"])
            assert idle == step["length_ns"] - step["gpu_busy_ns"]
    assert set(found["sentences"]) == {"overlap", "waits", "change"}


def test_the_slowest_rank_and_its_layer_are_named(tmp_path: Path) -> None:
    schedule = Schedule(layers=6, steps=5, ranks=2, gpu_layers=(0, 1)).fault(
        FORWARD, 4000, rank=1, layer=3
    )
    analysis = run(tmp_path, schedule, first=2)
    overlap, waits, _ = sentences(analysis)
    assert "rank 1, the slowest" in overlap
    late = (
        "Rank 1 is late mostly in backward of layer 0 and takes 5.00 ms a step for forward of layer"
    )
    assert f"{late} 3 (other ranks: 1.00)." in waits
    # Numbers of two ranks do not sum to a step: each has its rank's name.
    (computes, busy, _), (waiting, idle, _), _ = verdict(analysis)
    assert (computes, waiting) == ("rank 1 computes", "rank 0 waits")
    assert busy == f"{analysis.busy_share(1):.1%}".replace("%", " %")
    assert idle == f"{1.0 - analysis.busy_share(0):.1%}".replace("%", " %")
    assert f"Rank 0 waits longest, {idle} of a step: for rank 1 (" in waits


def test_files_of_two_runs_are_refused(tmp_path: Path, capsys: Capture) -> None:
    two = write(tmp_path / "two", Schedule(steps=4, ranks=2))
    (alone,) = write(tmp_path / "one", Schedule(steps=4))
    assert "world size 1, " in _error(capsys, "report", alone, two[1])
    later = rewrite(
        two[1], lambda event: [event | {"ts": event["ts"] + 1e9}] if "ts" in event else [event]
    )
    assert "different times" in _error(capsys, "report", two[0], later)


def test_reports_a_ring_that_was_full(tmp_path: Path, capsys: Capture) -> None:
    (path,) = write(tmp_path, Schedule(steps=3), overwritten=True, dropped_spans=12)
    assert cli.main(["trace", "report", str(path)]) == 0
    assert "12 spans are missing" in " ".join(capsys.readouterr().out.split())


def test_compare_in_words_and_a_table(tmp_path: Path, capsys: Capture) -> None:
    schedule = Schedule(layers=6, steps=5).taking(**{CPU: 2500})
    (one,) = write(tmp_path / "a", schedule, first=2)
    (other,) = write(tmp_path / "b", replace(schedule, gpu_layers=(0, 1, 2, 3, 4, 5)), first=2)
    assert cli.main(["trace", "compare", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    assert "shorter than one of A" in text
    assert "CPU Adam -" in text
    assert not [line for line in text.splitlines() if len(line) > 100]
    assert cli.main(["trace", "compare", str(one), str(other), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    differences = sum(part["after"] - part["before"] for part in found["parts"])
    assert differences == pytest.approx(found["step"]["after"] - found["step"]["before"])


def test_a_folder_stands_for_its_traces(tmp_path: Path, capsys: Capture) -> None:
    paths = write(tmp_path, Schedule(steps=5, ranks=2), first=2)
    assert cli.main(["trace", "report", *map(str, paths)]) == 0
    given = capsys.readouterr().out
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 1}')
    assert cli.main(["trace", "report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == given
    (tmp_path / "none").mkdir()
    text = _error(capsys, "report", tmp_path / "none")
    assert text.endswith("none is a folder without a trace: give the traces of a run\n")


def _error(capsys: Capture, *arguments: object, lines: int = 1) -> str:
    assert cli.main(["trace", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == lines
    return captured.err


def test_errors_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    (path,) = write(tmp_path, Schedule(steps=3))
    cut = tmp_path / "cut.json"
    cut.write_text(path.read_text()[:-500])
    assert "ends in the middle" in _error(capsys, "report", cut)
    assert "no such file" in _error(capsys, "report", tmp_path / "none.json").lower()
    text = _error(capsys, "report", cut, tmp_path / "none.json", path, lines=2)
    assert "ends in the middle" in text
    assert "none.json" in text
    assert "both of rank 0" in _error(capsys, "report", path, path)
    assert "would replace the file of FILE" in _error(capsys, "report", path, "--html", path)
    assert "there is no folder" in _error(capsys, "report", path, "--html", "/none/a.html")
    other = tmp_path / "other.json"
    other.write_text('{"hytrain": {}}')
    assert "no page of" in _error(capsys, "report", path, "--html", other)
    assert other.read_text() == '{"hytrain": {}}'
    assert "is a DeepSpeed configuration" in _error(capsys, "report", other)
    for _ in range(2):  # a page of before is replaced
        page = tmp_path / "page.html"
        assert cli.main(["trace", "report", str(path), "--html", str(page)]) == 0
        assert f"page: {page}\n" in capsys.readouterr().err
    values = json.loads(path.read_text())
    values["hytrain"]["format"] = 9
    other.write_text(json.dumps(values))
    assert "format 9, this hytrain reads 1" in _error(capsys, "compare", path, other)


def test_hand_overs_have_their_own_name(tmp_path: Path) -> None:
    """Up to 50 us between the end of one task and the begin of the next are no late copy."""
    schedule = Schedule(steps=4).fault("late_h2d", 40).fault("starved", 50)
    one = run(tmp_path, schedule).steps[0][2]
    assert one.parts[causes.HAND_OVER] == 90 * US
    assert one.parts[causes.LATE_WEIGHT_COPY] == one.parts[causes.STARVED_CPU] == 0
    late = run(tmp_path, Schedule(steps=4).fault("late_h2d", 51)).steps[0][2]
    assert late.parts[causes.LATE_WEIGHT_COPY] == 51 * US
