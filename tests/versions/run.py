"""A short suite with releases of DeepSpeed and torch, and the table in docs/limits.md.

Each release gets an environment of its own in build/versions, on top of the one that runs this
script, and gives its disk back afterwards: up to 6 GB, since pip's torch is one for CUDA.

    python tests/versions/run.py                                 # RELEASES
    python tests/versions/run.py deepspeed==0.19.9 --dry-run     # the table stays as it is
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/limits.md"
RELEASES = ["torch==2.8.0", "deepspeed==0.19.7", "deepspeed==0.19.8", "torch==2.14.1"]
HEAD = "| DeepSpeed | torch | passed | failed | date |\n| --- | --- | --- | --- | --- |\n"
SUITE = [
    "tests/unit/engine/test_deepspeed_surface.py",
    "tests/unit/engine/test_hyper_parameters.py",
    "tests/unit/engine/test_without_optimizer.py",
    "tests/dist/test_training.py",
    "tests/dist/test_surface.py",
    "tests/dist/test_foreign_checkpoints.py",
]
"""Tests that depend on DeepSpeed: construction, refusals, checkpoints, two ranks, stages 1 to 3."""


def environment(folder: Path, release: str) -> Path:
    """Returns a new interpreter that finds a release first, and all else where this one does.

    Raises:
        subprocess.CalledProcessError: there is no such release.
    """
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    find = "import site; print(site.getsitepackages()[0])"
    own = subprocess.run([python, "-c", find], check=True, capture_output=True, text=True)
    base = site.getsitepackages()[0]
    (Path(own.stdout.strip()) / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    # DeepSpeed's setup imports torch, which an isolated build would download. torch needs libraries
    # of its own release, and must not take those of the environment below.
    flags = ["--quiet", "--no-build-isolation", "--ignore-installed"]
    flags += ["--no-deps"] if release.startswith("deepspeed") else []
    subprocess.run(
        [python, "-m", "pip", "install", *flags, release],
        check=True,
        env={**os.environ, "DS_BUILD_OPS": "0"},
    )
    return python


def outcome(python: Path, release: str, arguments: list[str]) -> tuple[str, ...]:
    """Runs the suite; returns a row of the table.

    Raises:
        RuntimeError: the release is not what is imported, or pytest ended before its summary.
    """
    clean = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    # Extensions that one release has compiled do not fit another one.
    clean["TORCH_EXTENSIONS_DIR"] = str(python.parents[1] / "extensions")
    clean["PATH"] = f"{python.parent}:{Path(sys.executable).parent}:{clean['PATH']}"
    code = "import deepspeed as d, torch as t; print(d.__version__, t.__version__.split('+')[0])"
    seen = subprocess.run([python, "-c", code], env=clean, capture_output=True, text=True)
    versions = seen.stdout.split()[-2:]  # DeepSpeed prints as well
    if release.partition("==")[2] not in versions:
        raise RuntimeError(f"{release} is not what is imported: {seen.stdout}{seen.stderr}")
    options = ["-v", "-n0", "--tb=short", "-p", "no:cacheprovider"]
    command = [str(python), "-m", "pytest", *options, *arguments, *SUITE]
    with subprocess.Popen(
        command, cwd=ROOT, env=clean, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        lines = []
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    passed, failed = counts(lines[-1] if lines else "", running.returncode)
    return (*versions, str(passed), str(failed), str(datetime.date.today()))


def counts(summary: str, status: int) -> tuple[int, int]:
    """Returns the numbers of passed and failed tests, by pytest's last line and exit status.

    Raises:
        RuntimeError: they do not fit together.
    """
    found = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", summary)}
    passed, failed = found.get("passed", 0), found.get("failed", 0) + found.get("error", 0)
    if passed + failed == 0 or (status != 0) != (failed > 0):
        raise RuntimeError(f"pytest ended early, with {status}: {summary!r}")
    return passed, failed


def with_row(text: str, row: tuple[str, ...]) -> str:
    """Returns the document with a row in its table, in place of the older one of those releases.

    Raises:
        ValueError: the document has no such table.
    """
    before, head, rest = text.partition(HEAD)
    if not head:
        raise ValueError(f"no table begins with {HEAD!r}")
    rows = rest[: re.match(r"(\|.*\n)*", rest).end()]  # type: ignore[union-attr]  # always matches
    of_these = f"| {row[0]} | {row[1]} |"
    lines = [line for line in rows.splitlines() if not line.startswith(of_these)]
    lines.append("| " + " | ".join(row) + " |")
    lines.sort(key=lambda line: [int(number) for number in re.findall(r"\d+", line)[:6]])
    return before + head + "\n".join(lines) + "\n" + rest[len(rows) :]


def main() -> int:
    """Runs the command; returns its exit status: 1 if any test failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("releases", nargs="*", metavar="RELEASE")
    parser.add_argument("--dry-run", action="store_true", help="leave the table as it is")
    parser.add_argument("--pytest", default="", help="more arguments for pytest")
    given = parser.parse_args()
    has_failed = False
    for release in given.releases or RELEASES:
        print(f"== {release}", flush=True)
        folder = ROOT / "build/versions" / release
        row = outcome(environment(folder, release), release, given.pytest.split())
        shutil.rmtree(folder)
        has_failed |= row[3] != "0"
        if not given.dry_run:
            DOCUMENT.write_text(with_row(DOCUMENT.read_text(), row))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
