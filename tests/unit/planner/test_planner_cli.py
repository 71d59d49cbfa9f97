"""`hytrain plan uneven`: JSON and table of a folder of cases, errors on one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.shared_data import shared_folder

from hytrain.tools import cli

Capture = pytest.CaptureFixture[str]

CASE: dict[str, Any] = {
    "model": "m",
    "gpus": ["fast", "slow", "slow"],
    "global_batch": 8,
    "dtype": "float16",
    "seq": 512,
    "ag_time": 0,
    "rs_time": 0,
    "ga_overhead_ms": 10.0,
    "comm_mem_overhead_gb": 2.0,
    "max_alloc_frac": 0.75,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    lists = [[1.0, 2.0], [2.0, 4.0]]
    latencies = {
        "fast": {"512": {"float16": [[1.0, 0.0], [2.0, 0.0], *lists]}},
        "slow": {"512": {"float16": [[2.0, 0.0], [4.0, 0.0]]}},
        "half": {"512": {"float16": [6.0, 0.5]}},
    }
    memory = {"parameters": 2**26, "profiled_compute_memory": {"float16": [1.0, 2.0]}}
    capacity = {"fast": 32.0, "slow": 32.0, "half": 32.0}
    many = CASE | {"gpus": ["fast"] * 9}
    published = {"cephalo": {"layer_time_ms": 12.5}}
    _write(tmp_path, "latencies", {"m": latencies})
    _write(tmp_path, "memory", {"paper": {"m": memory}})
    _write(tmp_path, "gpu_memory_gb", capacity)
    _write(tmp_path, "expected", [CASE | published, many | published])
    return tmp_path


def _write(folder: Path, name: str, value: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps(value))


def test_json_of_each_case(folder: Path, capsys: Capture) -> None:
    assert cli.main(["plan", "uneven", "--cases", str(folder), "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first.pop("seconds") > 0.0
    assert first == {
        "model": "m",
        "gpus": ["fast", "slow", "slow"],
        "global_batch": 8,
        "time": 16.0,
        "batch_sizes": [4, 2, 2],
        "microbatch_sizes": [4, 2, 2],
        "missing": None,
    }
    assert second["time"] is None
    assert second["batch_sizes"] is None
    assert second["microbatch_sizes"] is None
    assert "too small for 9 GPUs" in second["missing"]


def test_a_table_for_people(folder: Path, capsys: Capture) -> None:
    assert cli.main(["plan", "uneven", "--cases", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "16.000" in text
    assert "2 x slow: 2 samples, 1 x 2, 33.3% of the state each" in text
    assert "none fits" in text
    assert "12.500 *" in text
    assert "* does not fit in memory" in text


def test_the_published_cases(capsys: Capture) -> None:
    cases = shared_folder("plan_cases", "uneven")
    assert cli.main(["plan", "uneven", "--cases", str(cases), "--json"]) == 0
    times = [record["time"] for record in json.loads(capsys.readouterr().out)]
    assert times[2] is None
    assert times[4] == pytest.approx(608.66438)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("expected", {}, "must hold a list"),
        ("expected", [CASE | {"gpus": ["none"]}], "case 0 of expected.json: 'none' is missing"),
        ("expected", [CASE | {"gpus": ["half"]}], "no backward time of m on half in float16"),
        ("expected", [CASE | {"gpus": []}], "at least one GPU"),
        ("expected", [3], "case 0 of expected.json"),
        ("memory", {}, "memory.json has no entry for m in float16"),
    ],
)
def test_what_cannot_be_used_is_said_on_one_line(
    folder: Path, capsys: Capture, name: str, value: Any, words: str
) -> None:
    _write(folder, name, value)
    assert cli.main(["plan", "uneven", "--cases", str(folder)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_no_file_and_no_json_are_said(folder: Path, capsys: Capture) -> None:
    (folder / "latencies.json").write_text("{")
    assert cli.main(["plan", "uneven", "--cases", str(folder)]) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert cli.main(["plan", "uneven", "--cases", str(folder / "none")]) == 2
    assert "cannot read" in capsys.readouterr().err
