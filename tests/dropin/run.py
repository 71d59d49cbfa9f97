"""DeepSpeed's own unit tests, once with plain DeepSpeed and once with hytrain swapped in.

    make test-dropin DEEPSPEED_TESTS=<DeepSpeed's repository>/tests

"Passes with plain DeepSpeed" must mean "passes with hytrain": the exit status says whether it does
for all tests that are not listed, with reasons, in docs/dropin.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from selection import FIRST, HANGS, REST

from hytrain.formats.text_table import align

ROOT = Path(__file__).parents[2]
REASONS = ROOT / "docs" / "dropin.md"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a test ended: "passed", "failed" or "skipped", and an error's last words."""

    status: str
    words: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs both and prints the tables."""
    options = _parser().parse_args(argv)
    if options.tests is None or not (options.tests / "unit").is_dir():
        print(
            "skipped: give the tests folder of DeepSpeed's repository (of the installed release), "
            "DEEPSPEED_TESTS=<dir>"
        )
        return 0
    chosen = {"first": FIRST, "rest": REST, "all": FIRST + REST}[options.tier]
    if options.only:
        chosen = tuple(options.only)
    _build_extensions()
    with tempfile.TemporaryDirectory() as folder:
        # Out of the checkout: its conftest would put the checkout before the installed package.
        copy = Path(folder) / "tests"
        shutil.copytree(options.tests, copy)
        found = {
            engine: _run(copy, chosen, engine, options.seconds) for engine in ("plain", "hytrain")
        }
    if options.tier == "rest":
        first = [_pattern(name) for name in FIRST]
        found = {
            engine: {k: v for k, v in tests.items() if not any(p.match(k) for p in first)}
            for engine, tests in found.items()
        }
    if options.out is not None:
        options.out.write_text(
            json.dumps(
                {e: {k: [v.status, v.words] for k, v in t.items()} for e, t in found.items()}
            )
        )
    return _report(found["plain"], found["hytrain"])


def _build_extensions() -> None:
    """Compiles DeepSpeed's Adams, which plain DeepSpeed uses, before any test has a time limit.

    A test that is ended while it compiles leaves a lock behind, for which all others wait.
    """
    code = (
        "from deepspeed.accelerator import get_accelerator as get\n"
        "for name in ('FusedAdamBuilder', 'CPUAdamBuilder'):\n"
        "    get().create_op_builder(name).load(verbose=False)\n"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("tests", type=Path, nargs="?", help="DeepSpeed's tests folder")
    parser.add_argument("--tier", choices=("first", "rest", "all"), default="first")
    parser.add_argument("--only", nargs="+", help="other tests, as pytest names them")
    parser.add_argument("--seconds", type=int, default=3600, help="for each of the two runs")
    parser.add_argument("--out", type=Path, help="a JSON file of all outcomes")
    return parser


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name) + r"($|::|\[)")


def _run(copy: Path, chosen: Sequence[str], engine: str, seconds: int) -> dict[str, Outcome]:
    report = copy / f"{engine}.xml"
    environment = {
        **os.environ,
        "DROPIN_ENGINE": engine,
        "DS_ACCELERATOR": "cpu",
        "LOCAL_SIZE": "2",  # what DeepSpeed takes for the number of devices
        "OMP_NUM_THREADS": "1",
        "DS_DISABLE_REUSE_DIST_ENV": "1",
        "DS_UNITTEST_TIMEOUT": "120",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(
            (str(Path(__file__).parent), str(copy), str(ROOT), os.environ.get("PYTHONPATH", ""))
        ),
    }
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    left_out = " and ".join(f"not {name}" for name in HANGS)
    there = [name for name in chosen if (copy / name.partition("::")[0]).exists()]
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "forkserver_plugin", f"--junitxml={report}",
        "-o", "junit_family=xunit1", "-k", left_out, *there,
    ]  # fmt: skip
    with (copy / f"{engine}.log").open("w") as log:
        try:
            subprocess.run(
                command, cwd=copy, env=environment, stdout=log, stderr=log, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            print(f"{engine}: not done within {seconds} s", file=sys.stderr)
    if not report.exists():
        tail = (copy / f"{engine}.log").read_text()[-3000:]
        raise SystemExit(f"{engine}: no results\n{tail}")
    return _read(report)


def _read(report: Path) -> dict[str, Outcome]:
    found: dict[str, Outcome] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('file')}::{case.get('classname', '').rpartition('.')[2]}"
        name = f"{name}::{case.get('name')}".replace("\\", "/")
        failure = case.find("failure")
        failure = case.find("error") if failure is None else failure
        if failure is not None:
            lines = [x for x in (failure.text or "").splitlines() if re.match(r"^E +\S", x)]
            words = lines[-1][1:].strip() if lines else failure.get("message", "")
            found[name] = Outcome("failed", words[:160])
        elif case.find("skipped") is not None:
            found[name] = Outcome("skipped")
        else:
            found[name] = Outcome("passed")
    return found


def _report(plain: dict[str, Outcome], swapped: dict[str, Outcome]) -> int:
    rows: dict[str, list[int]] = {}
    lost: list[tuple[str, Outcome]] = []
    for name, outcome in plain.items():
        if outcome.status != "passed":
            continue
        row = rows.setdefault(name.partition("::")[0], [0, 0])
        row[0] += 1
        other = swapped.get(name, Outcome("missing"))
        if other.status == "passed":
            row[1] += 1
        else:
            lost.append((name, other))
    total = [sum(row[i] for row in rows.values()) for i in (0, 1)]
    table = [[name, str(a), str(b)] for name, (a, b) in rows.items()]
    table.append(["all", *map(str, total)])
    heading = ["tests that pass with", "plain DeepSpeed", "of these, hytrain"]
    print(*align([heading, *table]), sep="\n")
    reasons = REASONS.read_text() if REASONS.exists() else ""
    unknown = 0
    for name, outcome in lost:
        short = name.partition("[")[0].rpartition("/")[2]
        is_known = short.split("::", 1)[1].replace("::", ".") in reasons
        unknown += not is_known
        print(f"{'known' if is_known else 'NEW'}  {name}\n    {outcome.words or outcome.status}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main())
