"""What is kept of results decides the claims, and what the READMEs say of them are its numbers."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from experiments import report as command
from experiments.common import report
from experiments.common.records import Json, read_json
from experiments.common.report import Claim

ROOT = Path(__file__).resolve().parents[3] / "experiments"
KEPT = [name for name in command.EXPERIMENTS if (ROOT / name / "results.json").exists()]


def kept_claims(experiment: str) -> dict[str, Claim]:
    _, claims = command.of(experiment)
    return {
        claim.text: claim for claim in claims(read_json(ROOT / experiment / "results.json")["rows"])
    }


CLAIMS = {
    "layer_major": {
        "2026-11-22: layer-major, activations: keep": "1.022",
        "2026-11-22: layer-major, activations: offload": "1.009",
    },
    "offload_step": {"gpu_fraction 0.7: ZeRO-2 offload's time / hytrain's": "4.00"},
    "solve_k": {
        "3 sweep: step at the solved k / best fixed k": "1.000",
        "4 sweep: largest prediction error": "16 %",
        "1 sweep: largest prediction error": "5.1 %",
        "1 sweep: step at the solved k / best fixed k": "1.004",
        "4 sweep: step at the solved k / best fixed k": "0.999",
        "2 ten_b: share of the speed of forward and backward only": "79.2 %",
    },
    "unequal_gpus": {
        "8 3 memory: step predicted, error": "5.9 %",
        "8 3 offload: step predicted, error": "4.7 %",
    },
    "weak_scaling": {
        "x4_2026-11-22: hytrain on 4 GPUs: weak scaling": "1.008",
        "x2_2026-11-22: hytrain on 2 GPUs: weak scaling": "0.988",
        "x4_2026-11-22: zero2 on 4 GPUs: its time over hytrain's": "3.4",
    },
}
"""Claims by how their texts begin, and the number as the experiment's README writes it."""


@pytest.mark.parametrize("experiment", CLAIMS)
def test_readmes_say_what_the_results_decide(experiment: str) -> None:
    text = (ROOT / experiment / "README.md").read_text()
    found = kept_claims(experiment)
    for begin, number in CLAIMS[experiment].items():
        (claim,) = [one for key, one in found.items() if key.startswith(begin)]
        assert claim.value is not None
        digits = len(number.removesuffix(" %").partition(".")[2])
        value = 100 * claim.value if number.endswith(" %") else claim.value
        assert f"{value:.{digits}f}" == number.removesuffix(" %"), claim
        assert number in text


@pytest.mark.parametrize("experiment", KEPT)
def test_every_limit_that_is_missed_is_said_to_be(experiment: str) -> None:
    missed = [c.text for c in kept_claims(experiment).values() if c.verdict.startswith("missed")]
    told = {
        "offload_step": ["4.5 times ZeRO-2 offload at 0.7 is missed"],
        "solve_k": ["ran out of memory", "10 % more GPU memory", "off by up to 16 %"],
        "unequal_gpus": ["29 %", "9.1 %", "40 % off in run 3", "16 % too short"],
    }
    text = " ".join((ROOT / experiment / "README.md").read_text().split())
    text += " ".join(read_json(ROOT / experiment / "results.json").get("note", "").split())
    assert not missed or experiment in told, missed
    assert all(words in text for words in told.get(experiment, []))


@pytest.mark.parametrize("experiment", KEPT)
def test_what_is_kept_is_printed(experiment: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([experiment, str(ROOT / experiment / "results.json")]) == 0
    text = capsys.readouterr().out
    assert text.count("\n| ") >= len(read_json(ROOT / experiment / "results.json")["rows"])


def test_the_published_ten_b_setting() -> None:
    found = read_json(ROOT / "convergence" / "ten_b.json")
    text = " ".join((ROOT / "convergence" / "README.md").read_text().split())
    losses, held_out = found["losses"], found["held_out"]
    last = statistics.fmean(losses[-20:])
    assert f"Loss {losses[0]:.3f} at the first step, {last:.3f} in the mean of the last 20" in text
    assert f"held out {held_out['0']:.3f} before, {held_out['300']:.3f} after" in text
    share = found["reference_seconds"] / found["last_median_seconds"]
    assert f"**{found['last_median_seconds']:.3f} s a step**" in text
    assert f"{share:.0%}".replace("%", " %") + " of the speed" in text
    assert len(losses) == len(found["step_seconds"]) == len(found["k"]) == 300


def test_verdicts() -> None:
    assert Claim("a", None, 1.0).verdict == "not measured"
    assert Claim("a", 2.0).verdict == "reported"
    assert Claim("a", 1.0, 1.0).verdict == "reached"
    assert Claim("a", 1.1, 1.0).verdict == "missed"
    assert Claim("a", 4.0, 4.5, at_least=True).verdict == "missed"
    assert Claim("a", 4.0, 4.5, at_least=True, ceiling=4.3).verdict == "missed: above the ceiling"


MACHINE: Json = {
    **{"gpu": "NVIDIA H200", "cpu": "a CPU", "cores": 16, "python": "3.12.3", "cuda": "13.0"},
    **{"versions": {"torch": "2.11.0"}, "commit": "abc1234", "date": "2026-01-02"},
}


def _result(cpu: str = "a CPU") -> Json:
    rank = {
        **{"status": "ok", "losses": [1.0], "step_seconds": 0.5, "window_seconds": [0.4, 0.6]},
        **{"tflops": 1.0, "host_bytes": 3 * 2**30, "gpu": {"peak_allocated_bytes": 34 * 2**30}},
    }
    ended = {"label": "stage3", "job": {}, "status": "ok", "ranks": [rank, rank], "log": []}
    failed = {"label": "capped", "job": {}, "status": "failed", "ranks": [], "log": ["words"]}
    hardware = {**MACHINE, "cpu": cpu}
    return {"command": "run.py --out DIR", "hardware": hardware, "jobs": [ended, failed]}


def test_the_command_keeps_a_line_a_row(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / f"{name}.json").write_text(json.dumps(_result()))
    runs = [f"{name}={tmp_path / name}.json" for name in ("first", "second")]
    out = tmp_path / "results.json"
    assert command.main(["zero3", *runs, "--out", str(out)]) == 0
    found = read_json(out)
    assert [(run["run"], run["commit"]) for run in found["runs"]] == [
        ("first", "abc1234"),
        ("second", "abc1234"),
    ]
    assert found["machine"]["versions"] == {"python": "3.12.3", "torch": "2.11.0", "cuda": "13.0"}
    ended, failed = found["rows"][:2]
    assert (ended["host_gib"], ended["peak_gpu_gib"], ended["gpus"]) == (6.0, 34.0, 2)
    assert (failed["status"], failed["words"]) == ("failed", "words")
    assert sum('"mode"' in line for line in out.read_text().splitlines()) == 4


def test_runs_of_different_machines_are_not_mixed() -> None:
    rows, _ = command.of("zero3")
    with pytest.raises(ValueError, match="different machines"):
        report.summary(rows, {"one": _result(), "other": _result("another CPU")})
