"""Deciding claims, the table and the chart: from made-up measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from experiments.common import records
from experiments.solve_k.checks import by_cap, check_all, error_matrix, others_host_bytes
from experiments.solve_k.recorder import HOST_MEMORY_LOW
from experiments.solve_k.report import load_parts, main, table, write_report

Json = dict[str, Any]

GIB = 2**30
LAYERS = 10


def timed_of(layers: int | None, seconds: float, **more: Any) -> Json:
    timed: Json = {
        "step_seconds": seconds,
        "window_seconds": [seconds, seconds],
        "tflops": 142.0 / seconds,
        "plain_tflops": 143.0 / seconds,
        "gpu": {"peak_allocated_bytes": 34 * GIB},
        "allocator": {"num_ooms": 0, "num_alloc_retries": 0},
    }
    if layers is not None:
        timed |= {
            "gpu_layers": layers,
            "num_layers": LAYERS,
            "at_step": layers + 1,
            "clipped_share": 0.5,
            "update_seconds": 0.2,
            "exposed_seconds": 0.01,
            "host_rss_bytes": 20 * GIB,
            "decisions_meanwhile": 0,
            "costs": None,
            "predicted_seconds": None,
        }
        timed["gpu"] = {"peak_allocated_bytes": (34 + 3 * layers) * GIB}
    return timed | more


def decision_of(layers: int) -> Json:
    return {
        "step": 4,
        "gpu_layers_before": 0,
        "gpu_layers_target": layers,
        "reason": "host-bound",
        "gpu_reserve_bytes": 2 * GIB,
    }


def settling_of(layers: int) -> Json:
    return {
        "steps": 32,
        "is_settled": True,
        "settled_after": 8,
        "decisions": [decision_of(layers)],
    }


STEPS = {0: 0.60, 2: 0.50, 4: 0.40, 5: 0.352, 6: 0.345, 8: 0.344, 10: 0.346}


def sweep_result(solved: int = 6) -> Json:
    predicted = [0.6, 0.55, 0.51, 0.45, 0.42, 0.36, 0.345, 0.345, 0.345, 0.345, 0.346]
    points = [
        timed_of(layers, seconds, predicted_seconds=predicted, predicted_for_its_clipping=seconds)
        for layers, seconds in STEPS.items()
    ]
    return {
        "status": records.OK,
        "num_parameters": 2_915_000_000,
        "checkpointing": False,
        "gpu_total_bytes": 140 * GIB,
        "reference": timed_of(None, 0.33),
        "reference_again": timed_of(None, 0.33),
        "settling": settling_of(solved),
        "solved": timed_of(solved, STEPS[solved], predicted_seconds=predicted),
        "closed_form": {"k": 0.42, "gpu_layers": 4},
        "points": [*points, {"asked_gpu_layers": 9, "refused": "does not fit"}],
    }


def capped_result(cap: float, layers: int, **more: Any) -> Json:
    return {
        "status": records.OK,
        "num_parameters": 2_915_000_000,
        "gpu_total_bytes": 140 * GIB,
        "cap": cap,
        "settling": settling_of(layers),
        "solved": timed_of(layers, 0.4),
    } | more


def record_of(label: str, result: Json | None, status: str = records.OK, **options: Any) -> Json:
    return {
        "entry": {"label": label, "system": "hytrain", "clip": 1.0, "options": options},
        "status": status,
        "log": [] if status == records.OK else ["Traceback", "RuntimeError: what went wrong"],
        "result": result,
    }


def part_of(name: str, *measured: Json) -> Json:
    return {
        "schema": records.SCHEMA,
        "experiment": "solve_k",
        "part": name,
        "command": f"python experiments/solve_k/run.py --part {name} --out DIR",
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


def offload_part() -> Json:
    def result(seconds: float, host: int) -> Json:
        memory = {"steps_rss_bytes": host * GIB, "steps_machine_bytes": 0}
        return {"step_seconds": seconds, "host": memory, "num_parameters": GIB}

    labels = {"forward_backward": (0.33, 1), "zero2_offload": (1.7, 24), "fsdp2": (1.3, 20)}
    measured = [record_of(label, result(*values)) for label, values in labels.items()]
    part = part_of("A", *measured)
    del part["experiment"]
    return part


def checks_of(*parts: Json) -> dict[str, Any]:
    return {check.claim: check for check in check_all(parts, [offload_part()])}


def test_a_good_sweep_reaches_every_claim() -> None:
    found = checks_of(part_of("sweep", record_of("sweep", sweep_result())))
    verdicts = {claim: check.verdict for claim, check in found.items() if check.part == "sweep"}
    good = ("reached", "reported")
    missed = {claim for claim, verdict in verdicts.items() if verdict not in good}
    assert len(verdicts) == 10
    assert missed == {"sweep: FSDP2's time, of another run / hytrain's"}
    check = found["sweep: FSDP2's time, of another run / hytrain's"]
    assert check.value == pytest.approx(1.3 / 0.345)
    assert check.verdict == "missed: above the ceiling"


def test_more_gpu_layers_than_needed_are_seen() -> None:
    found = checks_of(part_of("sweep", record_of("sweep", sweep_result(solved=8))))
    check = found["sweep: GPU memory at the solved k / at the smallest k within 1 % of the best"]
    assert check.value == pytest.approx((34 + 24) / (34 + 18))
    assert check.verdict == "missed"


def test_too_few_gpu_layers_are_seen() -> None:
    found = checks_of(part_of("sweep", record_of("sweep", sweep_result(solved=4))))
    check = found["sweep: step at the solved k / best fixed k"]
    assert check.value == pytest.approx(0.40 / 0.344)
    assert check.verdict == "missed"


def test_the_largest_prediction_error_counts_whatever_its_sign() -> None:
    result = sweep_result()
    result["solved"]["predicted_seconds"] = [0.50, *result["solved"]["predicted_seconds"][1:]]
    found = checks_of(part_of("sweep", record_of("sweep", result)))
    check = found["sweep: largest prediction error, costs taken at the solved k"]
    assert check.value == pytest.approx(1 / 6)
    assert check.verdict == "missed"
    layers, error = error_matrix(result)[10]
    assert (layers, error) == (4, pytest.approx(0.05))


def caps_part(*layers: int) -> Json:
    """k at the caps 0.3, 0.36 and without any; then at each of the lowered caps."""
    lowerings = [
        {
            "cap": cap,
            "reserve_bytes": 2 * GIB,
            "following": settling_of(count),
            "followed": timed_of(count, 0.4),
        }
        for cap, count in zip((0.38, 0.36), layers[3:], strict=False)
    ]
    lowered = {**capped_result(1.0, layers[2]), "lowerings": lowerings}
    del lowered["cap"]
    return part_of(
        "caps",
        record_of("cap 0.3", capped_result(0.30, layers[0]), plan="capped"),
        record_of("cap 0.42", capped_result(0.42, layers[1]), plan="capped"),
        record_of("cap lowered", lowered, plan="lowered"),
    )


LOWERED = "cap lowered: peak GPU memory / cap less reserve, when k has followed"


def test_k_that_follows_the_cap() -> None:
    part = caps_part(1, 5, 6, 5, 4)
    assert by_cap(part["records"]) == [(0.30, 1), (0.42, 5), (1.0, 6)]
    found = checks_of(part)
    assert {c.verdict for c in found.values() if c.part == "caps"} == {"reached"}
    assert found["caps: peak GPU memory / cap less reserve"].value == pytest.approx(
        max(37 / 40, 49 / 56.8)
    )
    assert found["cap lowered: GPU layers after / before"].value == pytest.approx(5 / 6)
    assert found[LOWERED].value == pytest.approx(max(49 / 51.2, 46 / 48.4))


def test_k_that_does_not_follow_the_cap() -> None:
    found = checks_of(caps_part(5, 5, 6, 5, 5))
    check = found["caps: levels at which k does not grow with the cap"]
    assert check.value == 1.0
    assert found["cap lowered: GPU layers after / before"].verdict == "missed"
    assert found[LOWERED].value == pytest.approx(49 / 48.4)


def test_a_lowered_cap_that_ends_the_process_spoils_no_other_claim() -> None:
    part = caps_part(1, 5, 6)
    record = part["records"][-1]
    # As the first version of this plan left it: the cap beside what was timed without one.
    record["result"] |= {"cap": 0.36, "following": settling_of(6)}
    record["status"] = records.OUT_OF_MEMORY
    found = checks_of(part)
    verdicts = {c.claim: c.verdict for c in found.values() if c.part == "caps"}
    assert [claim for claim, verdict in verdicts.items() if verdict == "missed"] == [
        "cap lowered: allocations that failed, or processes out of memory"
    ]
    assert found[LOWERED].verdict == "not measured"


def test_equal_k_is_no_fault_once_memory_bounds_nothing() -> None:
    found = checks_of(caps_part(1, 6, 6, 5))
    assert found["caps: levels at which k does not grow with the cap"].value == 0.0


def test_any_out_of_memory_is_counted() -> None:
    part = caps_part(1, 5, 6, 5, 4)
    claim = "caps: allocations that failed, or processes out of memory"
    part["records"][0]["result"]["solved"]["allocator"]["num_ooms"] = 2
    assert checks_of(part)[claim].value == 2.0
    lowered = part["records"][2]["result"]["lowerings"][1]["followed"]
    lowered["allocator"]["num_ooms"] = 3
    assert checks_of(part)[claim.replace("caps", "cap lowered")].value == 3.0
    broken = record_of("cap 0.3", {"status": records.OUT_OF_MEMORY}, records.OUT_OF_MEMORY)
    assert checks_of(part_of("caps", broken))[claim].value == 1.0


def test_few_cores_raise_k() -> None:
    few = part_of(
        "few_cores",
        record_of("2 threads", sweep_result(solved=8), threads=[2]),
        record_of("4 threads", sweep_result(solved=6), threads=[4]),
    )
    found = checks_of(few, part_of("sweep", record_of("sweep", sweep_result(solved=5))))
    assert found["few cores: GPU layers gained by each loss of cores"].value == 1.0
    claim = "few cores, 2 threads: step at the solved k / best fixed k"
    assert found[claim].verdict == "reached"


def test_the_largest_model_that_trained_counts() -> None:
    def big(billions: float, seconds: float) -> Json:
        return {
            "num_parameters": billions * 1e9,
            "reference": timed_of(None, 2.0),
            "settling": settling_of(5),
            "solved": timed_of(5, seconds),
        }

    part = part_of("largest", record_of("a", big(16.0, 2.5)), record_of("b", big(15.3, 4.0)))
    found = checks_of(part)
    assert found["largest: billion parameters"].value == 16.0
    check = found["largest: share of the speed of forward and backward only"]
    assert check.value == pytest.approx(0.8)
    assert check.verdict == "reached"


def test_what_others_would_need_is_computed_beyond_the_bare_process() -> None:
    assert others_host_bytes([offload_part()]) == {"ZeRO-2 offload": 23.0, "FSDP2": 19.0}
    free = {"before building": {"available_bytes": 115 * 10**9}}
    big = {"num_parameters": 10 * GIB, "reference": timed_of(None, 2.0), "host": free}
    text = table([part_of("ten_b", record_of("ten_b", big))], [offload_part()])
    assert "computed from their measured bytes, not run" in text
    assert "| 10.74 B | ZeRO-2 offload | 23.0 | 230.0 | 107.1 | 5.0 B |" in text


def searched(name: str, billions: float, status: str) -> Json:
    """A model of another system, as its process leaves it."""
    result: Json = {
        "status": status,
        "num_parameters": int(billions * 1e9),
        "host": {"before building": {"rss_peak_bytes": GIB, "available_bytes": 123 * GIB}},
    }
    if status == records.OK:
        result["trained"] = {"step_seconds": 3.0, "tflops": 94.0, "gpu": {}}
    return record_of(f"{name} 30", result, status, search=name, layers=30)


def test_the_largest_models_of_other_systems() -> None:
    part = part_of(
        "others",
        searched("fsdp2", 6.3, records.OK),
        searched("fsdp2", 5.1, records.OK),
        searched("fsdp2", 7.5, HOST_MEMORY_LOW),
        searched("fsdp2", 6.9, HOST_MEMORY_LOW),
        searched("zero2_offload", 5.5, records.OUT_OF_MEMORY),
        # A process that broke says nothing about memory.
        searched("zero3_offload", 5.5, records.FAILED),
    )
    solved = {**sweep_result(), "num_parameters": int(12.6e9)}
    found = checks_of(part, part_of("largest", record_of("largest", solved)))
    assert found["largest of FSDP2: billion parameters (6.90 did not fit)"].value == 6.3
    assert found["largest: hytrain's parameters / FSDP2's"].value == pytest.approx(2.0)
    assert found["largest of ZeRO-2 offload: billion parameters (5.50 did not fit)"].value == 0.0
    searches = [claim for claim in found if claim.startswith("largest")]
    assert not any("ZeRO-3" in claim or "ZeRO-2 offload's" in claim for claim in searches)
    text = table([part], [])
    assert "| - | fsdp2 | 30 | 6.30 B | trained | 3.00 | 94 | - | 1.0 | 123.0 | - |" in text
    assert "| - | fsdp2 | 30 | 6.90 B | host memory low | - |" in text


def test_the_table_names_failures_and_keeps_what_they_measured() -> None:
    partial = {"status": "running", "reference": timed_of(None, 0.33)}
    text = table([part_of("sweep", record_of("sweep", partial, records.FAILED))], [])
    assert "| sweep | sweep | forward and backward only | - | 0.3300" in text
    assert "- sweep, sweep: failed; last words `RuntimeError: what went wrong`" in text
    nothing = table([part_of("sweep", record_of("sweep", None, records.SKIPPED))], [])
    assert "| sweep | sweep | skipped |" in nothing


def test_a_report_can_be_made_from_its_own_results(tmp_path: Path) -> None:
    part = part_of("sweep", record_of("sweep", sweep_result()))
    folder = write_report([part], tmp_path, [offload_part()], "a note")
    assert load_parts([(None, folder / "results.json")]) == ([part], [offload_part()])
    assert (folder / "step_time.png").stat().st_size > 0
    text = (folder / "table.md").read_text()
    assert "- Note: a note" in text
    assert "+4.4%" not in text
    assert "| sweep | sweep | 4 | 0 to 6 | host-bound |" in text


def test_runs_are_judged_by_themselves(tmp_path: Path) -> None:
    slower = sweep_result(solved=4)
    sweeps = [part_of("sweep", record_of("sweep", each)) for each in (sweep_result(), slower)]
    others = offload_part()
    others["records"].append(record_of("hytrain 0", None))
    paths = [tmp_path / name for name in ("one.json", "two.json", "A.json")]
    for path, part in zip(paths, (*sweeps, others), strict=True):
        records.write_json(path, part)
    runs = [*["--run", "2", str(paths[0])], *["--run", "1", *map(str, paths[1:])]]
    assert main([*runs, "--results", str(tmp_path / "results")]) == 0
    folder = tmp_path / "results" / "nvidia_h200_2026-01-02"
    parts, offload = load_parts([(None, folder / "results.json")])
    assert [part["run"] for part in [*parts, *offload]] == ["2", "1", "1"]
    assert [r["entry"]["label"] for r in offload[0]["records"]] == [
        "forward_backward",
        "zero2_offload",
        "fsdp2",
    ]
    checks = check_all(parts, offload)
    best = {c.part: c.verdict for c in checks if c.claim.endswith("solved k / best fixed k")}
    assert best == {"sweep, run 2": "reached", "sweep, run 1": "missed"}
    found = {check.claim: check for check in checks}
    # Only the sweep of the same run is compared.
    assert found["sweep: ZeRO-2 offload's time / hytrain's"].value == pytest.approx(1.7 / 0.40)
    text = (folder / "table.md").read_text()
    assert "| sweep, run 1 | sweep | k solved | 4 of 10 |" in text


def test_without_a_part_of_this_experiment_there_is_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records.write_json(tmp_path / "A.json", offload_part())
    assert main([str(tmp_path / "A.json")]) == 2
    assert main([]) == 2
    assert "no part of this experiment" in capsys.readouterr().err


def test_parts_of_different_machines_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = part_of("sweep"), part_of("caps")
    other["hardware"]["gpu"] = "NVIDIA A100"
    paths = [tmp_path / "one.json", tmp_path / "other.json"]
    for path, part in zip(paths, (one, other), strict=True):
        records.write_json(path, part)
    assert main([str(path) for path in paths]) == 2
    assert "NVIDIA A100" in capsys.readouterr().err
