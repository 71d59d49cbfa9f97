"""Releases of DeepSpeed and torch: one statement of them in all places, and what was run."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from hytrain.version import DEEPSPEED, has_deepspeed_internals

ROOT = Path(__file__).parents[2]
RUN: dict[str, Any] = runpy.run_path(str(ROOT / "tests/versions/run.py"))


def test_what_is_required_is_what_is_checked() -> None:
    allowed = Requirement(DEEPSPEED).specifier
    for release in ("0.18.9", "0.19", "0.19.0", "0.19.6", "0.19.7", "0.19.10", "0.20.0", "1.19.8"):
        assert has_deepspeed_internals(release) is (release in allowed), release


@pytest.mark.parametrize("release", ["0.20.0", "1.0.0"])
def test_another_series_is_refused_at_import(release: str, tmp_path: Path) -> None:
    info = tmp_path / f"deepspeed-{release}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {release}\n")
    command = [sys.executable, "-c", "import hytrain; hytrain.initialize"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode != 0
    assert run.stderr.splitlines()[-1] == (
        f"hytrain.errors.UnsupportedError: DeepSpeed {release} is installed, which has other "
        f"internals than those that this release of hytrain works with: pip install '{DEEPSPEED}'"
    )


@pytest.mark.parametrize("name", ["pyproject.toml", "Makefile", "README.md", "docs/index.md"])
def test_what_is_installed_is_what_is_required(name: str) -> None:
    assert DEEPSPEED in (ROOT / name).read_text()


def test_the_table_has_the_releases_that_are_run() -> None:
    _, head, rest = (ROOT / "docs/limits.md").read_text().partition(RUN["HEAD"])
    assert head
    rows = [line.split(" | ") for line in rest.partition("\n\n")[0].splitlines()]
    assert all(has_deepspeed_internals(row[0].strip("| ")) for row in rows)
    ran = [{f"deepspeed=={row[0].strip('| ')}", f"torch=={row[1]}"} for row in rows]
    assert all(any(release in row for row in ran) for release in RUN["RELEASES"])
    assert all(int(row[2]) > 0 and row[3] == "0" for row in rows)


def test_a_row_takes_the_place_of_an_older_one() -> None:
    old = "| 0.19.10 | 2.9.0 | 1 | 0 | a |\n| 0.19.8 | 2.9.0 | 1 | 5 | a |\n"
    text = f"before\n\n{RUN['HEAD']}{old}\nx\n"
    for row in (("0.19.8", "2.10.0", "7", "0", "b"), ("0.19.8", "2.9.0", "6", "0", "b")):
        text = RUN["with_row"](text, row)
    rows = "| 0.19.8 | 2.9.0 | 6 | 0 | b |\n| 0.19.8 | 2.10.0 | 7 | 0 | b |\n"
    rows += "| 0.19.10 | 2.9.0 | 1 | 0 | a |\n"
    assert text == f"before\n\n{RUN['HEAD']}{rows}\nx\n"


@pytest.mark.parametrize(("summary", "status"), [("", 1), ("= 28 passed =", 1), ("1 failed", 0)])
def test_an_early_end_is_no_result(summary: str, status: int) -> None:
    assert RUN["counts"]("= 1 failed, 2 passed, 1 error in 3s =", 1) == (2, 2)
    with pytest.raises(RuntimeError, match="ended early"):
        RUN["counts"](summary, status)
