"""A results.json is made of what run.py writes, and those that are kept have its rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import summary

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30

MACHINE: dict[str, Any] = {
    "gpu": "NVIDIA H200",
    "cpu": "a CPU",
    "cores": 16,
    "python": "3.12.3",
    "cuda": "13.0",
    "versions": {"torch": "2.11.0"},
    "commit": "abc1234",
    "date": "2026-01-02",
}
GPU = {"peak_allocated_bytes": 34 * GIB}


def _result(**fields: Any) -> dict[str, Any]:
    return {"hardware": MACHINE, "command": "run.py --out DIR", **fields}


def _weak_scaling() -> dict[str, Any]:
    def stage(gpus: int, *windows: list[float]) -> dict[str, Any]:
        ranks = [
            {
                "step_seconds": sum(one) / len(one),
                "window_seconds": one,
                "samples": 8,
                "tflops": 400.0,
                "gpu": GPU,
                "gpu_fraction": 0.5,
            }
            for one in windows
        ]
        return {"gpus": gpus, "results": {"hytrain": {"status": "ok", "ranks": ranks}}}

    lost = {"gpus": 2, "results": {"zero3": {"status": "timed out", "ranks": [None, None]}}}
    two = stage(2, [0.5, 0.30001], [0.25, 0.45])
    return _result(launches=[two, lost, stage(1, [0.2, 0.4])])


def _layer_major() -> dict[str, Any]:
    turn = {"seconds": 2.0, "loss": 1.0, "gpu": GPU}
    said = {"update_seconds": 0.123456, "exposed_seconds": 0.01, "clip_coefficient": 1.0}
    label = "forward and backward only, checkpointed blocks"
    modes = [
        {"label": label, "seconds": 2.0, "turns": [turn]},
        {"label": "layer-major", "seconds": 2.1, "turns": [{**turn, "statistics": said}]},
    ]
    return _result(flops=4e14, modes=modes, gradients={"layer-major": 0.0157493})


def _zero3() -> dict[str, Any]:
    def mode(loss: float, cap: float | None = None) -> dict[str, Any]:
        times = {"step_seconds": 0.5, "window_seconds": [0.4, 0.6], "losses": [loss]}
        rank = {
            "status": "ok",
            **times,
            "gpu": GPU,
            "host_rss_bytes": 3 * GIB,
            "cap_bytes": 5 * GIB,
        }
        return {"job": {"cap_share": cap}, "ranks": [rank, rank]}

    failed = {"job": {"cap_share": 0.9}, "ranks": [{"status": "out of memory"}]}
    modes = {
        "stage2": mode(1.0),
        "stage3": mode(1.25),
        "capped": mode(1.0, 0.9),
        "capped_2": failed,
    }
    return _result(modes=modes)


def _offload_step() -> dict[str, Any]:
    def record(label: str, seconds: float, *observed: dict[str, float]) -> dict[str, Any]:
        timing = {"window_seconds": [seconds, seconds], "observations": list(observed)}
        host = {"steps_rss_bytes": 4 * GIB, "steps_machine_bytes": 3 * GIB}
        result = {
            "step_seconds": seconds,
            "tflops": 400.0,
            "timing": timing,
            "worker_busy_share": 0.63 if observed else None,
            "threads": {} if observed else {"threads": 15},
            "gpu": GPU,
            "host": host,
            "num_parameters": 10,
        }
        entry = {"label": label, "system": label, "clip": None, "options": {}}
        return {"entry": entry, "status": "ok", "result": result}

    seen = {"hidden_share": 1.0, "clip_coefficient": 0.5}
    lost = {**record("fsdp2", 1.0), "status": "timed out", "result": None}
    found = [record("forward_backward", 0.5), record("hytrain 0.7", 0.75, seen), lost]
    return _result(part="A", records=found)


def _kernel_bench() -> dict[str, Any]:
    machine = {**MACHINE, "command": "hytrain bench kernel --json"}
    rate = {"gparams_per_s": 7.65764, "gbytes_per_s": 214.4134, "num_threads": 15}
    names = ("commit", "commit_then_preview", "preview", "deepspeed_adam", "deepspeed_path")
    subjects = dict.fromkeys((*names, "torch_fused", "read_write"), rate)
    return {**subjects, "machine": machine, "num_rounds": 5}


RESULTS = {
    "kernel_bench": _kernel_bench,
    "layer_major": _layer_major,
    "offload_step": _offload_step,
    "weak_scaling": _weak_scaling,
    "zero3": _zero3,
}


def _rows(experiment: str) -> list[dict[str, Any]]:
    return summary.summary(summary.ROWS[experiment], {"1": RESULTS[experiment]()})["rows"]


def test_weak_scaling_has_the_slowest_rank_of_each_window_and_what_failed() -> None:
    one, two, lost = _rows("weak_scaling")
    assert (one["gpus"], one["weak_scaling"]) == (1, 1.0)
    assert (two["step_s"], two["window_s"]) == (0.4, [0.5, 0.45])
    assert two["weak_scaling"] == pytest.approx(0.75)
    assert lost == {"run": "1", "system": "zero3", "gpus": 2, "status": "timed out"}


def test_layer_major_has_ratios_and_what_steps_say() -> None:
    reference, ours = _rows("layer_major")
    assert reference["over_reference"] == 1.0
    assert "update_s" not in reference
    assert (ours["over_reference"], ours["update_s"], ours["tflops"]) == (1.05, 0.1235, 190.5)


def test_zero3_compares_what_can_be_compared() -> None:
    _, stage3, capped, failed = _rows("zero3")
    assert (stage3["largest_loss_difference_to_stage2"], stage3["host_gib"]) == (0.25, 6.0)
    assert capped["cap_gib"] == 5.0
    assert "largest_loss_difference_to_stage2" not in capped
    assert failed == {"run": "1", "mode": "capped_2", "gpus": 1, "status": "out of memory"}


def test_offload_step_has_a_row_a_system() -> None:
    reference, ours, lost = _rows("offload_step")
    assert (reference["over_forward_backward"], reference["threads"]) == (1.0, [15])
    assert (ours["over_forward_backward"], ours["host_gib"], ours["runs"]) == (1.5, 4.0, 1)
    assert (ours["cpu_worker_busy"], ours["update_hidden"], ours["steps_clipped"]) == (
        "63%",
        "100%",
        "100%",
    )
    assert lost["status"] == "timed out"


def test_kernel_bench_has_rate_bytes_and_threads() -> None:
    (row,) = _rows("kernel_bench")
    assert row["commit"] == [7.6576, 214.413, 15]


@pytest.mark.parametrize("experiment", summary.ROWS)
def test_what_is_kept_has_the_rows_that_are_written(experiment: str) -> None:
    kept = json.loads((ROOT / "experiments" / experiment / "results.json").read_text())
    written = {key for row in _rows(experiment) for key in row} | {"run", "machine"}
    assert kept["rows"]
    assert {key for row in kept["rows"] for key in row} <= written


def test_the_command_writes_a_line_a_row(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first.json", "second.json")]
    for file in files:
        file.write_text(json.dumps(_layer_major()))
    out = tmp_path / "results.json"
    runs = [f"{file.stem}={file}" for file in files]
    assert summary.main(["layer_major", *runs, "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [run["run"] for run in found["runs"]] == ["first", "second"]
    assert found["runs"][0]["commit"] == "abc1234"
    assert found["runs"][0]["gradients"] == {"layer-major": 0.01575}
    assert found["machine"]["versions"] == {"python": "3.12.3", "torch": "2.11.0", "cuda": "13.0"}
    assert sum('"mode"' in line for line in out.read_text().splitlines()) == 4


def test_runs_of_different_machines_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = _layer_major()
    other["hardware"] = {**MACHINE, "cpu": "another CPU"}
    for name, result in (("one", _layer_major()), ("two", other)):
        (tmp_path / name).write_text(json.dumps(result))
    runs = [f"{name}={tmp_path / name}" for name in ("one", "two")]
    for arguments in (runs, [runs[0], runs[0]], ["one"]):
        with pytest.raises(SystemExit):
            summary.main(["layer_major", *arguments])
    assert "different machines" in capsys.readouterr().err
