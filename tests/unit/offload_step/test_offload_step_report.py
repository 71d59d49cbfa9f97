"""Merging parts, deciding claims, and the table: from made-up measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.common import records
from experiments.common.sizes import SIZES
from experiments.offload_step.checks import CLAIMS, check_all
from experiments.offload_step.report import load_parts, main, table, write_report

Json = dict[str, Any]

GIB = 2**30
PARAMETERS = SIZES["llama-3b"].num_parameters


def result_of(seconds: float, *, busy: float | None = None, host: int = 40 * GIB) -> Json:
    observations = [
        {"step": 1, "hidden_share": 0.9, "clip_coefficient": 1.0},
        {"step": 2, "hidden_share": 0.7, "clip_coefficient": 0.5},
    ]
    return {
        "status": records.OK,
        "num_parameters": PARAMETERS,
        "step_seconds": seconds,
        "tflops": 142.1 / seconds,
        "timing": {
            "window_seconds": [seconds, seconds * 1.01, seconds * 0.99],
            "losses": [10.4, 9],
            "observations": observations if busy is not None else [],
        },
        "worker_busy_share": busy,
        "gpu": {"peak_allocated_bytes": 34 * GIB},
        "host": {"steps_rss_bytes": host, "steps_machine_bytes": host - GIB},
    }


def record_of(
    label: str, result: Json | None, status: str = records.OK, *, optional: bool = False
) -> Json:
    system = "hytrain" if label.startswith("hytrain") else label
    variant = label.split()[-1] if label.split()[-1] in ("never", "direct", "always") else "clip"
    options = {"variant": variant} if system == "hytrain" else {}
    return {
        "entry": {
            "label": label,
            "system": system,
            "clip": 1.0,
            "options": options,
            "optional": optional,
        },
        "status": status,
        "log": [] if result else ["Traceback", "RuntimeError: what went wrong"],
        "result": result,
    }


def part_of(name: str, *measured: Json) -> Json:
    return {
        "schema": records.SCHEMA,
        "part": name,
        "hardware": {
            "gpu": "NVIDIA H200",
            "cpu": "a CPU",
            "cores": 16,
            "python": "3.12.3",
            "versions": {"torch": "2.11.0", "hytrain": None},
            "commit": "abc1234",
            "date": "2026-01-02",
        },
        "workload": {"model": "llama-3b", "batch": 8, "seq": 1024, "device": "cuda"},
        "records": list(measured),
    }


def headline_part(hytrain_0: float = 0.8) -> Json:
    return part_of(
        "A",
        record_of("forward_backward", result_of(0.33)),
        record_of("hytrain 0", result_of(hytrain_0, busy=0.95, host=42 * GIB)),
        record_of("zero2_offload", result_of(1.7)),
        record_of("hytrain 0.7", result_of(0.36, busy=0.7)),
        record_of("fsdp2", result_of(1.5)),
        record_of("forward_backward", result_of(0.35)),
    )


def verdicts(*parts: Json) -> dict[str, str]:
    return {check.claim: check.verdict for check in check_all(parts)}


def test_claims_are_decided_within_a_part() -> None:
    found = verdicts(headline_part())
    assert found["gpu_fraction 0: ZeRO-2 offload's time / hytrain's"] == "reached"
    assert found["gpu_fraction 0: FSDP2's time / hytrain's"] == "reached"
    assert found["gpu_fraction 0: the CPU worker's busy share of the step"] == "reached"
    assert found["gpu_fraction 0.7: hytrain's time / forward and backward only"] == "reached"
    assert found["gpu_fraction 0: host bytes a parameter, beyond 3 GiB"] == "reached"
    assert found["gpu_fraction 0: peak GPU memory / ZeRO-2 offload's"] == "reached"
    clip = "gpu_fraction 0: time with clipping that never triggers / direct commit"
    assert found[clip] == "not measured"


def test_the_worst_part_decides() -> None:
    slow = headline_part(hytrain_0=0.9)
    checks = {check.claim: check for check in check_all([headline_part(), slow | {"part": "Z"}])}
    check = checks["gpu_fraction 0: ZeRO-2 offload's time / hytrain's"]
    assert check.part == "Z"
    assert check.verdict == "missed"


def test_no_ratio_is_taken_across_parts() -> None:
    ours = part_of("A", record_of("hytrain 0", result_of(0.8)))
    theirs = part_of("B", record_of("zero2_offload", result_of(1.7)))
    assert verdicts(ours, theirs)["gpu_fraction 0: ZeRO-2 offload's time / hytrain's"] == (
        "not measured"
    )


def test_repeats_are_reduced_to_their_median() -> None:
    measured = [
        record_of("hytrain 0.7 direct", result_of(seconds)) for seconds in (0.36, 0.50, 0.36)
    ]
    part = part_of("C", *measured, record_of("hytrain 0.7 never", result_of(0.363)))
    claim = "gpu_fraction 0.7: time with clipping that never triggers / direct commit"
    check = next(check for check in check_all([part]) if check.claim == claim)
    assert check.value == pytest.approx(0.363 / 0.36)
    assert check.verdict == "reached"


def test_clipping_at_every_step_is_reported_without_a_limit() -> None:
    part = part_of(
        "C",
        record_of("hytrain 0 direct", result_of(0.8)),
        record_of("hytrain 0 always", result_of(1.2)),
    )
    claim = "gpu_fraction 0: time with clipping at every step / direct commit"
    assert verdicts(part)[claim] == "reported"


def test_the_table_names_failures_and_their_last_words() -> None:
    failed = record_of("hytrain 0.3", None, records.FAILED)
    skipped = record_of("hytrain 1", None, records.SKIPPED)
    text = table([part_of("B", record_of("forward_backward", result_of(0.33)), failed, skipped)])
    assert "| B | hytrain 0.3 | 1 | 0 | failed |" in text
    assert "- part B, hytrain 0.3: failed: `RuntimeError: what went wrong`" in text
    assert "- part B, hytrain 1: skipped" in text


def test_repeats_share_a_line_and_skipped_ones_are_not_missed() -> None:
    first, second = record_of("hytrain 0", result_of(0.8)), record_of("hytrain 0", result_of(0.6))
    skipped = record_of("hytrain 0", None, records.SKIPPED, optional=True)
    text = table([part_of("C", first, second, skipped)])
    lines = [line for line in text.splitlines() if line.startswith("| C | hytrain 0 |")]
    assert len(lines) == 1
    assert "| 2 | 0.700 (0.594-0.808) |" in lines[0]
    assert "Not measured" not in text


def test_nothing_is_hidden_where_the_cpu_updates_nothing() -> None:
    result = result_of(0.35, busy=0.0)
    for row in result["timing"]["observations"]:
        row["update_seconds"] = 0.0
    text = table([part_of("B", record_of("hytrain 1", result))])
    line = next(line for line in text.splitlines() if line.startswith("| B | hytrain 1 |"))
    assert "| 0% | - | 50% |" in line


def test_a_limit_above_the_ceiling_is_said_to_be_so() -> None:
    part = part_of(
        "A",
        record_of("forward_backward", result_of(0.32)),
        record_of("hytrain 0.7", result_of(0.34)),
        record_of("zero2_offload", result_of(1.28)),
    )
    claim = "gpu_fraction 0.7: ZeRO-2 offload's time / hytrain's"
    check = next(check for check in check_all([part]) if check.claim == claim)
    assert check.ceiling == pytest.approx(4.0)
    assert check.verdict == "missed: above the ceiling"
    reachable = next(c for c in check_all([headline_part()]) if c.claim == claim)
    assert reachable.ceiling == pytest.approx(5.0)
    assert reachable.verdict == "reached"


def test_the_note_and_the_plan_are_in_the_table() -> None:
    part = headline_part() | {"measurement": {"windows": 2, "steps": 5, "warmup": 4}}
    text = table([part], "two hosts")
    assert "- Note: two hosts\n" in text
    assert "- Measured: 2 windows of 5 steps after 4 of warm-up\n" in text


def test_a_report_can_be_made_from_its_own_results(tmp_path: Path) -> None:
    folder = write_report([headline_part()], tmp_path)
    assert load_parts([folder / "results.json"]) == [headline_part()]


def test_the_table_shows_what_the_steps_say() -> None:
    text = table([part_of("A", record_of("hytrain 0", result_of(0.8, busy=0.95)))])
    line = next(line for line in text.splitlines() if line.startswith("| A | hytrain 0 |"))
    assert "| 95% | 80% | 50% |" in line


@pytest.mark.parametrize(
    ("gpu", "cpu", "cells"),
    [
        (400.0, 100.0, "| 400, 100 | 32.8 |"),
        (400.0, None, "| 400, - | 41 |"),
        (None, None, "| - | - |"),
    ],
)
def test_the_table_shows_energy_where_it_is_known(
    gpu: float | None, cpu: float | None, cells: str
) -> None:
    results = [result_of(0.8), result_of(0.9)]
    for result in results:
        result["timing"] |= {"gpu_joules": gpu, "cpu_joules": cpu}
    part = part_of("A", *(record_of("hytrain 0", result) for result in results))
    part["workload"] |= {"batch": 8, "seq": 2048}
    line = next(line for line in table([part]).splitlines() if line.startswith("| A | hytrain 0 |"))
    assert f"{cells} 10.4" in line


def test_every_table_line_has_as_many_cells_as_its_header() -> None:
    text = table([headline_part(), part_of("B", record_of("x", None, records.TIMED_OUT))])
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    counts = {line.count("|") for line in lines}
    assert len(counts) == 2, "one width for the systems, one for the claims"


def test_files_are_named_by_hardware_and_date(tmp_path: Path) -> None:
    path = tmp_path / "part_A.json"
    records.write_json(path, headline_part())
    assert main([str(path), "--results", str(tmp_path / "results")]) == 0
    folder = tmp_path / "results" / "nvidia_h200_2026-01-02"
    assert sorted(p.name for p in folder.iterdir()) == [
        "results.json",
        "step_time.png",
        "table.md",
    ]
    data = records.read_json(folder / "results.json")
    assert len(data["checks"]) == len(CLAIMS)
    assert data["parts"] == [headline_part()]


def test_a_report_without_any_measurement_is_written(tmp_path: Path) -> None:
    part = part_of("A", record_of("hytrain 0", None, records.OUT_OF_MEMORY))
    assert "out of memory" in (write_report([part], tmp_path) / "table.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 0}, "schema"),
        ({"workload": {"model": "toy"}}, "workload"),
        ({"hardware": {"gpu": "other", "cpu": "a CPU"}}, "hardware"),
        ({"hardware": {"gpu": "NVIDIA H200", "cpu": "other"}}, "hardware"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    tmp_path: Path, change: Json, message: str
) -> None:
    first, second = tmp_path / "part_A.json", tmp_path / "part_B.json"
    records.write_json(first, headline_part())
    records.write_json(second, headline_part() | change)
    with pytest.raises(ValueError, match=message):
        load_parts([first, second])
