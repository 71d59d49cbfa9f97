"""experiments/traces: what it says of ceilings that hold and of ones that do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.traces import report
from experiments.traces.cases import ACROSS, RUNS


def _run(status: str = "ok", *variants: dict[str, Any]) -> dict[str, Any]:
    return {"status": status, "job": {"entry": {"options": {"variants": list(variants)}}}}


def _summary(ceilings: dict[str, float], **seconds: float) -> dict[str, Any]:
    return {"status": "ok", "ceilings": ceilings, "seconds": seconds}


def test_a_ceiling_that_a_run_passes_is_told() -> None:
    larger = {"label": "batch x2", "fix": "larger batch", "batch_factor": 2}
    more = {"label": "k 1", "fix": "more GPU layers", "batch_factor": 1}
    out = {"runs": {"1b k 0": _run("ok", more, larger), "1b k 0, no clipping": _run()}}
    ceilings = {"larger batch": 0.1, "more GPU layers": 0.1, "no clipping": 0.25}
    runs = {
        "1b k 0": _summary(ceilings, **{"": 0.3, "k 1": 0.09, "batch x2": 0.24}),
        "1b k 0, no clipping": _summary({}, **{"": 0.26}),
    }
    found = {pair["applied"]: pair for pair in report.pairs(out, runs)}
    assert found["batch x2"]["measured"] == pytest.approx(0.12)
    assert {name: pair["holds"] for name, pair in found.items()} == {
        "k 1": False,
        "batch x2": True,
        "1b k 0, no clipping": True,
    }


def test_runs_that_failed_and_fixes_that_were_not_named_say_nothing() -> None:
    out = {"runs": {"1b k 0": _run("killed"), "1b k 0, no clipping": _run()}}
    runs = {"1b k 0": {"status": "killed"}, "1b k 0, no clipping": _summary({}, **{"": 0.2})}
    assert report.pairs(out, runs) == []
    runs["1b k 0"] = _summary({}, **{"": 0.3})
    (pair,) = report.pairs({"runs": {}}, runs)
    assert pair["holds"] is None


def test_what_is_compared_is_run() -> None:
    labels = {run.label for run in RUNS}
    assert all({recorded, applied} <= labels for recorded, _, applied in ACROSS)


@pytest.mark.experiment
def test_toys(tmp_path: Path) -> None:
    folder = Path(report.__file__).parent
    runs = ["1b k 0", "1b k 0, no clipping"]
    command = [sys.executable, str(folder / "run.py"), "--out", str(tmp_path), "--device", "cpu"]
    subprocess.run([*command, "--toy", "--runs", *runs], check=True)
    done = subprocess.run(
        [sys.executable, str(folder / "report.py"), str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "no clipping" in done.stdout
